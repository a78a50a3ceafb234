"""The model made of a loaded network: one that continues text, or one that fills masks, as its config says."""
from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.block_denoiser import BlockDenoiser, KnownFirstDenoiser
from playground.engine.denoiser import MaskedDenoiser
from playground.engine.masked_models import Masking, masking_of
from playground.engine.model import Model


def loaded_model(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, revision: str, quantization: str
) -> Model | MaskedDenoiser:
    """Raises Refusal if the network cannot be run."""
    return _kind(masking_of(network.config))(network, tokenizer, name, revision, quantization)


def _kind(masking: Masking | None) -> type[Model] | type[MaskedDenoiser]:
    if masking is None:
        return Model
    if masking.block_length:
        return BlockDenoiser
    return KnownFirstDenoiser if masking.known_first else MaskedDenoiser
