"""The target's network as the library computes it, for draft heads that are trained through its frozen layers; and one
of its shape with random layers.

The playground's hooks compute without gradients, so the weights are copied into a network of the library's own class.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor
from transformers import DynamicCache

from playground.engine.loading.stored_weights import is_quantised
from playground.engine.model import Model
from playground.errors import Refusal

PLAIN = "sdpa"  # attention of the library, in place of the playground's that a loaded network names


def untrained(model: Model, seed: int) -> Model:
    """A model with the embeddings of another one, and layers with the random weights that its library begins with."""
    network = model.network
    config = deepcopy(network.config)
    config._attn_implementation = PLAIN
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        made = type(network)._from_config(config, dtype=torch.float32).eval()
        made.get_input_embeddings().weight.data.copy_(network.get_input_embeddings().weight)
    return Model(made.to(model.device), model.tokenizer, f"{model.name} without training")


class FrozenNetwork:
    """A copy of a model's network in float32 on the CPU. Gradients flow through it, and not to its weights."""

    def __init__(self, model: Model):
        """Raises Refusal if the weights are quantised."""
        if is_quantised(model.network):
            raise Refusal(
                f"The weights of {model.name} are quantised ({model.quantization}), and a draft head is trained "
                "through its layers: choose a model that is not quantised.",
                "model",
            )
        config = deepcopy(model.network.config)
        config._attn_implementation = PLAIN
        weights = {name: tensor.clone().float().cpu() for name, tensor in model.network.state_dict().items()}
        with torch.inference_mode(False):
            self.network = type(model.network)._from_config(config, dtype=torch.float32)
            self.network.load_state_dict(weights)
        self.network.eval().requires_grad_(False)
        self.decoder = self.network.get_decoder()
        self._rotates = model.rotate is not None
        self.heads: int = config.get_text_config().num_attention_heads

    def hidden(self, ids: Tensor, rows: Tensor, positions: Tensor, seen: Tensor, layer: int = 0) -> Tensor:
        """Inputs of the lm_head for rows after texts, as `FrozenTarget.hidden` says."""
        cache = self._cache(ids, torch.arange(ids.shape[1])[None])
        bias = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[:, None]
        with self._entering(layer, rows):
            found = self.decoder(
                inputs_embeds=rows if not layer else torch.zeros_like(rows), attention_mask=bias,
                position_ids=positions, past_key_values=cache,
            )
        return found.last_hidden_state

    def last_cache(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value states of the last layer."""
        layer = self._cache(ids, positions).layers[-1]
        return layer.keys, layer.values

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding; those of no rotation if the model has no such function."""
        if not self._rotates:
            nothing = torch.zeros(1, 1, dtype=torch.long)
            width = self.last_cache(nothing, nothing)[0].shape[-1]
            return torch.ones(len(positions), width), torch.zeros(len(positions), width)
        cos, sin = self.decoder.rotary_emb(torch.zeros(1), positions[None])
        return cos[0], sin[0]

    @torch.no_grad()
    def _cache(self, ids: Tensor, positions: Tensor) -> DynamicCache:
        cache = DynamicCache(config=self.network.config)
        self.decoder(input_ids=ids, position_ids=positions.expand_as(ids), past_key_values=cache)
        return cache

    @contextmanager
    def _entering(self, layer: int, rows: Tensor) -> Iterator[None]:
        """The rows replace the input of a layer; those before it run on nothing."""
        if not layer:
            yield
            return
        hook = self.decoder.layers[layer].register_forward_pre_hook(lambda module, inputs: (rows, *inputs[1:]))
        try:
            yield
        finally:
            hook.remove()
