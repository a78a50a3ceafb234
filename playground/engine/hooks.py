"""The two places where we reach into a model of the transformers library, without patching its classes.

1. A registered attention function. It writes new keys and values into the stores of the call, and attends under their
   masks.
2. A wrapper around the forward of every decoder layer. It reads the plan of the call: skip, stop at, resume from,
   capture.

Both find the state of the running forward in a keyword, `call`, that travels with it, so nothing here is global.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from playground.engine.attention_logits import products
from playground.engine.attention_mask import as_bias
from playground.engine.cascade_attention import PartialAttention, attend_part, merge
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.attention_mask import Segment

New = Sequence[Tensor]
"""Queries, keys and values of new rows, [heads, rows, d]."""

ATTENTION = "playground"
HARMLESS = {
    "position_ids",
    "use_cache",
    "cache_position",
    "is_causal",
    "output_attentions",
    "attention_mask",
    "output_router_logits",
}


@dataclass
class LayerPlan:
    """Which decoder layers run in one forward, and what is taken out between them."""

    skip: frozenset[int] = frozenset()
    stop: int | None = None  # this layer and all after it do not run; the head reads the hidden states so far
    resume: tuple[int, Tensor] | None = None  # (layer, hidden states [rows, d]): enter before that layer with these
    # keep the hidden states [rows, d] that enter these layers; depth is the final norm
    capture: frozenset[int] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether all layers run from first to last."""
        return not self.skip and self.stop is None and self.resume is None

    @property
    def is_plain(self) -> bool:
        """Whether all layers run and nothing is captured."""
        return self.is_whole and not self.capture

    def layers(self, depth: int) -> int:
        """How many of a model's layers run."""
        return depth if self.is_whole else sum(map(self.runs, range(depth)))

    def runs(self, layer: int) -> bool:
        late = self.stop is not None and layer >= self.stop
        early = self.resume is not None and layer < self.resume[0]
        return not (late or early or layer in self.skip)


@dataclass
class Call:
    """State of one forward: the stores that take part, row after row, and the plan."""

    segments: list[Segment]
    plan: LayerPlan = field(default_factory=LayerPlan)
    captured: dict[int, Tensor] = field(default_factory=dict)
    _alike: dict[int | None, list[list[int]]] = field(default_factory=dict)

    def alike(self, sliding_window: int | None) -> list[list[int]]:
        """Places of the segments whose stores begin with one prefix, held once for all of them; one list for each
        prefix.
        """
        if sliding_window not in self._alike:
            shared = [segment.shares(sliding_window) for segment in self.segments]
            prefixes = dict.fromkeys(prefix for prefix in shared if prefix)
            self._alike[sliding_window] = [
                [place for place, own in enumerate(shared) if own == prefix] for prefix in prefixes
            ]
        return self._alike[sliding_window]

    def enter(self, layer: int, hidden: Tensor) -> Tensor:
        """What enters a layer, [rows, d]: perhaps it comes from an earlier forward, perhaps a later one wants it."""
        if self.plan.resume and self.plan.resume[0] == layer:
            hidden = self.plan.resume[1]
        if layer in self.plan.capture:
            self.captured[layer] = hidden
        return hidden


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    call: Call,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **passed: Any,
) -> tuple[Tensor, None]:
    """Attention of new rows over each store. query [1, heads, rows, d], key and value [1, kv_heads, rows, d]; returns
    [1, rows, heads, d].
    """
    unknown = [name for name, value_ in passed.items() if value_ is not None and name not in HARMLESS]
    if unknown:
        raise Refusal(
            f"This model's attention uses {unknown[0]}, which the playground cannot honour yet: choose another model.",
            "model",
        )
    scale = scaling or query.shape[-1] ** -0.5
    return attend_all(module.layer_idx, (query[0], key[0], value[0]), call, scale, sliding_window, softcap).transpose(
        0, 1
    )[None], None


def attend_all(layer: int, new: New, call: Call, scaling: float, sliding_window: int | None = None,
               softcap: float | None = None) -> Tensor:
    """New rows of a layer over each store of the call: queries, keys and values [heads, rows, d] go in, outputs [heads,
    rows, d] come back.
    """
    alike = call.alike(sliding_window) if softcap is None else []
    if len(alike) == 1 and len(alike[0]) == len(call.segments):
        return _attend_behind(layer, call.segments, new, scaling, sliding_window)
    shares, outputs = _shares(new, call.segments), {}
    for places in alike:
        segments, joined = (
            [call.segments[place] for place in places],
            [torch.cat(rows, 1) for rows in zip(*(shares[place] for place in places))],
        )
        outputs |= zip(
            places,
            _attend_behind(layer, segments, joined, scaling, sliding_window).split(
                [segment.rows for segment in segments], 1
            ),
        )
    each = [
        outputs[place] if place in outputs else _attend_alone(layer, segment, share, scaling, sliding_window, softcap)
        for place, (segment, share) in enumerate(zip(call.segments, shares))
    ]
    return each[0] if len(each) == 1 else torch.cat(each, 1)


def _shares(new: New, segments: list[Segment]) -> list[New]:
    """What of new rows belongs to each segment."""
    if len(segments) == 1:
        return [new]
    counts = [segment.rows for segment in segments]
    return list(zip(*(rows.split(counts, 1) for rows in new)))


def _attend_behind(layer: int, segments: list[Segment], new: New, scaling: float, sliding_window: int | None) -> Tensor:
    """New rows of stores that begin with one prefix, held once: over it all rows go together, over what follows those
    of each store alone.
    """
    prefix = attend_part(new[0], *segments[0].prefix(layer), None, scaling)  # the whole of it comes before every row
    parts = []
    for segment, (query, new_keys, new_values) in zip(segments, _shares(new, segments)):
        keys, values = segment.write_suffix(layer, new_keys, new_values)
        bias = segment.suffix_bias(layer, sliding_window, query.shape[0] // len(keys), query.dtype)
        parts.append(attend_part(query, keys, values, bias, scaling))
    return merge(
        prefix, parts[0] if len(parts) == 1 else PartialAttention(*(torch.cat(part, 1) for part in zip(*parts)))
    )


def _attend_alone(
    layer: int, segment: Segment, new: New, scaling: float, sliding_window: int | None, softcap: float | None
) -> Tensor:
    """New rows of one store over all it holds, [heads, rows, d]."""
    query, new_keys, new_values = new
    keys, values = segment.write(layer, new_keys, new_values)
    if segment.asks:
        segment.store.ask(layer, query.unflatten(0, (len(keys), -1)), segment.positions())
    if segment.renumbers:
        query, keys = segment.renumbered(layer, query, keys)
    if segment.focused:
        seen, whole = _focused(layer, query, keys, segment, sliding_window, scaling, softcap)
        if segment.watched:
            segment.watch(layer, whole[:, segment.watched])
        return _attend_narrowly(query, keys, values, seen, scaling, softcap)
    if len(segment.watched) == segment.rows:
        output, whole = _written_out(query, keys, values, segment.mask(layer, sliding_window), scaling, softcap)
        segment.watch(layer, whole.sum(1))
        return output
    if softcap is None:
        output = attend(
            query, keys, values, segment.bias(layer, sliding_window, query.shape[0] // len(keys), query.dtype), scaling
        )
    else:
        output, _ = _written_out(query, keys, values, segment.mask(layer, sliding_window), scaling, softcap)
    if segment.watched:
        segment.watch(
            layer, weights(query, keys, segment.mask(layer, sliding_window), segment.watched, scaling, softcap)
        )
    return output


def _focused(layer: int, query: Tensor, keys: Tensor, segment: Segment, sliding_window: int | None, scaling: float,
             softcap: float | None) -> tuple[Tensor, Tensor]:
    """What is left of the mask once a cache policy chose by what the rows would attend to under it, and what that is,
    [kv_heads, rows, slots] both.
    """
    mask = segment.mask(layer, sliding_window)
    whole = weights(query, keys, mask, list(range(segment.rows)), scaling, softcap)
    return segment.chosen(layer, whole, _grouped(mask, 1, segment.rows, query.device)), whole


def _attend_narrowly(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """Attention under a mask of this layer alone, [kv_heads, rows, slots]."""
    if softcap is not None:
        return _written_out(query, keys, values, mask, scaling, softcap)[0]
    return attend(query, keys, values, as_bias(mask, len(query) // len(keys), query.dtype), scaling)


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | str | None, scaling: float) -> Tensor:
    """query [heads, n, d] over keys, values [kv_heads, m, d]; bias as `Segment.bias` makes it."""
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    if isinstance(bias, str):
        keys, values = (x.repeat_interleave(heads // kv_heads, 0)[None] for x in (keys, values))
        return scaled_dot_product_attention(query[None], keys, values, is_causal=True, scale=scaling)[0]
    # the heads of a group are further rows, so no key is copied
    query = query.reshape(1, kv_heads, heads // kv_heads * n, -1)
    return scaled_dot_product_attention(query, keys[None], values[None], bias, scale=scaling).reshape(heads, n, -1)


def _written_out(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | str | None, scaling: float,
                 softcap: float | None) -> tuple[Tensor, Tensor]:
    """The same with its weights, [kv_heads, group, n, m]; mask as `Segment.mask` makes it.

    For rows of which all are watched, and for scores that are squeezed before the softmax, which torch's own attention
    cannot.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    mask = _grouped(mask, heads // kv_heads, n, query.device)
    spread = _softmax(query.reshape(kv_heads, heads // kv_heads * n, -1), keys, mask, scaling, softcap)
    return (spread.to(values.dtype) @ values).reshape(heads, n, -1), spread.reshape(kv_heads, heads // kv_heads, n, -1)


def _grouped(mask: Tensor | str | None, groups: int, n: int, device: torch.device) -> Tensor | None:
    """A mask for the rows of all heads of a group."""
    if mask is None:
        return None
    if isinstance(mask, str):
        mask = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    return _repeated(mask, groups)


def _repeated(mask: Tensor, groups: int) -> Tensor:
    """A mask [..., rows, slots] for groups * rows rows; a single row is not repeated, for all of them read the one."""
    return mask if groups == 1 or mask.shape[-2] == 1 else mask.repeat(*[1] * (mask.dim() - 2), groups, 1)


def weights(
    query: Tensor, keys: Tensor, mask: Tensor | str | None, rows: list[int], scaling: float, softcap: float | None
) -> Tensor:
    """What chosen rows attend to, summed over the query heads of a group, [kv_heads, len(rows), m].

    A pass of its own, so that the other rows still go through the fast attention, which never writes its weights out.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    mask = _grouped(mask, 1, n, query.device)
    if len(rows) < n:
        query, mask = query[:, rows], None if mask is None else mask[..., rows, :]
    mask = None if mask is None else _repeated(mask, heads // kv_heads)
    spread = _softmax(query.reshape(kv_heads, heads // kv_heads * len(rows), -1), keys, mask, scaling, softcap)
    return spread.reshape(kv_heads, heads // kv_heads, len(rows), -1).sum(1)


def _softmax(query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
    scores = products(query, keys) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def install(network: PreTrainedModel) -> list[nn.Module]:
    """Put both seams into a loaded network and return its decoder layers, first to last."""
    AttentionInterface.register(ATTENTION, attention)
    network.set_attn_implementation(ATTENTION)
    layers = _decoder_layers(network)
    for index, layer in enumerate(layers):
        layer.forward = _planned(layer.forward, index, len(layers))
    return layers


def _decoder_layers(network: PreTrainedModel) -> list[nn.Module]:
    depth = network.config.get_text_config().num_hidden_layers
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise Refusal(
        f"{network.config.model_type} models do not keep their {depth} layers in a list the playground can reach: choose another model.",
        "model",
    )


def _planned(forward: Callable, index: int, depth: int) -> Callable:
    """The layer's own forward, asked first whether it runs at all. A layer returns hidden states, alone or first in a
    tuple.
    """
    returns_tuple = False

    def planned(hidden: Tensor, *args: Any, call: Call, **kwargs: Any) -> Any:
        nonlocal returns_tuple
        hidden, others = call.enter(index, hidden[0])[None], ()
        if call.plan.runs(index):
            out = forward(hidden, *args, call=call, **kwargs)
            returns_tuple = isinstance(out, tuple)
            hidden, *others = out if returns_tuple else (out,)
        if index + 1 == depth:
            hidden = call.enter(depth, hidden[0])[None]
        return (hidden, *others) if returns_tuple else hidden

    return planned
