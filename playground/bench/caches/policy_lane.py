"""A lane under a policy that is stepped manually, without a session and without end tokens."""
from __future__ import annotations

import torch

from playground.bench.caches.caches_defaults import SHAPES
from playground.bench.caches.policy_configs import Point
from playground.bench.speed.model_shapes import assemble as network
from playground.contract.lane_config import assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder, Silent
from playground.engine.cache.kv_cache import KVCache
from playground.engine.loading.load import Loading
from playground.engine.model import Model
from playground.events import Failed


def random_model(shape: str, context: int) -> Model:
    """A model of random weights with one of SHAPES and this context length, in float32 on the CPU."""
    from transformers import LlamaConfig
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=context, tie_word_embeddings=True)
    model = network(config, f"random weights, {shape}", Loading("cpu", "float32")).model
    model.end_ids = frozenset()
    return model


class PolicyLane:
    """Prefills a prompt, then writes one token per step. Raises RuntimeError if the lane fails."""

    def __init__(self, point: Point, model: Model, prompt: list[int], most: int, recorder: type[Recorder] = Silent):
        """`most` is the maximum number of steps."""
        assembly, limits = assemble(point.config), Limits(max_new_tokens=most + 2)
        self.point, self.lane = point, Lane(prompt, {"target": model}, assembly, limits, recorder(model.tokens))
        self._runner = Runner(self.lane, assembly)

    @property
    def store(self) -> KVCache:
        return self.lane.target.store

    def prefill(self) -> None:
        """Feed the prompt and choose the first token."""
        while not self.lane.generated:
            self._advance()

    def step(self) -> None:
        """Feed the last token, apply the policy, choose the next token."""
        before = self.lane.generated
        while self.lane.generated == before:
            self._advance()

    def _advance(self) -> None:
        events = self._runner.advance()
        if failed := next((event.message for event in events if isinstance(event, Failed)), ""):
            raise RuntimeError(f"{self.point.name}: {failed}")


def some_tokens(model: Model, count: int) -> list[int]:
    """`count` random token ids, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, min(model.vocabulary, len(model.tokenizer)), (count,), generator=generator).tolist()
