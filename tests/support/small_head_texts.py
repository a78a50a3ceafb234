"""Texts to train small heads on, in which each token determines the next."""
from __future__ import annotations

from collections.abc import Iterator

import torch

from playground.algorithms.draft_heads.head_training import FirstLayers, HeadBatch
from playground.contract import find

WIDTH, DEPTH, TOKENS = 16, 3, 12


class SmallTexts:
    """A stand-in for the texts of a target; its last state says which token follows, the earlier ones which token is
    there.
    """

    def __init__(self, length: int = 8, prompt: int = 0, epoch: int = 30):
        self.width, self.depth, self.seed, self.epoch, self.epochs = WIDTH, DEPTH, 0, epoch, 4
        chance = torch.Generator().manual_seed(0)
        self.embeddings = torch.randn(TOKENS, WIDTH, generator=chance)
        self.lm_head = torch.randn(TOKENS, WIDTH, generator=chance)
        self.follows = torch.randperm(TOKENS, generator=chance)
        ids = torch.arange(TOKENS)[:, None]
        while ids.shape[1] < length:
            ids = torch.cat([ids, self.follows[ids[:, -1:]]], 1)
        written = (torch.arange(length) >= prompt).expand(ids.shape)
        states = {layer: self.embeddings[ids] for layer in range(DEPTH)}
        self.batch = HeadBatch(ids, written, {**states, DEPTH: self.lm_head[self.follows[ids]]})

    def batches(self, epoch: int) -> Iterator[HeadBatch]:
        return iter([self.batch] * self.epoch)

    def held_out(self) -> Iterator[HeadBatch]:
        return iter([self.batch])

    def resumed(self) -> None:
        return None

    def save(self, state: dict) -> None:
        pass

    def progress(self, share: float, text: str) -> None:
        pass

    def first_layers(self, count: int) -> FirstLayers:
        """Random ones."""
        torch.manual_seed(1)
        weights = find("s2d").untrained(WIDTH, DEPTH)
        layers = [
            {name.split(".", 2)[2]: part for name, part in weights.items() if name.startswith(f"layers.{at}.")}
            for at in range(count)
        ]
        return FirstLayers(layers, torch.ones(WIDTH), WIDTH, 10000.0, 1e-5)


def trained(name: str, texts: SmallTexts) -> tuple[dict[str, torch.Tensor], list]:
    """The weights of a training on these texts, and its events."""
    events, seen = find(name).train(texts), []
    while True:
        try:
            seen.append(next(events))
        except StopIteration as end:
            return end.value, seen
