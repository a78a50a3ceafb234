"""Cache policies: which KV slots stay, and in which form?"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from playground.contract.base import Strategy
from playground.engine.attention.attention_mask import EMPTY

if TYPE_CHECKING:
    from torch import Tensor

    from playground.engine.attention.attention_mask import RowsAndSlots
    from playground.engine.attention.attention_parts import AttentionParts
    from playground.engine.attention.cascade_attention import PartialAttention
    from playground.engine.cache.kv_buffer import MergeMap, QuantisedRows
    from playground.events import Event

@dataclass(frozen=True)
class Held:
    """The KV slots of one layer, of which a policy selects the live ones. A slot whose position is EMPTY holds no
    token.
    """

    layer: int
    layers: int
    # "prefill": the prompt was read; "keep": tokens were committed; "branch": by parallel sequences; "chunk": a part of
    # the prompt was read, by a policy with `prefill_chunk`
    moment: str
    prompt: int  # tokens of the prompt
    next: int  # position of the next row
    positions: Tensor  # true positions, [kv_heads, slots]; [1, slots] if all heads agree
    read: Callable[[str], Tensor]  # "keys" or "values" of the slots, [kv_heads, slots, head_dim]
    write: Callable[[str, Tensor], None] | None = None  # overwrites "keys" or "values", shaped as they are read

    @cached_property
    def live(self) -> Tensor:
        """Slots that hold a token, bool [1 or kv_heads, slots]."""
        return self.positions != EMPTY


@dataclass(frozen=True)
class Full:
    """The size of the cache without any policy."""

    prompt: int  # tokens
    generated: int  # tokens after the prompt
    layers: int
    heads: int  # KV heads
    head: int  # head_dim
    bits: int  # per number

    @property
    def length(self) -> int:
        return self.prompt + self.generated


class Merge(NamedTuple):
    """Which slots of one layer are merged into which, and with what weights."""

    merge_map: MergeMap
    source_weights: Tensor  # weight of each slot that is merged away, [m]
    target_weights: Tensor  # weight of each slot that others are merged into, [k]


class CachePolicy(Strategy):
    """Decides which KV slots are retained, and in which form.

    It acts after the prefill and after every commit, on committed tokens only.

    What a policy implements depends on what it is based on:

    - positions alone (`row_wise`): `visible`, a mask; slots that no later row can see are freed;
    - attention (`uses_attention`): `observe_attention` receives the weights of committed rows, `retain` selects slots;
    - per-row selection (`selects_per_row`): `select_for_rows` selects what each row attends to, by its attention, or
      with `selects_by_states` `select_by_states`, before its attention is computed;
    - states beside the slots (`adds_memory`): `attend_memory`;
    - the prompt's queries (`uses_queries`): `observe_queries` receives their query states;
    - the prompt's attention by query head (`uses_query_heads`, with `uses_attention`): `observe_query_heads`;
    - the attention of tokens that are read once after the prompt: `probe_tokens` or `probe_texts`, and by query head
      (`uses_probe_heads`) `observe_probe_heads`;
    - merging (`merges`): `merge` selects the live slots that absorb evicted ones;
    - quantisation (`quantises`): `quantise_count` and `quantise`, or `quantise_layer` if layers differ;
    - weights of the network (`uses_parts`): `begin`;
    - a prompt read in parts (`prefill_chunk`): it acts after each of them, too;
    - a shortened prompt in later layers: `cut_layers` and `select_prompt`.

    Eviction and quantisation are irreversible.
    """

    kind = "cache_policy"
    questions_per_task: ClassVar[int] = 8  # of the small world that `calibrate` reads if it is given no texts
    row_wise: ClassVar[bool] = True  # False if what a row sees depends on the path, not on its position alone
    prompt_only: ClassVar[bool] = False  # acts on the prompt alone: what is generated after it stays as it is
    uses_attention: ClassVar[bool] = False
    quantises: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    selects_per_row: ClassVar[bool] = False
    uses_queries: ClassVar[bool] = False
    uses_query_heads: ClassVar[bool] = False
    uses_parts: ClassVar[bool] = False
    uses_plain_keys: ClassVar[bool] = False  # with `uses_parts`: models that normalise keys are refused
    uses_probe_heads: ClassVar[bool] = False
    selects_by_states: ClassVar[bool] = False
    adds_memory: ClassVar[bool] = False
    text_length = 0  # tokens of the text, set before `observe_attention` and before the policy acts
    spell: Callable[[str], list[int]] = staticmethod(lambda text: [])  # a text as token ids; set before the run

    def begin(self, parts: AttentionParts) -> None:
        """Before the run, with `uses_parts`: the target's attention weights and rotary embedding.

        Raises Refusal if the knobs do not fit the target.
        """

    @property
    def prefill_chunk(self) -> int:
        """Tokens of the prompt after which it acts while the prompt is read; 0 acts at the end of the prompt only."""
        return 0

    @property
    def restricts_prompt(self) -> bool:
        """Whether `visible` and the renumbering of positions apply to the rows of the prompt, too."""
        return False

    @property
    def cuts_prompt(self) -> bool:
        """Whether it may shorten the prompt for later layers."""
        return type(self).cut_layers is not CachePolicy.cut_layers

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Which key positions [m] each query position [n, 1] may attend to, bool [n, m]. Depends on positions alone."""
        raise NotImplementedError

    def wants_attention(self, position: int, prompt: int) -> bool:
        """Whether `observe_attention` should receive the row at `position`; `prompt` is the prompt length in tokens."""
        return True

    def observe_attention(self, layer: int, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        """Receive the attention of committed rows.

        `weights` [kv_heads, n, m] are summed over the query heads of a group, for query positions [n] over key
        positions [1 or kv_heads, m]; a negative key position marks an empty slot, which has no weight.
        """

    def selects_for(self, position: int, prompt: int) -> bool:
        """Whether `select_for_rows` selects what the row at `position` sees; any other row sees every slot."""
        return position >= prompt

    def select_for_rows(self, layer: int, weights: Tensor, query_positions: Tensor) -> Tensor:
        """What the rows at query positions [n] see, bool [kv_heads, n, m].

        `weights` [kv_heads, n, m] are their attention weights, summed over the query heads of a group.
        """
        raise NotImplementedError

    def select_by_states(self, layer: int, query_states: Tensor, key_states: Tensor, around: RowsAndSlots) -> Tensor:
        """What rows see, bool [kv_heads, n, m], by query [kv_heads, group, n, d] and key states [kv_heads, m, d]."""
        raise NotImplementedError

    def attend_memory(
        self, layer: int, query_states: Tensor, query_positions: list[int], seen: PartialAttention
    ) -> Tensor:
        """Attention of rows over the slots and over what the policy holds beside them, [heads, n, d].

        Query states are [heads, n, d]; `seen` is their attention over the slots alone. The model is one whose
        attention is a plain softmax.
        """
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Memory of what it holds beside the slots."""
        return 0

    def logits_after_prompt(self) -> Tensor | None:
        """With `adds_memory`: logits [V] of the first generated token, if not those after the last prompt token."""
        return None

    def observe_queries(self, layer: int, query_states: Tensor) -> None:
        """Receive the query states of the next rows of the prompt, [kv_heads, group, n, head_dim]."""

    def observe_query_heads(self, layer: int, weights: Tensor) -> None:
        """Receive the attention of the next rows of the prompt by query head, [kv_heads, group, n, tokens so far].

        Only if every row of the prompt is wanted by `wants_attention` and nothing is evicted before its end.
        """

    def observe_probe_heads(self, layer: int, weights: Tensor) -> None:
        """Receive the attention of the next rows of probe tokens by query head, [kv_heads, group, n, tokens before].

        Without their attention to each other.
        """

    def cut_layers(self, layers: int) -> list[int]:
        """Layers, ascending and never the first, that read only the prompt tokens `select_prompt` selects."""
        return []

    def select_prompt(self, held: Held) -> Tensor:
        """Which prompt tokens continue past a cut, bool [1, slots], given the layer before it.

        The last prompt token always continues.
        """
        raise NotImplementedError

    @property
    def renumbers_positions(self) -> bool:
        """Whether rows use their index in the cache as position; then `before_gap` and `gap_width` are implemented."""
        return False

    def before_gap(self, key_positions: Tensor) -> Tensor:
        """Which true key positions [..., m] lie before the gap that positions leave open, bool."""
        raise NotImplementedError

    def gap_width(self, query_positions: Tensor) -> Tensor:
        """Width of the gap for rows at query positions [n], in positions, [n]."""
        raise NotImplementedError

    def retain(self, held: Held) -> Tensor:
        """Which slots of one layer stay, bool [1 or kv_heads, slots]; for a row-wise policy, those its next row sees.
        """
        raise NotImplementedError

    def retain_all(self, held: Sequence[Held]) -> list[Tensor]:
        """`retain` for each layer; override it if processing all layers at once is cheaper."""
        return [self.retain(layer) for layer in held]

    def merge(self, held: Held, stays: Tensor, goes: Tensor) -> Merge | None:
        """Which of the evicted slots are merged into which of the live ones, both bool [kv_heads, slots].

        Called before eviction if any slot is evicted; None merges nothing.
        """
        raise NotImplementedError

    def budget(self, generated: int) -> int:
        """Most slots a layer and KV head may hold after a commit, with `generated` tokens after the prompt."""
        raise NotImplementedError

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, Any] | None:
        """Knobs with which a layer and KV head keeps `tokens` tokens of a prompt, on average and as nearly as possible.

        None if the policy is not parametrised by a number of tokens. Comparisons at equal budget use them.
        """
        return None

    def expected_share(self, full: Full) -> float:
        """Share of a full cache's bytes it intends to hold, from its budget or from the bits of its quantisation."""
        if self.quantises:
            return sum(self._packed_share(part, full) for part in ("keys", "values")) / 2
        return min(1.0, self.budget(full.generated) / full.length) if "budget_respected" in self.guarantee else 1.0

    def _packed_share(self, part: str, full: Full) -> float:
        packed = self.quantise_count(part, full.length) / full.length
        return 1 - packed + packed * self.quantised_bits(part, full) / full.bits

    def quantised_bits(self, part: str, full: Full) -> float:
        """Bits per quantised number of "keys" or "values", with its share of scales and other metadata.
        """
        raise NotImplementedError

    def probe_tokens(self, text: list[int]) -> list[int]:
        """Tokens to append to the prompt once and discard: only `observe_attention` sees their rows."""
        return []

    def probe_texts(self, text: list[int], room: int) -> list[list[int]]:
        """Several texts of at most `room` tokens, each appended to the prompt and discarded like `probe_tokens`."""
        return [self.probe_tokens(text)[:room]]

    def chunk_probe(self, text: list[int], read: int) -> list[int]:
        """With `prefill_chunk`: tokens to append and discard after `read` tokens of the prompt, as `probe_tokens`."""
        return []

    def explain(self, prompt: int, layers: int) -> Iterator[Event]:
        """Yield what to show, besides the cache's contents, about tokens committed since the last call.

        `prompt` is the prompt length in tokens, `layers` the model's depth.
        """
        yield from ()

    def quantise_count(self, part: str, exact: int) -> int:
        """How many of the oldest rows of "keys" or "values" are quantised now, of `exact` rows in full precision."""
        return 0

    def quantise(self, part: str, rows: Tensor, packed: QuantisedRows | None) -> QuantisedRows:
        """Quantise rows [kv_heads, n, head_dim], together with those quantised before them."""
        raise NotImplementedError

    def quantise_layer(self, layer: int, part: str, rows: Tensor, packed: QuantisedRows | None) -> QuantisedRows:
        """`quantise` for the slots of one layer; override it if layers are quantised differently.

        Nothing is evicted, so the position of a row is its index in the cache.
        """
        return self.quantise(part, rows, packed)
