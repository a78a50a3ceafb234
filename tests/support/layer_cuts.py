"""Cache policies that drop prompt tokens from later layers."""
from __future__ import annotations

from dataclasses import replace

from pairs import network, pair
from torch import nn
from transformers import PreTrainedModel

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Forward

TEXT = "The green bird sings, and the red fox listens."
TREE = LaneConfig("speculative", {}, [("draft_model", {"width": 2, "depth": 3})])
EARLY = LaneConfig("layer_skip", {}, [("layer_skip_draft", {})])


def with_policy(lane: LaneConfig, name: str, **knobs) -> LaneConfig:
    return replace(lane, extras=[*lane.extras, (name, knobs)])


def decoder_layers(twin: PreTrainedModel) -> nn.ModuleList:
    return next(
        module
        for module in twin.modules()
        if isinstance(module, nn.ModuleList) and len(module) == twin.config.num_hidden_layers
    )


def recorded(config: LaneConfig, kind: type, length: int = 8) -> list:
    session = prepare(pair(), [config], Prompt(TEXT), Limits(max_new_tokens=length))
    return [stamped.event for stamped in session if isinstance(stamped.event, kind)]


def layer_tokens(passes: list[Forward]) -> int:
    """Tokens times layers of the prefill."""
    return sum(forward.tokens * forward.layers for forward in passes if forward.phase == "prefill")


def leaning_on_earlier_layers() -> PreTrainedModel:
    """A network whose last layer adds what its first one attended to, if that was computed in the same forward."""
    twin, left = network("gpt_neox"), {}
    first, *_, last = decoder_layers(twin)
    first.attention.register_forward_hook(lambda _, args, out: left.update(state=out[0]))
    last.attention.register_forward_hook(lambda _, args, out: (out[0] + left.pop("state", 0), *out[1:]))
    return twin
