"""Lanes with a compute policy, and what ran in them."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from architectures import SIZES
from pairs import TOKENIZER
from runs import run
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from playground.contract.lane_config import LaneConfig
from playground.engine.graphs.fused_llama import FusedLlama
from playground.engine.graphs.fused_parts import FusedLinear
from playground.engine.model import Model
from playground.events import Forward

PROMPT = [5, 9, 2, 7, 7, 1]
DEEP = SIZES | dict(num_hidden_layers=6, vocab_size=320)


def deep_network(seed: int = 0, **sizes) -> PreTrainedModel:
    """Six random layers in float64, large enough weights that every token matters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", **(DEEP | sizes), initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).double().eval()


def deep(seed: int = 0, **sizes) -> Model:
    return Model(deep_network(seed, **sizes), TOKENIZER, "llama")


def policy_lane(name: str, decoder: str = "greedy", *extras: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig(decoder, {}, [*extras, (name, knobs)])


def text_and_forwards(config, models: dict, length: int = 16) -> tuple[list[int], list[Forward]]:
    lane, events = run(config, models, PROMPT, length)
    return lane.main.written, [event for event in events if isinstance(event, Forward)]


@contextmanager
def counted_products(network: FusedLlama) -> Iterator[list[int]]:
    """Multiplications by weights of the layers meanwhile, replaced feed-forward networks included: one growing number.
    """
    total, product = [0], FusedLinear.__call__

    def counting(linear: FusedLinear, x: Tensor) -> Tensor:
        total[0] += len(x) * linear.weight.numel() if linear is not network.head else 0
        return product(linear, x)

    FusedLinear.__call__ = counting
    try:
        yield total
    finally:
        FusedLinear.__call__ = product
