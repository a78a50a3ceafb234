"""The model made of a loaded network: one that continues text, or one that fills masks, as its config says."""
from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.denoiser import MaskedDenoiser
from playground.engine.masked_models import masking_of
from playground.engine.model import Model


def loaded_model(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, revision: str, quantization: str
) -> Model | MaskedDenoiser:
    """Raises Refusal if the network cannot be run."""
    kind = Model if masking_of(network.config) is None else MaskedDenoiser
    return kind(network, tokenizer, name, revision, quantization)
