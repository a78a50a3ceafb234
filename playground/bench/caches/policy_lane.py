"""A lane under a policy, driven by hand: no screen, no events, and no token that ends its text."""
from __future__ import annotations

import torch

from playground.bench.caches.caches_defaults import SHAPES
from playground.bench.caches.policy_configs import Point
from playground.bench.model_shapes import assemble as network
from playground.contract.lane_config import assemble
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder, Silent
from playground.decoding.session import Runner
from playground.engine.kv_cache import KVCache
from playground.engine.load import Loading
from playground.engine.model import Model
from playground.events import Failed


def random_model(shape: str, context: int) -> Model:
    """A model of random weights of one of SHAPES that can read so many tokens, in single precision on the CPU."""
    from transformers import LlamaConfig
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=context, tie_word_embeddings=True)
    model = network(config, f"random weights, {shape}", Loading("cpu", "float32")).model
    model.end_ids = frozenset()
    return model


class Driven:
    """Reads a prompt, then writes a token at a time. Raises RuntimeError where the lane fails."""

    def __init__(self, point: Point, model: Model, prompt: list[int], most: int, recorder: type[Recorder] = Silent):
        """`most` is the number of tokens it can be asked for at most."""
        assembly = assemble(point.recipe)
        self.point, self.lane = (
            point,
            Lane(prompt, {"target": model}, assembly, Limits(max_new_tokens=most + 2), recorder(model.tokens)),
        )
        self._runner = Runner(self.lane, assembly)

    @property
    def store(self) -> KVCache:
        return self.lane.target.store

    def read(self) -> None:
        """The prompt, until the token behind it is chosen."""
        while not self.lane.generated:
            self._advance()

    def step(self) -> None:
        """Read the last token, let the policy act, choose the next one."""
        before = self.lane.generated
        while self.lane.generated == before:
            self._advance()

    def _advance(self) -> None:
        told = self._runner.advance()
        if failed := next((event.message for event in told if isinstance(event, Failed)), ""):
            raise RuntimeError(f"{self.point.name}: {failed}")


def some_tokens(model: Model, count: int) -> list[int]:
    """So many token ids, always the same; random weights see no text in them."""
    chance = torch.Generator().manual_seed(0)
    return torch.randint(0, min(model.vocabulary, len(model.tokenizer)), (count,), generator=chance).tolist()
