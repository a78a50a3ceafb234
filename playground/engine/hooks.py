"""Two of the hooks into a model of the transformers library, whose classes are not patched.

1. An attention function, registered with `AttentionInterface`. It writes new key and value states into the KV caches of
   the call, and attends under their masks (`engine.attention.segment_attention`).
2. A wrapper around the forward of every decoder layer. It follows the plan of the call: skip, stop, resume, capture.

Both get the state of the running forward in a keyword argument, `call`, so there is no global state. Architectures that
drop keyword arguments on the way find it in a context variable (`running`). Recurrent layers have a third hook
(`engine.recurrent_layers`).
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from playground.engine.attention.attention_mask import Reach
from playground.engine.attention.eager_attention import Scoring
from playground.engine.attention.segment_attention import attend_all
from playground.engine.expert_routing import ExpertRouting
from playground.engine.layer_choices import ComputePass
from playground.engine.recurrent.recurrent_scan import Scan
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment
    from playground.engine.recurrent.recurrent_layers import Recurrence

ATTENTION = "playground"  # name of the attention function in transformers
IGNORED = {
    "position_ids",
    "use_cache",
    "cache_position",
    "is_causal",
    "output_attentions",
    "attention_mask",
    "output_router_logits",
    "logits_to_keep",
}


Rewrite = Callable[[Tensor], Tensor]
"""From the input of a layer, [rows, d], to another one."""


@dataclass
class LayerPlan:
    """Which decoder layers run in one forward, and which hidden states are captured."""

    skip: frozenset[int] = frozenset()
    stop: int | None = None  # this layer and all later ones do not run; the lm_head gets the hidden states so far
    resume: tuple[int, Tensor] | None = None  # (layer, hidden states [rows, d]): start at this layer with these
    capture: frozenset[int] = frozenset()  # layers whose input [rows, d] is captured; depth means the final norm
    compute: ComputePass | None = None  # decides layer by layer what runs; without skip, stop and resume
    routing: ExpertRouting | None = None  # which experts run, in a mixture of experts
    rewrite: tuple[int, Rewrite] | None = None  # (layer, what its input becomes)

    def __post_init__(self) -> None:
        # whether all layers run, as far as is known before the forward; and whether, moreover, nothing is captured
        changed = self.resume is not None or self.rewrite is not None
        self.is_whole = not self.skip and self.stop is None and not changed and self.compute is None
        self.is_plain = self.is_whole and not self.capture

    def layers(self, depth: int) -> int:
        """How many of a model's `depth` layers run."""
        return depth if self.is_whole else sum(map(self.runs, range(depth)))

    def runs(self, layer: int) -> bool:
        late = self.stop is not None and layer >= self.stop
        early = self.resume is not None and layer < self.resume[0]
        return not (late or early or layer in self.skip)


_RUNNING: ContextVar[Call | None] = ContextVar("running call", default=None)


@contextmanager
def running(call: Call) -> Iterator[None]:
    """Makes `call` the one that hooks find which get no keyword argument."""
    token = _RUNNING.set(call)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_routing() -> ExpertRouting | None:
    """Which experts run in the running forward; None for the router's own."""
    call = _RUNNING.get()
    return call.plan.routing if call else None


@dataclass
class Call:
    """State of one forward: the segments, in the order of the rows, and the plan."""

    segments: list[Segment]
    plan: LayerPlan = field(default_factory=LayerPlan)
    captured: dict[int, Tensor] = field(default_factory=dict)
    reaches: dict[int, Reach] = field(default_factory=dict)  # of layers whose mask comes from the library's masks
    recurrence: Recurrence | None = None  # if some layers are recurrent
    layer: int = 0  # the decoder layer that runs
    # by reach, the segments that share a prefix; filled in by `engine.attention.segment_attention`
    prefix_groups: dict[Reach, list[list[int]]] = field(default_factory=dict)

    @cached_property
    def scan(self) -> Scan:
        """How the recurrent layers compute the rows."""
        return Scan(self.segments, self.recurrence.steps)

    def cache_layer(self, layer: int) -> int:
        """The number of an attention's layer among those with keys and values.

        Hybrid models may share one attention, which then does not know its layer.
        """
        return self.recurrence.cache_layers[self.layer] if self.recurrence else layer

    def enter(self, layer: int, hidden: Tensor) -> Tensor:
        """The input of a layer, [rows, d], resumed from an earlier forward or captured if the plan says so."""
        self.layer = layer
        if self.plan.resume and self.plan.resume[0] == layer:
            hidden = self.plan.resume[1]
        if self.plan.rewrite and self.plan.rewrite[0] == layer:
            hidden = self.plan.rewrite[1](hidden)
        if layer in self.plan.capture:
            self.captured[layer] = hidden.to(self.segments[0].store.device)
        return hidden


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    call: Call | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: Reach = None,
    dropout: float = 0.0,
    **passed: Any,
) -> tuple[Tensor, None]:
    """Attention of new rows over each KV cache, as `AttentionInterface` calls it.

    query is [1, heads, rows, d], key and value are [1, kv_heads, rows, d]; returns [1, rows, heads, d]. Raises Refusal
    if the model passes an argument that is not supported.
    """
    unknown = [name for name, value_ in passed.items() if value_ is not None and name not in IGNORED]
    if unknown:
        raise Refusal(
            f"This model's attention uses {unknown[0]}, which the playground does not support: choose another model.",
            "model",
        )
    call, layer = call or _RUNNING.get(), module.layer_idx
    scale = scaling or query.shape[-1] ** -0.5
    reach = call.reaches.get(layer, sliding_window)
    scoring = Scoring(softcap, s_aux) if softcap is not None or s_aux is not None else None
    new = query[0], key[0], value[0]
    output = attend_all(call.cache_layer(layer), new, call, scale, reach, scoring)
    return output.transpose(0, 1)[None].contiguous(), None


def use_own_attention(network: PreTrainedModel) -> None:
    """Install the first hook."""
    AttentionInterface.register(ATTENTION, attention)
    network.set_attn_implementation(ATTENTION)


def install_plans(network: PreTrainedModel) -> list[nn.Module]:
    """Install the second hook; returns the decoder layers. Raises Refusal if they cannot be found."""
    layers = decoder_layers(network)
    for index, layer in enumerate(layers):
        layer.forward = _planned(layer.forward, index, len(layers))
    return layers


def decoder_layers(network: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, in order. Raises Refusal if they cannot be found."""
    depth = network.config.get_text_config(decoder=True).num_hidden_layers
    for module in (*_decoder(network).modules(), *network.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise Refusal(
        f"The playground does not find the {depth} layers of {network.config.model_type} models in one ModuleList: "
        "choose another model.",
        "model",
    )


def layer_devices(network: PreTrainedModel) -> tuple[torch.device, ...]:
    """The device of each decoder layer; empty if all weights are on one. Raises Refusal if no layers are found."""
    if len({weight.device for weight in network.parameters()}) == 1:
        return ()
    return tuple(next(layer.parameters()).device for layer in decoder_layers(network))


def _decoder(network: PreTrainedModel) -> nn.Module:
    """The part that reads text, in a network that may also have layers for images or sounds."""
    decoder = network.get_decoder() if hasattr(network, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else network


def _check_plain(call: Call) -> None:
    """Raise Refusal for a plan where a layer passes on more than one hidden state per token."""
    if not call.plan.is_plain:
        raise Refusal("The layers of this model pass on several hidden states, so that none can be skipped or read: "
                      "choose another model, or another strategy.", "model")


def _planned(forward: Callable, index: int, depth: int) -> Callable:
    """The layer's forward under the plan of the call. A layer returns hidden states, alone or first in a tuple."""
    returns_tuple = False

    def planned(hidden: Tensor, *args: Any, call: Call | None = None, **kwargs: Any) -> Any:
        nonlocal returns_tuple
        passed_on = {"call": call} if call else {}
        call = call or _RUNNING.get()
        if call is None:  # the library's own forward
            return forward(hidden, *args, **kwargs)
        if hidden.dim() != 3:
            _check_plain(call)
            return forward(hidden, *args, **passed_on, **kwargs)
        hidden, others = call.enter(index, hidden[0])[None], ()
        if call.plan.runs(index):
            out = forward(hidden, *args, **passed_on, **kwargs)
            returns_tuple = isinstance(out, tuple)
            hidden, *others = out if returns_tuple else (out,)
        if index + 1 == depth:
            hidden = call.enter(depth, hidden[0])[None]
        return (hidden, *others) if returns_tuple else hidden

    return planned
