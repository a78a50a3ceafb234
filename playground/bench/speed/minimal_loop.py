"""A minimal greedy decoding loop for Llama and Qwen2 networks, with a preallocated KV cache.

No events, no strategies, no trees, no text: the practical limit that the playground's lanes are compared with. It uses
the network's own weights, and tokens stay on the device until the last one is chosen.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

KINDS = ("llama", "qwen2")


def has_loop(network: PreTrainedModel) -> bool:
    """Whether `Loop` supports networks of this kind."""
    return network.config.model_type in KINDS


class Loop:
    """Decodes with room for `capacity` tokens, prompt and text together."""

    def __init__(self, network: PreTrainedModel, capacity: int):
        inner, config = network.model, network.config
        self.layers, self.embeddings, self.norm, self.head = (
            inner.layers,
            inner.embed_tokens,
            inner.norm,
            network.lm_head,
        )
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            inner.layers[0].self_attn.head_dim,
        )
        device = self.embeddings.weight.device
        shape = (len(self.layers), self.kv_heads, capacity, self.width)
        self.keys, self.values = (torch.empty(shape, dtype=network.dtype, device=device) for _ in range(2))
        self.cos, self.sin = (
            table[0] for table in inner.rotary_emb(self.keys, torch.arange(capacity, device=device)[None])
        )

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        """Feed a prompt [n]; returns the token after it, [1]."""
        return self._step(ids, 0)

    @torch.inference_mode()
    def decode(self, token: Tensor, at: int, count: int) -> Tensor:
        """The `count` tokens, [count], that follow a token [1] at position `at`."""
        written = torch.empty(count, dtype=torch.long, device=token.device)
        for step in range(count):
            token = written[step:step + 1].copy_(self._step(token, at + step))
        return written

    def _step(self, ids: Tensor, at: int) -> Tensor:
        """Feed tokens [n] from position `at` on; returns the one that follows, [1]."""
        x, rotary = self.embeddings(ids), (self.cos[at:at + len(ids)], self.sin[at:at + len(ids)])
        for index, layer in enumerate(self.layers):
            x = x + self._attention(index, layer.self_attn, _normed(layer.input_layernorm, x), rotary, at)
            states = _normed(layer.post_attention_layernorm, x)
            x = x + layer.mlp.down_proj(silu(layer.mlp.gate_proj(states)) * layer.mlp.up_proj(states))
        return self.head(_normed(self.norm, x[-1:])).argmax(-1)

    def _attention(
        self, index: int, weights: nn.Module, states: Tensor, rotary: tuple[Tensor, Tensor], at: int
    ) -> Tensor:
        end = at + len(states)
        query, key, value = (project(states).view(len(states), -1, self.width).transpose(0, 1)
                             for project in (weights.q_proj, weights.k_proj, weights.v_proj))
        self.keys[index, :, at:end], self.values[index, :, at:end] = _rotated(key, rotary), value
        out = self._attend(_rotated(query, rotary), self.keys[index, :, :end], self.values[index, :, :end])
        return weights.o_proj(out.transpose(0, 1).reshape(len(states), -1))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [heads, n, d] over keys and values [kv_heads, m, d].

        For n = 1 the query heads of a group become query positions of their KV head, which copies nothing.
        """
        if query.shape[1] > 1:
            out = scaled_dot_product_attention(query[None], keys[None], values[None], is_causal=True, enable_gqa=True)
            return out[0]
        grouped = query.view(1, self.kv_heads, -1, self.width)
        return scaled_dot_product_attention(grouped, keys[None], values[None]).view(self.heads, 1, self.width)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of x [heads, n, d]; pairs are (i, i + d/2)."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
