"""Heads by vLLM's `speculators`, whose logits are stored, read from a folder as a user would name it."""
from __future__ import annotations

import json
from pathlib import Path

import torch
from pairs import pair
from safetensors.torch import save_file
from torch import Tensor

from playground.contract import find
from playground.training.public_heads import read_head
from support.speculators_heads import ANCHOR, OUT, TOKENS, filled, hidden_states

REFERENCE = json.loads(OUT.read_text(encoding="utf-8"))
NEAR = 2e-5  # logits are stored with six decimals; float32 on both sides


class StoredHead:
    """A stored head, read from a folder as a user would name it; `changed` replaces entries of its config."""

    def __init__(self, name: str, folder: Path, **changed):
        stored = REFERENCE[name]
        self.config = stored["config"] | changed
        self.logits = [torch.tensor(step) for step in stored["logits"]]
        self.all = filled(stored["shapes"])
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.all.items()}, folder / "model.safetensors")
        found = read_head(folder, pair().target)
        self.strategy, self.weights = found.strategy, found.weights

    @property
    def network(self):
        return find(self.strategy).build(self.weights)

    def embed(self, tokens: list[int]) -> Tensor:
        return self.all["embed_tokens.weight"][tokens]

    def target_embed(self, tokens: list[int]) -> Tensor:
        """Those of a target that has other embeddings than the head, if the head has its own."""
        return self.embed(tokens) * (1 - bool(self.config.get("embed_requires_grad")))

    def read_out(self, rows: Tensor) -> Tensor:
        return rows @ self.all["lm_head.weight"].T


def distance(found: list[Tensor], stored: list[Tensor]) -> float:
    """The largest difference of all steps."""
    assert len(found) == len(stored)
    return max(float((one - other).abs().max()) for one, other in zip(found, stored))


def block_outputs(head: StoredHead, read: int = ANCHOR) -> Tensor:
    """The network's outputs [block, width] for a block that begins at the anchor, after the states of `read` tokens."""
    network, size = head.network, int(head.weights["block_size"])
    caches = network.new_caches()
    network.read(hidden_states(2)[:read], torch.arange(read), caches)
    masks = [int(head.weights["mask_token_id"])] * (size - 1)
    return network(head.embed([TOKENS[ANCHOR], *masks]), torch.arange(ANCHOR, ANCHOR + size), caches, 0)
