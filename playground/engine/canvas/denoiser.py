"""A masked diffusion model: a canvas with masks in, logits for every position out, with full attention.

The weights are those of a Llama, Qwen2 or Qwen3 network of the library, run layer by layer here, since the library's
own forward is causal. A forward may compute some positions only: the others take part with the key and value states
that an earlier forward left in `CanvasStates`. All caches of masked diffusion are choices of those positions.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.canvas.canvas_pass import CanvasPass
from playground.engine.canvas.masked_models import masking_of
from playground.engine.canvas.shadows import visible
from playground.engine.forward_lock import lock_for
from playground.engine.host_copies import on_device
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine


class LayerObserver(Protocol):
    """Follows a forward from layer to layer; see `CanvasStates.enter` and `CanvasStates.attended`."""

    def enter(self, layer: int, at: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]: ...

    def attended(self, layer: int, at: Tensor, queries: Tensor) -> None: ...


@dataclass
class CanvasStates:
    """Key and value states of a canvas by layer, each [kv_heads, positions, head_dim], keys rotated.

    present: positions that have states, bool [positions]; the others are not attended to. A forward over some
    positions replaces theirs. observer: reads every layer, and may let the next ones compute more positions.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    present: Tensor | None = None
    observer: LayerObserver | None = None

    def drop(self, positions: Sequence[int]) -> None:
        """Make positions invisible until they are computed again."""
        self.present[list(positions)] = False

    def write(self, layer: int, at: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store states of the positions `at`, and return those of all present ones."""
        if layer == len(self.keys):
            shape = (keys.shape[0], len(self.present), keys.shape[2])
            self.keys.append(keys.new_zeros(shape))
            self.values.append(values.new_zeros(shape))
        self.keys[layer][:, at], self.values[layer][:, at] = keys, values
        return self.keys[layer][:, self.present], self.values[layer][:, self.present]

    def enter(self, layer: int, at: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The positions that a layer computes, and their hidden states [n, hidden_size]; `at`: of the layer before."""
        return self.observer.enter(layer, at, hidden) if self.observer else (at, hidden)

    def attended(self, layer: int, at: Tensor, queries: Tensor) -> None:
        """After the states of a layer are written: its queries [heads, n, head_dim], rotated and scaled."""
        if self.observer:
            self.observer.attended(layer, at, queries)


class CanvasNetwork:
    """A network that fills a canvas, in place of a Model for canvas decoders: what all of them have in common."""

    fills: Literal[True] = True  # fills a canvas, does not continue text
    launched_ahead = None  # no forward begins before it is asked for
    shifted = False  # the logits of a position predict its own token

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str = "",
        quantization: str = "none",
    ):
        config = network.config.get_text_config()
        self.network, self.tokenizer, self.name = network, tokenizer, name
        self.revision, self.quantization = revision, quantization
        self.context, self.vocabulary = config.max_position_embeddings, config.vocab_size
        self.depth, self.width = config.num_hidden_layers, config.hidden_size
        self.device: torch.device = network.get_input_embeddings().weight.device
        self.dtype = network.dtype
        self.parameters = network.num_parameters()
        self.tokens, self.lock = Tokens(tokenizer, self.vocabulary), lock_for(self.device)
        ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        self.end_ids = frozenset(id for id in (*ids, tokenizer.eos_token_id) if id is not None)

    @cached_property
    def grammars(self) -> GrammarEngine:
        return GrammarEngine(self.tokenizer, self.vocabulary, sorted(self.end_ids))

    def answer_length(self, prompt: list[int], most: int) -> int:
        """Positions to fill after a prompt: `most`, or as many as the context holds. Raises Refusal if none is left."""
        if len(prompt) >= self.context:
            raise Refusal(
                f"The prompt has {len(prompt):,} tokens, and {self.name} reads {self.context:,} with the answer: "
                "shorten it.",
                "prompt",
            )
        return min(most, self.context - len(prompt))

    def flops(self, rows: int, context: int, layers: int) -> float:
        """Estimated FLOPs: two per weight and row, plus attention to all positions; `context` are those not computed.
        """
        weights = 2.0 * self.parameters * layers / self.depth
        return rows * (weights + 4.0 * layers * self.width * (context + rows))


class MaskedDenoiser(CanvasNetwork):
    """A network that fills masked positions. Raises Refusal if the network cannot be one."""

    attention = "full"  # every position sees every other one

    def __init__(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, *loading: str):
        super().__init__(network, tokenizer, name, *loading)
        masking = masking_of(network.config)
        if masking is None:
            raise Refusal(f"{name} continues text and cannot fill masked positions: choose another model.", "model")
        self.mask_id, self.shifted = masking.mask_token_id, masking.shifted

    def answer_length(self, prompt: list[int], most: int) -> int:
        if self.shifted and not prompt:
            raise Refusal(f"{self.name} predicts a token from the one before it: write a prompt.", "prompt")
        return super().answer_length(prompt, most)

    def new_states(self, length: int) -> CanvasStates:
        """Empty states of a canvas of `length` positions, prompt included."""
        return CanvasStates(present=torch.zeros(length, dtype=torch.bool, device=self.device))

    def ranks(self, canvas: Sequence[int | None]) -> Tensor | None:
        """A number for each position, [len(canvas)]: a position sees those with its own or a lower one. None if all see
        all.
        """
        return None

    def sources(self, positions: Sequence[int]) -> list[int]:
        """The positions whose hidden states predict the given ones."""
        return [position - self.shifted for position in positions]

    @torch.inference_mode()
    def denoise(
        self,
        canvas: Sequence[int | None],
        wanted: Sequence[int] | None = None,
        computed: Sequence[int] | None = None,
        states: CanvasStates | None = None,
    ) -> Tensor:
        """Logits [len(wanted), V] in float32 or float64; None on the canvas is masked. The mask itself gets -inf.

        wanted: positions to predict, all by default; nothing predicts the first one of a shifted model, whose row is
        NaN. computed: positions that pass through the layers, ascending, all by default; the others take part as
        `states` has them. Raises ValueError if a wanted position is predicted by one that is not computed.
        """
        with self.lock:
            return self._forward([CanvasPass(canvas, wanted, computed, states)])[0]

    def forward(self, passes: Sequence[CanvasPass], plan: Any = None) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Logits of several canvases in one forward, as `denoise` gives them, and no captured states: the interface of
        `Model.forward`. The caller holds the lock.
        """
        with torch.inference_mode():
            return self._forward(passes), {}

    def _forward(self, passes: Sequence[CanvasPass]) -> list[Tensor]:
        for one in passes:
            missing = set(self.sources(one.predicted)) - set(one.entering) - {-1}
            if missing:
                raise ValueError(f"positions {sorted(missing)} predict wanted ones and are not computed")
        rows = [self._predicting(one, *states) for one, states in zip(passes, self._hidden(passes))]
        logits = self.network.get_output_embeddings()(torch.cat(rows))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits[:, self.mask_id] = float("-inf")
        parts = logits.split([len(one.predicted) + len(one.shadows) for one in passes])
        for one, part in zip(passes, parts):
            if unread := [row for row, source in enumerate(self.sources(one.predicted)) if source < 0]:
                part[on_device(unread, part.device, torch.long)] = float("nan")
        return list(parts)

    def _predicting(self, one: CanvasPass, at: Tensor, hidden: Tensor) -> Tensor:
        """Hidden states that predict the wanted positions and the shadows, [len(wanted) + len(shadows), hidden_size].
        """
        row_of = {position: row for row, position in enumerate(at.tolist())}
        rows = [row_of.get(source, 0) for source in self.sources(one.predicted)]
        rows += [row_of[entry] for entry in one.shadowing]
        return hidden[torch.tensor(rows, dtype=torch.long, device=self.device)]

    def _hidden(self, passes: Sequence[CanvasPass]) -> list[tuple[Tensor, Tensor]]:
        """For each canvas the positions computed in the last layer, and their hidden states after the final norm."""
        base, runs = self.network.model, [_CanvasRun(one, self) for one in passes]
        hidden, rotation = base.embed_tokens(torch.cat([run.ids for run in runs])), None
        for index, layer in enumerate(base.layers):
            entering = torch.cat([run.enter(index, own) for run, own in zip(runs, _split(hidden, runs))])
            if rotation is None or len(entering) > len(hidden):
                rotation = base.rotary_emb(entering[None], torch.cat([run.places[run.at] for run in runs])[None])
            hidden = entering + self._attention(layer, index, layer.input_layernorm(entering), rotation, runs)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return [(run.at, own) for run, own in zip(runs, _split(base.norm(hidden), runs))]

    def _attention(
        self, layer: nn.Module, index: int, hidden: Tensor, rotation: tuple[Tensor, Tensor], runs: list[_CanvasRun]
    ) -> Tensor:
        part = layer.self_attn
        queries, keys, values = (
            project(hidden).view(len(hidden), -1, part.head_dim).transpose(0, 1)  # [heads, n, head_dim]
            for project in (part.q_proj, part.k_proj, part.v_proj)
        )
        if hasattr(part, "q_norm"):
            queries, keys = part.q_norm(queries), part.k_norm(keys)
        sizes = [len(run.at) for run in runs]
        states = zip(*(x.split(sizes, 1) for x in (rotated(queries, *rotation), rotated(keys, *rotation), values)))
        mixed = torch.cat([run.attend(index, *own, part.scaling) for run, own in zip(runs, states)], 1)
        return part.o_proj(mixed.transpose(0, 1).flatten(1))


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of states [heads, n, head_dim]; cos and sin [1, n, head_dim]."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


class _CanvasRun:
    """One canvas on its way through the layers: the positions that are computed, and its states."""

    def __init__(self, one: CanvasPass, model: MaskedDenoiser):
        self.one, self.states = one, one.states or model.new_states(len(one.entries))
        self.ranks = model.ranks(one.canvas)
        ids = [model.mask_id if one.entries[entry] is None else one.entries[entry] for entry in one.entering]
        parts = (ids, one.entering, one.places)
        self.ids, self.at, self.places = (torch.tensor(part, device=model.device) for part in parts)
        self.states.present[len(one.canvas):] = False  # shadows of an earlier forward
        self.states.present[self.at] = True
        one.computed_by_layer.clear()

    def enter(self, layer: int, hidden: Tensor) -> Tensor:
        """The hidden states that the layer computes."""
        self.at, hidden = self.states.enter(layer, self.at, hidden)
        self.one.computed_by_layer.append(len(self.at))
        return hidden

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention of this canvas's queries to the present positions that they see, [heads, n, head_dim]."""
        groups = len(queries) // len(keys)
        keys, values = self.states.write(layer, self.at, keys, values)
        self.states.attended(layer, self.at, queries * scale)
        return scaled_dot_product_attention(
            queries[None], keys.repeat_interleave(groups, 0)[None], values.repeat_interleave(groups, 0)[None],
            attn_mask=self._allowed(), scale=scale,
        )[0]

    def _allowed(self) -> Tensor | None:
        """Which present entries each computed one sees, bool [n, present]; None for all."""
        if self.ranks is None and not self.one.shadows:
            return None
        seen = self.states.present.nonzero()[:, 0]
        allowed = visible(self.one, self.at.device)[self.at][:, seen]
        if self.ranks is not None:
            allowed &= self.ranks[self.places[seen]][None] <= self.ranks[self.places[self.at]][:, None]
        return None if bool(allowed.all()) else allowed


def _split(hidden: Tensor, runs: Sequence[_CanvasRun]) -> tuple[Tensor, ...]:
    return hidden.split([len(run.at) for run in runs])
