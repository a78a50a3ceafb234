"""Published draft heads, read from their folders: EAGLE-1 and EAGLE-3 of their authors, DFlash of its authors and the
transformers library, Medusa's heads of the second version, and all seven kinds of vLLM's `speculators`: EAGLE-3,
P-EAGLE, DFlash, DFlash 2, DSpark, XPress and MTP.

A folder holds a config.json and safetensors. What does not fit the target, or has a part that is not supported, is
refused in one sentence. Weights are renamed as the strategies expect them.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from playground.engine.checkpoint.catalogue import is_local
from playground.engine.checkpoint.config_limits import JSON_BYTES, check_raw_config
from playground.engine.checkpoint.hub_files import fetch_files, locate, tensors
from playground.engine.checkpoint.model_files import SINGLE, TOKENIZER
from playground.engine.model import Model
from playground.errors import Refusal
from playground.training.head_checks import MALFORMED, check_fits, check_usable

Weights = dict[str, Tensor]
EAGLE_3 = "LlamaForCausalLMEagle3"  # the architecture in the authors' and SpecForge's configs
LIBRARY_DFLASH = "muse_glimmer_assistant"  # the transformers library's model type with a DFlash drafter
LIBRARY_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
COPIES = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.", "t2d")  # of the target, or not needed
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # what P-EAGLE's configs call the mask
BLOCK_PARTS = {  # parts that only drafters of one kind have
    "dspark": {"markov_head", "confidence_head"}, "dflash2": {"candidate_selector"}, "xpress": {"refiner_head"},
}
TABLES = (  # of all the target's tokens
    "markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook",
    "refiner_head.token_embed.weight",
)
BIASES = ("markov_head.markov_w2.weight", "refiner_head.readout.weight")  # of all tokens that are drafted
COUNTS = ("selector_top_k", "num_jacobi_passes")  # entries of the configs of DFlash 2 and XPress
PICKLES = ("*.bin", "*.pt", "*.pth")
MTP_LAYER, MTP_STEPS = "mtp_layers.0.", 3
MARKS = ("speculators_model_type", "dflash_config", "medusa_num_heads")  # entries that only configs of heads have
HEAD_WEIGHTS = frozenset({"fc.weight", "0.0.linear.weight"})  # of EAGLE, and of Medusa
RANKS = 10  # of Medusa's heads, whose files do not say how often each is right
DECAY = 0.8


class PublicHead(NamedTuple):
    """A published head."""

    strategy: str
    weights: Weights


def names_head(name: str) -> bool:
    """Whether a folder or hub id is a draft head instead of a model, by its config or the names of its weights.

    Raises Refusal if there is no such folder, or nothing of that name on the hub.
    """
    if is_local(name):
        return False
    source = locate(name)
    if "config.json" not in source.files:
        return False
    config = read_object(fetch_files(source, "config.json") / "config.json")
    if config is None or _is_marked(config):
        return config is not None
    lacks_tokenizer = not any(file in source.files for file in TOKENIZER)
    return lacks_tokenizer and SINGLE in source.files and not HEAD_WEIGHTS.isdisjoint(tensors(source))


def _is_marked(config: dict[str, Any]) -> bool:
    """Whether a config says that it belongs to a draft head."""
    kinds = [*_listed(config.get("architectures")), config.get("model_type")]
    return any(name in config for name in MARKS) or EAGLE_3 in kinds or LIBRARY_DFLASH in kinds


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def load_head(name: str, model: Model) -> PublicHead:
    """The head of a folder or hub id, fetched if need be. Raises Refusal."""
    if model.fills:
        raise Refusal(
            f"{name} is a draft head, and {model.name} is a diffusion model that needs none: choose an autoregressive "
            "model.",
            "draft",
        )
    try:
        return read_head(fetch_files(locate(name), "*.json", "*.safetensors"), model)
    except Refusal as refusal:
        raise Refusal(str(refusal), "draft") from None


def read_head(folder: Path, model: Model) -> PublicHead:
    """The head in a folder, with weights as the strategy expects them. Raises Refusal."""
    config, weights = _config(folder), read_weights(folder)
    strategy, convert = _kind(folder, config, weights)
    try:
        found = convert(folder, config, weights, model)
    except KeyError as missing:
        raise Refusal(f"{folder} lacks the weights {missing.args[0]}: download the head again.", "from") from None
    except MALFORMED:
        raise Refusal(
            f"The config.json in {folder} does not describe the weights beside it: download the head again.", "from"
        ) from None
    check_usable(folder, strategy, found, model)
    return PublicHead(strategy, found)


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if it cannot be read or is something else."""
    try:
        if path.stat().st_size > JSON_BYTES["config.json"]:
            return None
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _config(folder: Path) -> dict[str, Any]:
    config = read_object(folder / "config.json")
    if config is None:
        raise Refusal(
            f"{folder} has no readable config.json, so it is no draft head: name the folder that has one.", "from"
        )
    check_raw_config(str(folder), folder / "config.json")
    return config


def read_weights(folder: Path) -> Weights:
    """All tensors of the safetensors in a folder. Raises Refusal."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(path for pattern in PICKLES for path in folder.glob(pattern)):
        raise Refusal(
            f"The weights in {folder} are a pickle, which can execute code: convert them to safetensors elsewhere.",
            "from",
        )
    check_fits(folder, files)
    weights: Weights = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                weights |= {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError):
            raise Refusal(f"{path} is damaged: download it again.", "from") from None
    if not weights:
        raise Refusal(f"{folder} has no weights: a file that ends in .safetensors is needed.", "from")
    return weights


Convert = Callable[[Path, dict[str, Any], Weights, Model], Weights]


def _kind(folder: Path, config: dict[str, Any], weights: Weights) -> tuple[str, Convert]:
    """The strategy, and the function that converts the weights."""
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    if kind is not None:
        raise Refusal(
            f"{folder} is a head of the kind {str(kind)[:40]}, which is not supported: choose one of "
            f"{', '.join(KINDS)}.",
            "from",
        )
    if "dflash_config" in config or config.get("model_type") == LIBRARY_DFLASH:
        return KINDS[_block_kind(weights)]
    if EAGLE_3 in _listed(config.get("architectures")):
        return KINDS["peagle" if "mask_hidden" in weights else "eagle3"]
    if "0.0.linear.weight" in weights:
        return "medusa", _medusa
    if "fc.weight" in weights:
        return "eagle", _eagle
    raise Refusal(f"{folder} is no EAGLE or Medusa head, by its config and weights: choose another folder.", "from")


def _eagle_3(folder: Path, config: dict[str, Any], weights: Weights, model: Model) -> Weights:
    layer = config.get("transformer_layer_config") or config
    if "sliding_attention" in _listed(layer.get("layer_types")):
        raise Refusal(
            f"The head in {folder} has layers that see a window of the text, which is not supported for this kind: "
            "choose another head.",
            "from",
        )
    layers = config.get("eagle_aux_hidden_state_layer_ids") or [2, model.depth // 2, model.depth - 3]
    weights = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in weights.items()}
    _check_size(folder, "hidden size", weights["fc.weight"].shape[1] // len(layers), model.width, model)
    _check_vocabulary(folder, weights, model)
    if max(layers) >= model.depth:
        raise Refusal(
            f"The head in {folder} reads layer {max(layers)}, and {model.name} has {model.depth} layers: choose a head "
            "for this model.",
            "from",
        )
    own = {name: tensor for name, tensor in weights.items() if not name.startswith(COPIES)}
    if config.get("embed_requires_grad"):  # it was trained with embeddings of its own
        own["embed_tokens.weight"] = weights["embed_tokens.weight"]
    facts = _facts(layer, weights, "midlayer.")
    facts |= {flag: torch.tensor(int(bool(config.get(flag)))) for flag in ("norm_before_residual", "norm_output")}
    return {**own, **facts, "layers": torch.tensor(layers)}


def _p_eagle(folder: Path, config: dict[str, Any], weights: Weights, model: Model) -> Weights:
    mask = next((config[name] for name in MASKS if config.get(name) is not None), None)
    found = {**_eagle_3(folder, config, weights, model), "mask_token_id": torch.tensor(mask)}
    _check_mask(folder, found, model)
    return found


def _eagle(folder: Path, config: dict[str, Any], weights: Weights, model: Model) -> Weights:
    _check_size(folder, "hidden size", weights["fc.weight"].shape[0], model.width, model)
    _check_vocabulary(folder, weights, model)
    if "layers.1.mlp.up_proj.weight" in weights:
        raise Refusal(f"The head in {folder} has several layers, and one is supported: choose another head.", "from")
    own = {name: tensor for name, tensor in weights.items() if not name.startswith(COPIES)}
    return {**own, **_facts(config, weights, "layers.0.")}


def _dflash(folder: Path, config: dict[str, Any], weights: Weights, model: Model) -> Weights:
    found = dflash_weights(config, weights)
    layers = found["layers"].tolist()
    _check_size(folder, "hidden size", found["fc.weight"].shape[1] // len(layers), model.width, model)
    _check_size(folder, "hidden size", found["fc.weight"].shape[0], model.width, model)
    _check_vocabulary(folder, weights, model)
    if max(layers) > model.depth:
        raise Refusal(
            f"The drafter in {folder} reads the output of layer {max(layers)}, and {model.name} has {model.depth} "
            "layers: choose a drafter for this model.",
            "from",
        )
    _check_mask(folder, found, model)
    drafted = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else model.vocabulary
    mixed = weights["refiner_head.mix_l"].shape[1] if "refiner_head.mix_l" in weights else config["block_size"]
    if any(len(weights[name]) != drafted for name in BIASES if name in weights) or mixed != config["block_size"]:
        raise ValueError("parts of different sizes")
    return found


def _check_mask(folder: Path, found: Weights, model: Model) -> None:
    if not 0 <= int(found["mask_token_id"]) < model.vocabulary:
        raise Refusal(
            f"The mask of the drafter in {folder} is token {int(found['mask_token_id'])}, and {model.name} has "
            f"{model.vocabulary}: choose a drafter for this model.",
            "from",
        )


def dflash_weights(config: dict[str, Any], weights: Weights) -> Weights:
    """A DFlash drafter's weights and settings as the strategy expects them, from the config of any of its formats.

    `speculators` counts a layer by its input; the authors and the library count it by its output. Raises KeyError.
    """
    layer, own = config.get("transformer_layer_config") or config, config.get("dflash_config") or config
    layers = config.get("aux_hidden_state_layer_ids") or [index + 1 for index in own["target_layer_ids"]]
    renamed = {_renamed(name): tensor for name, tensor in weights.items() if not name.startswith(COPIES)}
    kind = config.get("speculators_model_type")
    anchored = config.get("sample_from_anchor", (kind or _block_kind(weights)) == "dspark")
    non_causal = config.get("sliding_window_non_causal", kind == "dflash2")
    own = {**config, **own}
    return {
        **renamed,
        **_facts(layer, renamed, "layers.0."),
        **_reach(layer, kind is not None, bool(non_causal)),
        "layers": torch.tensor(layers),
        "block_size": torch.tensor(config["block_size"]),
        "mask_token_id": torch.tensor(own["mask_token_id"]),
        "sample_from_anchor": torch.tensor(bool(anchored)),
        **{name: torch.tensor(own[name]) for name in COUNTS if name in own},
    }


def _block_kind(weights: Weights) -> str:
    """Which of the kinds that fill blocks a drafter is of, by its weights."""
    begun = {name.split(".")[0] for name in weights}
    return next((kind for kind, parts in BLOCK_PARTS.items() if begun & parts), "dflash")


def _reach(layer: dict[str, Any], speculators: bool, non_causal: bool) -> Weights:
    """What the rows of a block see in each layer: `speculators` counts a window from the block's first token, and masks
    what comes after a row in those layers unless the config says otherwise.
    """
    kinds = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    sliding = [kind == "sliding_attention" for kind in kinds]
    return {
        "window": torch.tensor([layer["sliding_window"] if each else 0 for each in sliding]),
        "causal": torch.tensor([each and speculators and not non_causal for each in sliding]),
        "from_anchor": torch.tensor(speculators),
    }


def _mtp(folder: Path, config: dict[str, Any], weights: Weights, model: Model) -> Weights:
    layer = config.get("transformer_layer_config") or {}
    if layer.get("model_type", "qwen3") != "qwen3":
        raise Refusal(
            f"The head in {folder} has a layer of {str(layer['model_type'])[:40]}, and one of qwen3 is supported: "
            "choose another head.",
            "from",
        )
    own = {name.removeprefix(MTP_LAYER): tensor for name, tensor in weights.items() if name.startswith(MTP_LAYER)}
    _check_size(folder, "hidden size", own["input_proj.weight"].shape[0], model.width, model)
    _check_vocabulary(folder, weights, model)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    steps = methods[0].get("speculative_tokens") or MTP_STEPS
    return {**own, **_facts(layer, own, ""), "steps": torch.tensor(steps)}


def _renamed(name: str) -> str:
    for theirs, ours in LIBRARY_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _medusa(folder: Path, config: dict[str, Any], weights: Weights, model: Model) -> Weights:
    _check_size(folder, "hidden size", weights["0.0.linear.bias"].shape[0], model.width, model)
    if other := next((name for name in weights if ".linear." not in name), None):
        raise Refusal(
            f"The Medusa heads in {folder} have lm_heads of their own ({other[:40]}), and only those of the second "
            "version, which share the target's, are supported: choose other heads.",
            "from",
        )
    heads = 1 + max(int(name.split(".")[0]) for name in weights)
    if heads > len(weights):
        raise ValueError("numbers of heads that have no weights")
    halving = 0.5 ** torch.arange(1, RANKS + 1)
    return {**weights, "accuracy": torch.stack([halving * DECAY**head for head in range(heads)])}


def _facts(config: dict[str, Any], weights: Weights, layer: str) -> Weights:
    """What the weights do not tell of the attention, as tensors."""
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or weights[f"{layer}self_attn.q_proj.weight"].shape[0] // heads
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0
    eps = config.get("rms_norm_eps") or 1e-6
    return {
        "head_dim": torch.tensor(head_dim),
        "rope_theta": torch.tensor(theta, dtype=torch.float64),
        "rms_norm_eps": torch.tensor(eps, dtype=torch.float64),
    }


def _check_vocabulary(folder: Path, weights: Weights, model: Model) -> None:
    for name in ("t2d", "embed_tokens.weight", *TABLES):
        if name in weights:
            _check_size(folder, "vocabulary", len(weights[name]), model.vocabulary, model)


def _check_size(folder: Path, what: str, found: int, needed: int, model: Model) -> None:
    if found != needed:
        raise Refusal(
            f"The head in {folder} is for a model of {what} {found}, and {model.name} has {needed}: choose a head for "
            "this model.",
            "from",
        )


KINDS: dict[str, tuple[str, Convert]] = {
    "eagle3": ("eagle_3", _eagle_3),
    "peagle": ("p_eagle", _p_eagle),
    "dflash": ("dflash", _dflash),
    "dflash2": ("dflash_2", _dflash),
    "dspark": ("dspark", _dflash),
    "xpress": ("xpress", _dflash),
    "mtp": ("mtp", _mtp),
}
"""The strategy, and the function that converts the weights, by what `speculators` calls the kind."""
