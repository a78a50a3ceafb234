"""Multi-token prediction layers that ship inside a checkpoint, read and computed by the library's own class.

Layer k reads the states that the layer before it put out, or the target's for the first, and the embedding of the token
k + 1 positions further on. DeepSeek-AI 2024, arXiv 2412.19437.
"""
from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from playground.errors import Refusal

log = logging.getLogger(__name__)


class MtpLayers:
    """The layers of one model. Their states of a text are in a cache that the caller keeps."""

    def __init__(self, layers: MtpModel):
        layers.set_attn_implementation("eager")  # the network's own is the playground's, which needs a KV cache of ours
        self.layers = layers.eval().requires_grad_(False)

    @classmethod
    def of(cls, network: PreTrainedModel, name: str) -> MtpLayers:
        """Those of a network's checkpoint. Raises Refusal if it has none, or if they are incomplete."""
        if not count_of(network):
            raise Refusal(
                f"{name} has no layers for multi-token prediction: choose a model whose config says num_mtp_layers, or "
                "another drafter.",
                "mtp",
            )
        try:
            return cls(MtpModel.from_pretrained(network, device_map={"": network.device}))
        except Exception as reason:  # a checkpoint may lack them, or name them otherwise, in any way
            log.info("the MTP layers of %s cannot be read: %s", name, reason)
            raise Refusal(
                f"The layers for multi-token prediction of {name} are not in its files, or not as the transformers "
                "library reads them: choose another drafter.",
                "mtp",
            ) from None

    @property
    def count(self) -> int:
        return len(self.layers.layers)

    def new_cache(self) -> MtpCache:
        cache = MtpCache(config=self.layers.config)
        cache.activate_past_recording()
        return cache

    @torch.inference_mode()
    def states(self, number: int, states: Tensor, tokens: list[int], first: int, cache: MtpCache) -> Tensor:
        """The output [n, hidden_size] of a layer for states [n, hidden_size] and tokens at positions from `first` on.

        The cache then holds n more rows.
        """
        ids = torch.tensor([tokens], device=states.device)
        positions = torch.arange(first, first + len(tokens), device=states.device)[None]
        return self.layers.forward_layer(number, states[None], positions, cache, input_ids=ids)[0]

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Logits [n, V] of outputs [n, hidden_size]."""
        logits = self.layers._project_to_logits(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def count_of(network: PreTrainedModel) -> int:
    """How many layers for multi-token prediction a network's config promises."""
    return getattr(network.config.get_text_config(), "num_mtp_layers", None) or 0
