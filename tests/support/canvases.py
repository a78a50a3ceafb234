"""Canvas lanes over random denoisers and tables, and what they filled."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from architectures import SIZES
from toys import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from playground.contract import CanvasDecoder
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.engine.canvas.denoiser import MaskedDenoiser
from playground.engine.loading.loaded_model import loaded_model
from playground.events import Event, Failed, Fill, Forward

MASK = 7
PROMPT = [11, 30, 250, 8, 99]
LENGTH = 14


def denoiser(shifted: bool = False, seed: int = 0, spread: float = 0.35, move=lambda network: network,
             **masking) -> MaskedDenoiser:
    """Random weights in float64, large enough that every token matters; `masking`: block_length or known_first.

    `move` puts the network on a device.
    """
    torch.manual_seed(seed)
    sizes = SIZES | {
        "vocab_size": 320, "max_position_embeddings": 1024,
        "masked_diffusion": {"mask_token_id": MASK, "shifted": shifted} | masking,
    }
    config = AutoConfig.for_model("llama", **sizes, initializer_range=spread)
    network = AutoModelForCausalLM.from_config(config).double().eval()
    model = loaded_model(move(network), byte_tokenizer(), "random denoiser", "", "none")
    model.end_ids = frozenset()  # a random network ends at once otherwise
    return model


def canvas(model, assembly, prompt: Sequence[int] = PROMPT, length: int = LENGTH, seed: int = 0) -> Canvas:
    return Canvas(list(prompt), {"target": model}, assembly, Limits(seed, length), Recorder(model.tokens))


def run(model, name: str, strategy: CanvasDecoder | None = None, length: int = LENGTH, prompt=PROMPT, seed: int = 0,
        **knobs) -> list[Event]:
    """Events of one lane; `strategy` replaces the decoder of that name."""
    assembly = assemble(LaneConfig(name, knobs))
    assembly.decoder = strategy or assembly.decoder
    runner, events = Runner(canvas(model, assembly, prompt, length, seed), assembly), []
    while not runner.finished:
        events += runner.advance()
    assert not [event for event in events if isinstance(event, Failed)], events[-1]
    return events


def fills(events: list[Event]) -> list[Fill]:
    return [event for event in events if isinstance(event, Fill)]


def course(events: list[Event]) -> Iterator[tuple[int, int, float]]:
    """Position, token and confidence of everything filled, in order."""
    return [
        (position, token, confidence)
        for event in fills(events)
        for position, token, confidence in zip(event.positions, event.ids, event.confidences)
    ]


def difference(one: list[Event], other: list[Event]) -> float:
    """Largest difference of the confidences of two runs; infinite if they fill other tokens, or in other forwards."""
    if [(fill.positions, fill.ids) for fill in fills(one)] != [(fill.positions, fill.ids) for fill in fills(other)]:
        return float("inf")
    return max(abs(a[2] - b[2]) for a, b in zip(course(one), course(other)))


def forwards(events: list[Event]) -> list[Forward]:
    return [event for event in events if isinstance(event, Forward)]


def computed(events: list[Event]) -> list[int]:
    """Positions computed in each forward."""
    return [event.tokens for event in forwards(events)]
