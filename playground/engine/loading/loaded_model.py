"""The model made of a loaded network: one that continues text, or one that fills masks, as its config says."""
from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.canvas.block_denoiser import BlockDenoiser, KnownFirstDenoiser
from playground.engine.canvas.denoiser import CanvasNetwork, MaskedDenoiser
from playground.engine.canvas.masked_models import Masking, is_noise_model, masking_of
from playground.engine.canvas.noise_denoiser import NoiseDenoiser
from playground.engine.encoder_decoder.configs import is_encoder_decoder
from playground.engine.encoder_decoder.model import EncoderDecoder
from playground.engine.loading.finite_weights import check_finite
from playground.engine.model import Model


def loaded_model(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, revision: str, quantization: str
) -> Model | CanvasNetwork:
    """Raises Refusal if the network cannot be run."""
    check_finite(name, network)
    if network.device.type == "cuda":
        # its kernels are planned again for each shape and thread, and contexts grow with every token
        torch.backends.cuda.enable_cudnn_sdp(False)
    if is_noise_model(network.config):
        return NoiseDenoiser(network, tokenizer, name, revision, quantization)
    if is_encoder_decoder(network.config):
        return EncoderDecoder(network, tokenizer, name, revision, quantization)
    return _kind(masking_of(network.config))(network, tokenizer, name, revision, quantization)


def _kind(masking: Masking | None) -> type[Model] | type[MaskedDenoiser]:
    if masking is None:
        return Model
    if masking.block_length:
        return BlockDenoiser
    return KnownFirstDenoiser if masking.known_first else MaskedDenoiser
