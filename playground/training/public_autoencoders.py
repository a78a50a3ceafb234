"""Published sparse autoencoders, read from folders with a cfg.json and safetensors: those of SAELens (standard, TopK
and JumpReLU) and those of EleutherAI's `sparsify`.

Both are written here as f = act(x E^T + c): some subtract the decoder's bias from the state first, which then goes into
c. What would compute something else is refused.
"""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from playground.algorithms.overlays.sparse_autoencoder import SparseAutoencoder
from playground.engine.model import Model
from playground.errors import Refusal
from playground.training.public_heads import read_object, read_weights

PLAIN = ("", "none", "None")
KINDS = ("standard", "topk", "jumprelu")


def read_autoencoder(folder: Path, model: Model) -> tuple[SparseAutoencoder, int]:
    """An autoencoder, and the layer whose input it reads. Raises Refusal if it is not one for this model."""
    config, weights = read_object(folder / "cfg.json"), read_weights(folder)
    if config is None:
        raise Refusal(f"{folder} has no readable cfg.json: name the folder of a sparse autoencoder.", "from")
    try:
        sae = _sparsify(config, weights) if "encoder.weight" in weights else _sae_lens(folder, config, weights)
        layer = _layer(folder, config)
    except KeyError as missing:
        raise Refusal(f"{folder} lacks {missing.args[0]}: download the autoencoder again.", "from") from None
    except (TypeError, ValueError, AttributeError, RuntimeError):
        raise Refusal(f"The cfg.json in {folder} does not describe the weights: download them again.", "from") from None
    _check(folder, sae, layer, model)
    return sae, layer


def _sae_lens(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> SparseAutoencoder:
    encoder, centre = weights["W_enc"].float().T.contiguous(), weights["b_dec"].float()
    kind = str(config.get("architecture", "standard"))
    normed = str(config.get("normalize_activations", "none"))
    if kind not in KINDS or normed not in PLAIN:
        raise Refusal(
            f"The autoencoder in {folder} is {kind[:40]} with normalised activations {normed[:40]}, which is not "
            f"supported: choose one that is {' or '.join(KINDS)}, with none.", "from",
        )
    bias = weights["b_enc"].float()
    if config.get("apply_b_dec_to_input", False):
        bias = bias - encoder @ centre
    threshold = weights["threshold"].float() if kind == "jumprelu" else torch.zeros_like(bias)
    kept = config.get("k") or (config.get("activation_fn_kwargs") or {}).get("k") or 0
    return SparseAutoencoder(encoder, bias, weights["W_dec"].float(), centre, threshold, int(kept))


def _sparsify(config: dict[str, Any], weights: dict[str, Tensor]) -> SparseAutoencoder:
    encoder, centre = weights["encoder.weight"].float(), weights["b_dec"].float()
    bias = weights["encoder.bias"].float() - encoder @ centre
    return SparseAutoencoder(
        encoder, bias, weights["W_dec"].float(), centre, torch.zeros_like(bias), int(config["k"])
    )


def _layer(folder: Path, config: dict[str, Any]) -> int:
    """The layer whose input it reads: "blocks.3.hook_resid_post" is that of layer 4, and so is a folder layers.3."""
    hook = str((config.get("metadata") or {}).get("hook_name") or config.get("hook_name") or folder.resolve().name)
    found = re.fullmatch(r"blocks\.(\d{1,4})\.hook_resid_(pre|post)|layers\.(\d{1,4})", hook)
    if not found:
        raise Refusal(
            f"The autoencoder in {folder} reads {hook[:40]}, and one of the states between layers is needed: choose "
            "one of hook_resid_pre or hook_resid_post.", "from",
        )
    return int(found[3]) + 1 if found[3] else int(found[1]) + (found[2] == "post")


def _check(folder: Path, sae: SparseAutoencoder, layer: int, model: Model) -> None:
    count, width = sae.encoder.shape
    shapes = [tuple(part.shape) for part in (sae.bias, sae.decoder, sae.centre, sae.threshold)]
    if width != model.width or layer > model.depth:
        raise Refusal(
            f"The autoencoder in {folder} reads states of {width} numbers at layer {layer}, and {model.name} has "
            f"{model.width} and layers 0 to {model.depth}: choose one for this model.", "from",
        )
    finite = all(bool(part.isfinite().all()) for part in sae[:-1])
    if shapes != [(count,), (count, width), (width,), (count,)] or sae.most < 0 or not finite:
        raise Refusal(f"The weights in {folder} have sizes that do not fit, or gaps: download them again.", "from")
