"""LoopServe attends along selected lines and selects them repeatedly: compared with attention written out over the
whole text.
"""
from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, watch, write
from torch import Tensor

from playground.contract import make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.attention import eager_attention, line_attention, segment_attention
from playground.engine.attention.eager_attention import Scoring
from playground.engine.attention.line_attention import AttentionLines, attend_lines
from playground.engine.forward_input import ForwardInput
from playground.errors import Refusal
from playground.events import Cache, Figure
from playground.trace import check
from strategies.kv_cache.loopserve import LoopServe, covering, sampled
from support.budget_policies import TEXT, TREE, best, roomy, with_policy
from support.eviction import LENGTH, PROMPT, LivePositions, Wrong, alone, course, live_positions, models
from support.uncomp_by_hand import BY_HAND, UNCOMP_TIGHT, Latest, WholeText
from support.wrong_variants import variants_of

LOOP_TIGHT = {"coverage": 0.8, "rows": 6, "size": 5, "period": 3}
COLLAPSES = {
    "loopserve": [
        *roomy("loopserve", coverage=1.0, size=2048),
        *roomy("loopserve", coverage=1.0, size=2048, dropped="view"),
        Collapse(
            with_policy(TREE, "loopserve", coverage=1.0, size=6, period=64),
            with_policy(TREE, "snapkv", window=64, capacity=70, kernel=1),
        ),
    ],
}


# --- lines of attention ---

def lines_by_hand(weights: list[list[float]], rows: list[int], coverage: float) -> set[tuple[str, int]]:
    """Which lines of a causal matrix are selected, one after the other, by the weight on them that is not covered yet.
    """
    cells = {(i, j): weights[i][j] for i in rows for j in range(i + 1)}
    lines = [("column", j) for j in range(len(weights[0]))] + [("diagonal", o) for o in range(len(weights))]
    mass = {
        line: sum(w for (i, j), w in cells.items() if line in (("column", j), ("diagonal", i - j))) for line in lines
    }
    mass[lines[0]] = mass["diagonal", 0] = math.inf
    taken: set = set()
    for line in sorted(lines, key=lambda line: (-mass[line], lines.index(line))):
        if len(taken) >= 2 and on(taken, cells) >= coverage * sum(cells.values()) - 1e-6:
            break
        taken.add(line)
    return taken


def on(lines: set, cells: dict) -> float:
    return sum(w for (i, j), w in cells.items() if ("column", j) in lines or ("diagonal", i - j) in lines)


def drawn(lines: set, count: int) -> Tensor:
    return torch.tensor(
        [
            [j <= i and (("column", j) in lines or ("diagonal", i - j) in lines) for j in range(count)]
            for i in range(count)
        ]
    )


def causal_rows(heads: int, n: int, power: float = 6.0, seed: int = 0) -> Tensor:
    """Attention of n rows over themselves, [heads, n, n]; the larger the power, the fewer tokens a row looks at."""
    rows = (torch.rand(heads, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** power).tril()
    return rows / rows.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("most", [1, 4, 99])
def test_the_fewest_lines_with_most_attention_are_selected(seed, coverage, most):
    weights, rows = causal_rows(3, 12, seed=seed), sampled(12, most)
    cover = covering(weights[:, rows], torch.arange(12), rows, coverage)
    mask = cover.lines.mask(torch.arange(12))
    for head in range(3):
        lines = lines_by_hand(weights[head].tolist(), rows, coverage)
        assert torch.equal(mask[head], drawn(lines, 12))
    assert (cover.attention >= coverage * cover.all_attention - 1e-6).all()
    assert cover.cells.tolist() == mask.sum((1, 2)).tolist() and cover.all_cells.tolist() == [78] * 3
    assert mask.diagonal(dim1=1, dim2=2).all() and mask[:, :, 0].all()


def test_a_later_segment_is_covered_over_the_whole_text_before_it():
    weights = causal_rows(2, 15, seed=5)
    whole = covering(weights[:, 9:], torch.arange(15), list(range(9, 15)), 0.8)
    part = covering(weights[:, 9:], torch.arange(9, 15), list(range(6)), 0.8)
    assert all(map(torch.equal, part.lines, whole.lines))


def test_a_token_that_all_rows_attend_to_is_a_column_and_a_common_distance_a_diagonal():
    n = torch.arange(10)
    column = torch.where(n[None] == 3, 0.9, 0.02).expand(10, 10).tril()[None]
    diagonal = torch.where(n[:, None] - n[None] == 2, 0.9, 0.02).tril()[None]
    for weights, line in ((column, ("column", 3)), (diagonal, ("diagonal", 2))):
        found = covering(weights, n, list(range(10)), 0.75).lines.mask(n)
        assert torch.equal(found[0], drawn({("column", 0), ("diagonal", 0), line}, 10))


@pytest.mark.parametrize("count, most", [(1, 1), (7, 7), (7, 99), (10, 3), (128, 32)])
def test_sampled_rows_are_spread_over_the_segment_and_include_its_last_row(count, most):
    rows = sampled(count, most)
    assert rows == sorted(set(rows)) and len(rows) == min(count, most) and rows[-1] == count - 1 and rows[0] >= 0
    gaps = [after - before for before, after in zip(rows, rows[1:])]
    assert not gaps or max(gaps) - min(gaps) <= 1


# --- attention along lines ---

def random_lines(heads: int, m: int, seed: int) -> AttentionLines:
    chance = torch.Generator().manual_seed(seed)
    lines = AttentionLines(torch.rand(heads, m, generator=chance) < 0.2, torch.rand(heads, m, generator=chance) < 0.15)
    lines.columns[:, 0] = lines.diagonals[:, 0] = True
    return lines


def by_mask(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scoring: Scoring | None) -> Tensor:
    """Attention whose weights are computed in full; the cells that are not seen get none."""
    group = len(query) // len(keys)
    scores = query @ keys.repeat_interleave(group, 0).mT * 0.5
    if scoring and scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~seen.repeat_interleave(group, 0), -math.inf)
    if scoring and scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks[:, None, None].expand(-1, len(scores[0]), 1)], 2)
    return scores.softmax(-1)[:, :, :keys.shape[1]] @ values.repeat_interleave(group, 0)


def along_lines(seed: int, scoring: Scoring | None) -> bool:
    """Whether nine rows at the end of 21 tokens, four query heads over two, agree with masked attention."""
    chance = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(h, n, 4, generator=chance, dtype=torch.float64)
                           for h, n in ((4, 9), (2, 21), (2, 21)))
    lines = random_lines(2, 21, seed)
    seen = lines.mask(torch.arange(12, 21))
    seen &= torch.rand(seen.shape, generator=chance) < 0.9  # a model that hides some
    seen[:, torch.arange(9), torch.arange(12, 21)] = True
    found = attend_lines(query, (keys, values), lines, seen, 0.5, scoring)
    return torch.allclose(found, by_mask(query, keys, values, seen, scoring), atol=1e-12)


@pytest.mark.parametrize("scoring", [None, Scoring(softcap=2.0), Scoring(sinks=torch.arange(4.0).double())])
def test_attention_along_lines_is_that_of_a_mask(scoring):
    assert all(along_lines(seed, scoring) for seed in range(10))


def test_a_cell_on_two_lines_that_counts_twice_is_refused(monkeypatch):
    def diagonals(lines: AttentionLines, seen: Tensor, first: int):
        return plain(AttentionLines(torch.zeros_like(lines.columns), lines.diagonals), seen, first)

    plain = line_attention._diagonals
    monkeypatch.setattr(line_attention, "_diagonals", diagonals)
    assert not any(along_lines(seed, None) for seed in range(10))


class Products:
    """Counts the products of queries and keys of the prompt's attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        for module in (eager_attention, line_attention):
            monkeypatch.setattr(module, "attention_logits", self._counted(module.attention_logits))
        monkeypatch.setattr(line_attention, "_diagonals", self._on_diagonals(line_attention._diagonals))
        monkeypatch.setattr(segment_attention, "attend", self._attended(segment_attention.attend))

    def _counted(self, logits):
        def counted(query, keys):
            self.count += query.shape[0] * query.shape[1] * keys.shape[1]
            return logits(query, keys)
        return counted

    def _on_diagonals(self, diagonals):
        def counted(*about):
            cells = diagonals(*about)
            self.count += 2 * cells.slots.numel()  # two query heads share a KV head
            return cells
        return counted

    def _attended(self, attend):
        def counted(query, keys, *rest):
            self.count += query.shape[0] * query.shape[1] * keys.shape[1]
            return attend(query, keys, *rest)
        return counted


def products(knobs: dict, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a prompt of 110 tokens and ten more."""
    with monkeypatch.context() as patch:
        counted = Products(patch)
        course(alone(make("loopserve", **knobs)), models(), PROMPT * 5)
        return counted.count


def test_only_the_sample_and_the_cells_on_lines_are_computed(monkeypatch):
    few, whole = {"coverage": 0.5, "rows": 8, "period": 4}, {"coverage": 1.0, "period": 4}
    assert products(few, monkeypatch) < 0.7 * products(whole, monkeypatch)


# --- a lane ---

@dataclass
class LoopByHand:
    coverage: float = 0.8
    rows: int = 6
    size: int = 5
    period: int = 3
    one_way: bool = True
    latest: Latest = field(default_factory=Latest)
    cut: dict = field(default_factory=dict)
    hidden: dict = field(default_factory=lambda: defaultdict(set))  # what a view does not show

    def reads(self, full: Tensor) -> Tensor:
        count = full.shape[1]
        rows = [count - 1 - count * i // min(count, self.rows) for i in range(min(count, self.rows))]
        if self.coverage == 1:
            return torch.ones_like(full, dtype=torch.bool)
        return torch.stack([drawn(lines_by_hand(head.tolist(), rows, self.coverage), count) for head in full])

    def stays(self, text: WholeText, layer: int, head: int, live: set[int], rows: list[list[float]]) -> set[int]:
        at, read = (layer, head), max(live) + 1
        candidates = live if self.one_way else set(range(read))
        votes = self.latest.hear(at, rows, candidates, self.period)
        if read != len(PROMPT) and read < self.cut[at] + self.period:
            return live
        self.cut[at] = read
        late = {p for p in candidates if p >= read - self.period}
        return late | best({p: votes[p] for p in candidates - late}, self.size)


def views(assembly: Assembly, speakers: dict) -> tuple[list[int], list[LivePositions]]:
    """What a lane wrote and the slots its mask showed after every commit; its cache holds everything."""
    found: list[LivePositions] = []
    for lane in watch(assembly, speakers, PROMPT, Limits(0, LENGTH), Draws(0)):
        if lane.generated > len(found):
            held, policy = live_positions(lane), lane.assembly.cache_policy
            assert all(head == set(range(lane.target.store.length)) for layer in held for head in layer)
            shown = [[{p for p in head if p >= seen.shape[1] or seen[i, p]} for i, head in enumerate(layer)]
                     for seen, layer in zip((policy._views[at] for at in sorted(policy._views)), held)]
            found += [shown] * (lane.generated - len(found))
    return lane.tokens[len(PROMPT):], found


LOOPS = [
    {},
    {"coverage": 1.0},
    {"size": 2048},
    {"rows": 99, "coverage": 0.6},
    {"period": 1, "size": 8},
    {"period": 5, "size": 2},
]


@pytest.mark.oracle("loopserve")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", LOOPS, ids=str)
def test_loopserve_text_and_cache_equal_decoding_by_hand(architecture, knobs):
    policy = make("loopserve", **{**LOOP_TIGHT, **knobs})
    found = course(alone(policy), models(architecture))
    assert found == WholeText(architecture, LoopByHand(**knobs)).write(PROMPT, LENGTH)
    assert all(len(head) < policy.size + 2 * policy.period for held in found[1] for layer in held for head in layer)


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", [{}, {"coverage": 1.0, "period": 2}], ids=str)
def test_a_masked_slot_returns_when_later_rows_attend_to_it(architecture, knobs):
    found = views(alone(make("loopserve", dropped="view", **{**LOOP_TIGHT, **knobs})), models(architecture))
    assert found == WholeText(architecture, LoopByHand(one_way=False, **knobs)).write(PROMPT, LENGTH)
    assert any(now - before - {max(now)} for earlier, later in zip(found[1], found[1][1:])
               for old, new in zip(earlier, later) for before, now in zip(old, new)), "nothing came back"


class TheLastRowsAreTheSample(LoopServe):
    def sampled_rows(self, rows):
        return list(range(rows))[-self.rows:]


class HeadsShareTheirLines(LoopServe):
    def select_lines(self, layer, weights, sampled, query_positions):
        lines = super().select_lines(layer, weights.sum(0, keepdim=True), sampled, query_positions)
        return AttentionLines(*(part.expand(len(weights), -1) for part in lines))


class OnlyColumns(LoopServe):
    def select_lines(self, layer, weights, sampled, query_positions):
        columns, diagonals = super().select_lines(layer, weights, sampled, query_positions)
        return AttentionLines(columns, diagonals & (torch.arange(diagonals.shape[1]) == 0))


class TheEndOfThePromptChoosesForever(LoopServe):
    def wants_attention(self, position, prompt):
        return prompt - self.period <= position < prompt


class AllRowsChoose(LoopServe):
    def __post_init__(self):
        super().__post_init__()
        self.recent_attention.count = 1000


class ChosenOnce(LoopServe):
    def retain(self, held):
        return super().retain(held) if held.moment == "prefill" else held.live


class ChosenEveryTime(LoopServe):
    def retain(self, held):
        self._last.clear()
        return super().retain(held)


@pytest.mark.refuses("loopserve")
@pytest.mark.parametrize("wrong", variants_of(LoopServe, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_loop_is_detected(wrong):
    expected = WholeText("llama", LoopByHand()).write(PROMPT, LENGTH)
    assert course(alone(LoopServe(**LOOP_TIGHT)), models()) == expected
    assert course(alone(wrong(**LOOP_TIGHT)), models())[1] != expected[1]


def test_counting_intersections_twice_covers_too_little():
    """If intersections count twice, lines cover less than required; in some of 20 matrices this shows."""
    short = 0
    for seed in range(20):
        weights, rows = causal_rows(1, 12, power=2.0, seed=seed), list(range(12))
        columns, diagonals = weights[0].sum(0), torch.stack([weights[0].diagonal(-o).sum() for o in range(12)])
        gained = torch.cat([columns, diagonals]).sort(descending=True)
        count = int((gained.values.cumsum(0) < 0.8 * 12).sum()) + 1
        lines = {("column", i) if i < 12 else ("diagonal", i - 12) for i in gained.indices[:count].tolist()}
        short += float(weights[0][drawn(lines, 12)].sum()) < 0.8 * 12 - 1e-6
        assert float(covering(weights, torch.arange(12), rows, 0.8).attention) >= 0.8 * 12 - 1e-6
    assert short >= 10


# --- effects on a lane ---

TIGHT = {"uncomp": UNCOMP_TIGHT, "loopserve": LOOP_TIGHT}
each = pytest.mark.parametrize(
    "name, knobs",
    [*TIGHT.items(), ("loopserve", {**LOOP_TIGHT, "dropped": "view"})],
    ids=["uncomp", "loopserve", "view"],
)


@each
def test_a_rejected_draft_token_leaves_no_trace(name, knobs):
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    speculative = course(Assembly(decoder, cache_policy=make(name, **knobs)), models())
    assert speculative == course(alone(make(name, **knobs)), models())


@each
@pytest.mark.parametrize("config", [LaneConfig("greedy"), TREE], ids=["greedy", "tree"])
def test_a_lane_reports_its_selections(name, knobs, config):
    session = prepare(pair(), [with_policy(config, name, **knobs)], Prompt(TEXT), Limits(max_new_tokens=10))
    figures = [stamped.event for stamped in session if isinstance(stamped.event, Figure)]
    assert check(session.trace) == []
    recorded = {figure.name: figure.data for figure in figures if figure.shape == "matrix"}
    assert len(recorded) == 2 and all(
        len(data["values"]) == 3 and len(data["values"][0]) == 2 for data in recorded.values()
    )
    if name == "uncomp":
        assert {number for layer in recorded["budget of each head, tokens"]["values"] for number in layer} == {7, 12}
        assert all(0 < number <= 1 for layer in recorded["entropy of the queries"]["values"] for number in layer)
    else:
        assert all(
            0.8 - 1e-6 <= number <= 1
            for layer in recorded["share of the sampled attention covered"]["values"]
            for number in layer
        )
        assert any(
            number < 1
            for layer in recorded["share of the prompt's attention matrix read"]["values"]
            for number in layer
        )


def test_the_figure_counts_removed_and_returned_slots():
    def turnover(dropped: str) -> list[dict]:
        session = prepare(
            pair(),
            [with_policy(LaneConfig("greedy"), "loopserve", dropped=dropped, **LOOP_TIGHT)],
            Prompt(TEXT),
            Limits(max_new_tokens=12),
        )
        events = [stamped.event for stamped in session]
        recorded = [
            event.data["series"]
            for event in events
            if isinstance(event, Figure) and event.shape == "scalar" and "dropped" in event.data["series"]
        ]
        evicted = sum(event.evicted for event in events if isinstance(event, Cache))
        assert evicted == (sum(series["dropped"] for series in recorded) if dropped == "gone" else 0)
        return recorded

    gone, view = turnover("gone"), turnover("view")
    assert (
        not any(series["restored"] for series in gone)
        and any(series["restored"] for series in view)
        and len(gone) == len(view) == 4
    )


@each
def test_a_model_without_attention_weights_decodes(name, knobs):
    lane = write(alone(make(name, **knobs)), {"target": TableModel("abc")}, [0, 1, 2] * 8, Limits(0, 6), Draws(0))
    assert lane.generated == 6


@pytest.mark.parametrize(
    "knobs, says",
    [
        (dict(window=32), "raise high and low above it"),
        (dict(kernel=4), "take 5"),
        (dict(marks="a b"), "run `fit` to print"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make("uncomp", **knobs)
    assert str(refusal.value).count(".") <= 1 + ("marks" in knobs)


# --- a prompt that several sequences share ---

def test_parallel_sequences_share_one_copy_of_their_prompt():
    """As in Hydragen, Juravsky et al. 2024, arXiv 2402.05099: bytes for the prompt and what each sequence added, not
    for a prompt each.
    """
    session = prepare(
        pair(), [LaneConfig("best_of_n", {"n": 6, "temperature": 2.0})], Prompt(TEXT), Limits(max_new_tokens=5)
    )
    prompt, seen = None, []
    for _ in session:
        store = session._runners[0].lane.target.store
        prompt = prompt or store.length
        row = (
            store.heads * store.keys[0].rows.shape[2] * store.keys[0].rows.element_size()
            if store.keys[0].rows is not None
            else 0
        )
        if store.parents and row:
            assert store.length == prompt and store.bytes() == 2 * store.depth * row * (prompt + len(store.parents))
            seen.append(len(store.parents))
    assert max(seen) > 20, "the sequences did not part"


def test_a_forks_row_equals_that_of_a_separate_run():
    """In float64, with every sequence's own tokens behind one prompt."""
    model = models()["target"]
    store, tails = model.new_store(), [[5, 6], [5, 9], [80, 7]]
    model.forward([ForwardInput(store, PROMPT, list(range(-1, len(PROMPT) - 1)))])
    store.commit(len(PROMPT) - 1)
    (rows,), _ = model.forward([ForwardInput(store, [tail[0] for tail in tails], [-1] * 3)])
    (rows,), _ = model.forward([ForwardInput(store, [tail[1] for tail in tails], [0, 1, 2])])
    for row, tail in zip(rows, tails):
        ids = PROMPT + tail
        (own,), _ = model.forward([ForwardInput(model.new_store(), ids, list(range(-1, len(ids) - 1)))])
        assert (row - own[-1]).abs().max() < 1e-9
