"""Cache policies that ask what a head looks for before they cut, or choose again and again: held against attention written out over the whole text."""
from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from saved import save_models
from tables import TableModel, watch, write
from test_strategies_budgets import TEXT, TREE, best, roomy, with_policy
from test_strategies_eviction import LENGTH, PROMPT, Lives, Wrong, alone, course, lives, models
from torch import Tensor
from transformers import AttentionInterface

from playground import learning
from playground.draws import Draws
from playground.engine.model import Work
from playground.errors import Refusal
from playground.events import Cache, Failed, Figure
from playground.lane import Limits
from playground.recipe import Assembly, Recipe
from playground.session import Prompt, prepare
from playground.shell import main
from playground.strategy import make
from playground.trace import check
from strategies.kv_cache.loopserve import LoopServe, covering, sampled
from strategies.kv_cache.uncomp import UNComp, matrix_entropy, wide_half, written

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
UNCOMP_TIGHT = {"high": 12, "low": 7, "window": 3, "kernel": 3}
LOOP_TIGHT = {"coverage": 0.8, "rows": 6, "size": 5, "period": 3}
ALIKE = {"window": 3, "kernel": 3, "pooling": "max"}
COLLAPSES = {
    "uncomp": roomy("uncomp", high=2048, low=2048),
    "loopserve": [*roomy("loopserve", coverage=1.0, size=2048), *roomy("loopserve", coverage=1.0, size=2048, dropped="view"),
                  Collapse(with_policy(TREE, "loopserve", coverage=1.0, size=6, period=64), with_policy(TREE, "snapkv", window=64, capacity=70, kernel=1))],
}


# --- entropy of a matrix ---

def random_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def axes(d: int) -> Tensor:
    """Rows that point both ways along every axis, [1, 2 d, d]."""
    return torch.cat([torch.eye(d), -torch.eye(d)])[None].double()


def test_rows_along_one_line_have_no_entropy_wherever_it_lies():
    line = random_rows(40, 1) * random_rows(1, 8, seed=1)
    found = matrix_entropy(torch.stack([line, line + 100 * random_rows(8, seed=2)]), 8)
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize("d", [2, 5, 16])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_rows_that_point_everywhere_alike_have_all_of_it_and_some_eigenvalues_their_part(d, share):
    count = max(1, round(share * d))
    assert float(matrix_entropy(axes(d), count)) == pytest.approx(count / d)


def test_more_eigenvalues_never_tell_less_and_few_rows_not_much():
    found = [float(matrix_entropy(random_rows(1, 5, 12), count)) for count in range(1, 13)]
    assert found == sorted(found) and found[-1] <= math.log(5) / math.log(12) + 1e-6
    assert float(matrix_entropy(random_rows(1, 5, 12), 99)) == found[-1]


def test_neither_length_nor_direction_nor_where_the_rows_lie_matters():
    half = random_rows(20, 6)
    turn, _ = torch.linalg.qr(random_rows(6, 6, seed=3))
    longer = half * (1 + torch.arange(20)[:, None])
    rows = torch.stack([torch.cat([part, -part]) for part in (half, half @ turn, longer)] + [torch.cat([half, -half]) + 7])
    found = matrix_entropy(rows, 4)
    assert (found - found[0]).abs().max() < 1e-9 and found[0] > 0.1


def test_the_various_half_of_the_heads_is_wide():
    assert wide_half(torch.tensor([0.1, 0.4, 0.3, 0.2])).tolist() == [False, True, True, False]
    assert wide_half(torch.tensor([0.1, 0.1, 0.1])).tolist() == [True, True, False] and wide_half(torch.tensor([0.0])).tolist() == [True]
    assert written([torch.tensor([True, False]), torch.tensor([False, True])]) == "10.01"


# --- by hand: the whole text anew for each token, what every row saw written down ---

@dataclass
class WholeText:
    """Greedy decoding without a cache. `rule` says what the prompt's rows see, and after each forward what of the text lives on."""

    architecture: str
    rule: object
    seen: dict = field(default_factory=dict)  # by layer: what each row saw, [kv_heads, rows, rows]
    live: dict = field(default_factory=lambda: defaultdict(list))  # by layer: positions that later rows may see, by head
    queries: dict = field(default_factory=dict)  # of the prompt, by layer, [heads, n, d]

    @torch.inference_mode()
    def write(self, prompt: list[int], length: int) -> tuple[list[int], list[Lives]]:
        AttentionInterface.register("whole_text", self._attention)
        library = network(self.architecture)
        library.set_attn_implementation("whole_text")
        ids, held = list(prompt), []
        while len(held) < length:
            ids.append(int(library(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            held.append([[set(head) for head in self.live[layer]] for layer in sorted(self.live)])
        return ids[len(prompt):], held

    def _attention(self, module, query, key, value, mask, scaling, **others):
        layer, q, (heads, count) = module.layer_idx, query[0], key.shape[1:3]
        k, v = (part[0].repeat_interleave(len(q) // heads, 0) for part in (key, value))
        causal = torch.ones(count, count).tril().bool()
        scores = (q @ k.mT * scaling).masked_fill(~causal, -math.inf)
        if layer not in self.live:
            self.queries[layer] = q
        seen = self._seen(layer, scores.softmax(-1).unflatten(0, (heads, -1)).sum(1), causal)
        spread = scores.masked_fill(~seen.repeat_interleave(len(q) // heads, 0), -math.inf).softmax(-1)
        self._settle(layer, scores.softmax(-1), spread, heads)
        return (spread @ v).transpose(0, 1)[None], None

    def _seen(self, layer: int, full: Tensor, causal: Tensor) -> Tensor:
        """What each row sees, [kv_heads, n, n], by what it would see and attend to, summed over a group."""
        heads, count = len(full), len(causal)
        seen = torch.zeros_like(full, dtype=torch.bool)
        if layer not in self.live:
            seen |= self.rule.reads(full) & causal
        else:
            seen[:, :-1, :-1] = self.seen[layer]
            for head in range(heads):
                seen[head, -1, [*self.live[layer][head], count - 1]] = True
        self.seen[layer] = seen
        return seen

    def _settle(self, layer: int, full: Tensor, spread: Tensor, heads: int) -> None:
        count = full.shape[1]
        first = count - 1 if layer in self.live else 0
        live = [set(range(count)) for _ in range(heads)] if not first else [{*head, count - 1} for head in self.live[layer]]
        rows = (spread if self.rule.one_way and first else full).unflatten(0, (heads, -1)).sum(1)[:, first:]
        self.live[layer] = [self.rule.stays(self, layer, head, live[head], rows[head].tolist()) for head in range(heads)]


@dataclass
class Latest:
    """The last rows of a layer and head, a dict of weights by position each."""

    rows: dict = field(default_factory=lambda: defaultdict(list))

    def hear(self, at: tuple[int, int], rows: list[list[float]], live: set[int], most: int) -> dict[int, float]:
        self.rows[at] = [*self.rows[at], *(dict(enumerate(row)) for row in rows)][-most:]
        return {p: sum(row.get(p, 0.0) for row in self.rows[at]) for p in live}


@dataclass
class UNCompByHand:
    high: int = 12
    low: int = 7
    window: int = 3
    kernel: int = 3
    pooling: str = "max"
    eigenvalues: int = 32
    one_way: bool = True
    latest: Latest = field(default_factory=Latest)

    def reads(self, full: Tensor) -> Tensor:
        return torch.ones_like(full, dtype=torch.bool)

    def stays(self, text: WholeText, layer: int, head: int, live: set[int], rows: list[list[float]]) -> set[int]:
        votes, heads = self.latest.hear((layer, head), rows, live, self.window), text.seen[layer].shape[0]
        found = by_eigenvalues(text.queries[layer], heads, self.eigenvalues)
        wide = sum(other > found[head] for other in found) < (heads + 1) // 2
        late = {p for p in live if p > max(live) - self.window}
        early, reach = sorted(live - late), self.kernel // 2
        around = [[votes[p] for p in early[max(0, i - reach):i + reach + 1]] for i in range(len(early))]
        pooled = {p: max(near) if self.pooling == "max" else sum(near) / self.kernel for p, near in zip(early, around)}
        return late | best(pooled, (self.high if wide else self.low) - self.window)


def by_eigenvalues(queries: Tensor, heads: int, count: int) -> list[float]:
    """Entropy of each KV head's queries [heads, n, d], a row and an eigenvalue at a time, through singular values."""
    found = []
    for rows in queries.unflatten(0, (heads, -1)).flatten(1, 2):
        centred = [row - rows.mean(0) for row in rows]
        even = torch.stack([row / math.sqrt(float(row @ row)) for row in centred])
        squares = (torch.linalg.svdvals(even) ** 2).tolist()
        shares = sorted((s / sum(squares) for s in squares), reverse=True)[:count]
        found.append(-sum(s * math.log(s) for s in shares if s > 0) / math.log(rows.shape[1]))
    return found


UNCOMPS = [{}, {"pooling": "avg"}, {"eigenvalues": 2}, {"window": 1, "kernel": 1, "low": 2}, {"high": 22, "low": 18}]


def after_a_run(policy, architecture: str = "llama", forced: tuple[int, ...] = ()):
    """The policy as its lane left it; the lane has a copy."""
    *_, lane = watch(alone(policy), models(architecture), PROMPT, Limits(0, LENGTH, forced=forced), Draws(0))
    return lane.assembly.cache_policy


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", UNCOMPS, ids=str)
def test_uncomp_writes_and_holds_what_decoding_by_hand_does(architecture, knobs):
    policy = make("uncomp", **{**UNCOMP_TIGHT, **knobs})
    found = course(alone(policy), models(architecture))
    by_hand = WholeText(architecture, UNCompByHand(**knobs))
    assert found == by_hand.write(PROMPT, LENGTH)
    for read, held in enumerate(found[1], len(PROMPT)):
        for layer in held:
            rooms = sorted(min(read, policy.low if place < len(layer) // 2 else policy.high) for place in range(len(layer)))
            assert sorted(map(len, layer)) == rooms
    for layer, entropies in enumerate(after_a_run(policy, architecture)._entropies.tolist()):
        assert entropies == pytest.approx(by_eigenvalues(by_hand.queries[layer], len(entropies), policy.eigenvalues), abs=1e-6)


class WideAndNarrowAreSwapped(UNComp):
    def _marked(self, held):
        return [[not wide for wide in layer] for layer in super()._marked(held)]


class EveryHeadIsNarrow(UNComp):
    def _marked(self, held):
        return [[False] * len(layer) for layer in super()._marked(held)]


class ThePromptIsCutOnce(UNComp):
    def retain(self, held):
        return super().retain(held) if held.moment == "prefill" else held.live


class EveryRowVotesForever(UNComp):
    def __post_init__(self):
        super().__post_init__()
        self.lately.count = 10 ** 6


class NeighboursDoNotHelp(UNComp):
    def retain(self, held):
        self.kernel = 1
        return super().retain(held)


class TheWindowIsNotSafe(UNComp):
    def retain(self, held):
        self.window = 1
        return super().retain(held)


@pytest.mark.parametrize("wrong", UNComp.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_choice_of_heads_or_tokens_is_found_out(wrong):
    expected = WholeText("llama", UNCompByHand()).write(PROMPT, LENGTH)
    assert course(alone(UNComp(**UNCOMP_TIGHT)), models()) == expected
    assert course(alone(wrong(**UNCOMP_TIGHT)), models())[1] != expected[1]


def uncentred(rows: Tensor) -> float:
    even = rows / rows.norm(dim=-1, keepdim=True)
    shares = torch.linalg.eigvalsh(even.T @ even / len(rows))
    return float(torch.special.entr(shares.clamp(min=0)).sum()) / math.log(rows.shape[1])


def test_an_entropy_of_rows_with_their_mean_is_another_one():
    rows = random_rows(40, 6) + 3
    assert abs(uncentred(rows) - float(matrix_entropy(rows[None], 6))) > 0.1


def test_with_high_and_low_alike_the_first_cut_is_snapkvs_and_every_new_token_pushes_one_out():
    _, rolling = course(alone(make("uncomp", high=9, low=9, **ALIKE)), models())
    _, once = course(alone(make("snapkv", capacity=9, **ALIKE)), models())
    assert rolling[0] == once[0]
    assert {len(head) for held in rolling for layer in held for head in layer} == {9}
    assert {len(head) for layer in once[-1] for head in layer} == {9 + LENGTH - 1}


# --- what rows of the prompt ask for ---

class Overheard(UNComp):
    def asked(self, layer, queries):
        super().asked(layer, queries)
        self.counts = getattr(self, "counts", []) + [(layer, queries.shape[2])]


@pytest.mark.parametrize("chunk", [5, 128])
@pytest.mark.parametrize("forced", [(), (5, 6, 7)])
def test_each_row_of_the_prompt_is_heard_once_and_no_other(chunk, forced, monkeypatch):
    monkeypatch.setattr("playground.stream.WATCHED_CHUNK", chunk)
    found = course(alone(Overheard(**UNCOMP_TIGHT)), models(), forced=forced)
    counts = after_a_run(Overheard(**UNCOMP_TIGHT), forced=forced).counts
    assert [sum(count for layer, count in counts if layer == at) for at in range(3)] == [len(PROMPT)] * 3
    assert len(counts) == 3 * math.ceil(len(PROMPT) / chunk)
    monkeypatch.setattr("playground.stream.WATCHED_CHUNK", 128)
    assert found == course(alone(make("uncomp", **UNCOMP_TIGHT)), models(), forced=forced)


class OneHeadSpeaksForItsGroup(UNComp):
    def asked(self, layer, queries):
        super().asked(layer, queries[:, :1])


class TheLastRowsSpeak(UNComp):
    def asked(self, layer, queries):
        super().asked(layer, queries[:, :, -5:])


class EachHeadHasAMeanOfItsOwn(UNComp):
    def asked(self, layer, queries):
        super().asked(layer, queries - queries.mean(2, keepdim=True))


@pytest.mark.parametrize("wrong", [OneHeadSpeaksForItsGroup, TheLastRowsSpeak, EachHeadHasAMeanOfItsOwn], ids=lambda cls: cls.__name__)
def test_an_entropy_of_other_queries_is_found_out(wrong):
    right, found = (after_a_run(policy(**UNCOMP_TIGHT))._entropies for policy in (UNComp, wrong))
    assert (found - right).abs().amax() > 1e-2


# --- marks learnt from texts ---

def marks_by_hand(texts: list[list[int]], architecture: str = "llama") -> str:
    votes: dict = defaultdict(float)
    for ids in texts:
        by_hand = WholeText(architecture, UNCompByHand(high=999, low=999))
        by_hand.write(ids, 1)
        for layer, queries in by_hand.queries.items():
            heads = len(by_hand.live[layer])
            found = by_eigenvalues(queries, heads, 32)
            for head in range(heads):
                votes[layer, head] += sum(other > found[head] for other in found) < heads // 2
    layers = sorted({layer for layer, _ in votes})
    tallies = [[votes[layer, head] for head in range(heads)] for layer in layers]
    return ".".join("".join("1" if sum(o > mine for o in tally) + tally[:head].count(mine) < heads // 2 else "0" for head, mine in enumerate(tally))
                    for tally in tallies)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_marks_are_what_most_texts_say(architecture):
    chance = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 200, (18,), generator=chance).tolist() for _ in range(5)]
    readings = learning.readings(models(architecture)["target"], texts, asks=True)
    assert UNComp.fit(readings)["marks"] == marks_by_hand(texts, architecture)


@pytest.mark.parametrize("marks", ["10.10.10", "01.10.01"])
def test_marks_say_which_heads_are_wide_whatever_the_prompt_says(marks):
    _, found = course(alone(make("uncomp", marks=marks, **UNCOMP_TIGHT)), models())
    assert [[len(head) for head in layer] for layer in found[0]] == [[12 if digit == "1" else 7 for digit in layer] for layer in marks.split(".")]


@pytest.mark.parametrize("marks", ["10.10", "1.0.1", "10.10.1"])
def test_marks_of_another_model_are_refused_in_one_sentence(marks):
    session = prepare(pair(), [with_policy(Recipe("greedy"), "uncomp", marks=marks, **UNCOMP_TIGHT)], Prompt(TEXT), Limits(max_new_tokens=4))
    (failed,) = [stamped.event for stamped in session if isinstance(stamped.event, Failed)]
    assert failed.message == "The marks are not for 3 layers with 2 heads of keys each: run `fit` for this model."


def test_the_command_prints_marks_to_paste_behind_a_lane(capsys, tmp_path):
    saved = save_models(tmp_path / "models").target
    (tmp_path / "text.txt").write_text("The red fox listens to the green bird. " * 4)
    assert main(["fit", "uncomp", "--model", str(saved), "--texts", str(tmp_path / "text.txt")]) == 0
    line = capsys.readouterr().out.strip()
    marks, stages = line.removeprefix("--with uncomp:marks=").split(",stages=")
    assert set(marks) <= set("01.") and sum(map(int, stages.split("."))) == 2
    assert main(["run", "greedy", "--model", str(saved), "--prompt", "The red fox", "--max-new-tokens", "4", *line.split()]) == 0


# --- lines of attention ---

def lines_by_hand(weights: list[list[float]], rows: list[int], coverage: float) -> set[tuple[str, int]]:
    """Which lines of a causal matrix are taken, one after the other, by what lies on them and is not covered yet."""
    cells = {(i, j): weights[i][j] for i in rows for j in range(i + 1)}
    lines = [("column", j) for j in range(len(weights[0]))] + [("diagonal", o) for o in range(len(weights))]
    mass = {line: sum(w for (i, j), w in cells.items() if line in (("column", j), ("diagonal", i - j))) for line in lines}
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
    return torch.tensor([[j <= i and (("column", j) in lines or ("diagonal", i - j) in lines) for j in range(count)] for i in range(count)])


def causal_rows(heads: int, n: int, power: float = 6.0, seed: int = 0) -> Tensor:
    """Attention of n rows over themselves, [heads, n, n]; the larger the power, the fewer tokens a row looks at."""
    rows = (torch.rand(heads, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** power).tril()
    return rows / rows.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("most", [1, 4, 99])
def test_lines_are_those_that_carry_most_and_no_more_than_it_takes(seed, coverage, most):
    weights, rows = causal_rows(3, 12, seed=seed), sampled(12, most)
    cover = covering(weights, torch.arange(12), rows, coverage)
    for head in range(3):
        lines = lines_by_hand(weights[head].tolist(), rows, coverage)
        assert torch.equal(cover.mask[head], drawn(lines, 12))
    assert (cover.attention >= coverage * cover.all_attention - 1e-6).all()
    assert cover.cells.tolist() == cover.mask.sum((1, 2)).tolist() and cover.all_cells.tolist() == [78] * 3
    assert cover.mask.diagonal(dim1=1, dim2=2).all() and cover.mask[:, :, 0].all()


def test_a_later_stretch_is_covered_over_all_that_came_before():
    weights = causal_rows(2, 15, seed=5)
    whole = covering(weights, torch.arange(15), list(range(9, 15)), 0.8)
    part = covering(weights[:, 9:], torch.arange(9, 15), list(range(6)), 0.8)
    assert torch.equal(part.mask, whole.mask[:, 9:])


def test_a_token_that_all_look_at_is_a_column_and_a_distance_that_all_look_back_a_diagonal():
    n = torch.arange(10)
    column = torch.where(n[None] == 3, 0.9, 0.02).expand(10, 10).tril()[None]
    diagonal = torch.where(n[:, None] - n[None] == 2, 0.9, 0.02).tril()[None]
    for weights, line in ((column, ("column", 3)), (diagonal, ("diagonal", 2))):
        assert torch.equal(covering(weights, n, list(range(10)), 0.75).mask[0], drawn({("column", 0), ("diagonal", 0), line}, 10))


@pytest.mark.parametrize("count, most", [(1, 1), (7, 7), (7, 99), (10, 3), (128, 32)])
def test_the_sample_is_spread_over_the_stretch_and_ends_with_its_last_row(count, most):
    rows = sampled(count, most)
    assert rows == sorted(set(rows)) and len(rows) == min(count, most) and rows[-1] == count - 1 and rows[0] >= 0
    gaps = [after - before for before, after in zip(rows, rows[1:])]
    assert not gaps or max(gaps) - min(gaps) <= 1


# --- a lane of them ---

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


def views(assembly: Assembly, speakers: dict) -> tuple[list[int], list[Lives]]:
    """What a lane wrote and what its view showed after every keep; its cache holds everything."""
    found: list[Lives] = []
    for lane in watch(assembly, speakers, PROMPT, Limits(0, LENGTH), Draws(0)):
        if lane.generated > len(found):
            held, policy = lives(lane), lane.assembly.cache_policy
            assert all(head == set(range(lane.target.store.length)) for layer in held for head in layer)
            shown = [[{p for p in head if p >= seen.shape[1] or seen[i, p]} for i, head in enumerate(layer)]
                     for seen, layer in zip((policy._seen[at] for at in sorted(policy._seen)), held)]
            found += [shown] * (lane.generated - len(found))
    return lane.tokens[len(PROMPT):], found


LOOPS = [{}, {"coverage": 1.0}, {"size": 2048}, {"rows": 99, "coverage": 0.6}, {"period": 1, "size": 8}, {"period": 5, "size": 2}]


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", LOOPS, ids=str)
def test_loopserve_reads_writes_and_holds_what_decoding_by_hand_does(architecture, knobs):
    policy = make("loopserve", **{**LOOP_TIGHT, **knobs})
    found = course(alone(policy), models(architecture))
    assert found == WholeText(architecture, LoopByHand(**knobs)).write(PROMPT, LENGTH)
    assert all(len(head) < policy.size + 2 * policy.period for held in found[1] for layer in held for head in layer)


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", [{}, {"coverage": 1.0, "period": 2}], ids=str)
def test_under_a_view_what_was_let_go_comes_back_when_later_rows_want_it(architecture, knobs):
    found = views(alone(make("loopserve", dropped="view", **{**LOOP_TIGHT, **knobs})), models(architecture))
    assert found == WholeText(architecture, LoopByHand(one_way=False, **knobs)).write(PROMPT, LENGTH)
    assert any(now - before - {max(now)} for earlier, later in zip(found[1], found[1][1:])
               for old, new in zip(earlier, later) for before, now in zip(old, new)), "nothing came back"


class TheLastRowsAreTheSample(LoopServe):
    def focus(self, layer, weights, queries):
        return covering(weights, queries, list(range(len(queries)))[-self.rows:], self.coverage).mask


class HeadsShareTheirLines(LoopServe):
    def focus(self, layer, weights, queries):
        return super().focus(layer, weights.sum(0, keepdim=True), queries).expand_as(weights)


class OnlyColumns(LoopServe):
    def focus(self, layer, weights, queries):
        mask, own = super().focus(layer, weights, queries), queries[:, None] == torch.arange(weights.shape[2])
        return mask[:, -1:] | own


class TheEndOfThePromptChoosesForever(LoopServe):
    def wants(self, position, prompt):
        return prompt - self.period <= position < prompt


class AllRowsChoose(LoopServe):
    def __post_init__(self):
        super().__post_init__()
        self.lately.count = 10 ** 6


class ChosenOnce(LoopServe):
    def retain(self, held):
        return super().retain(held) if held.moment == "prefill" else held.live


class ChosenEveryTime(LoopServe):
    def retain(self, held):
        self._cut.clear()
        return super().retain(held)


@pytest.mark.parametrize("wrong", LoopServe.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_loop_is_found_out(wrong):
    expected = WholeText("llama", LoopByHand()).write(PROMPT, LENGTH)
    assert course(alone(LoopServe(**LOOP_TIGHT)), models()) == expected
    assert course(alone(wrong(**LOOP_TIGHT)), models())[1] != expected[1]


def test_a_crossing_that_is_counted_twice_covers_too_little():
    """Where columns and diagonals are added up, lines carry less than they are said to; over 20 matrices some fall short."""
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


# --- what it means for a lane ---

TIGHT = {"uncomp": UNCOMP_TIGHT, "loopserve": LOOP_TIGHT}
each = pytest.mark.parametrize("name, knobs", [*TIGHT.items(), ("loopserve", {**LOOP_TIGHT, "dropped": "view"})], ids=["uncomp", "loopserve", "view"])


@each
def test_a_rejected_guess_leaves_no_trace(name, knobs):
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    guessing = course(Assembly(decoder, cache_policy=make(name, **knobs)), models())
    assert guessing == course(alone(make(name, **knobs)), models())


@each
@pytest.mark.parametrize("recipe", [Recipe("greedy"), TREE], ids=["greedy", "tree"])
def test_a_lane_shows_what_was_decided(name, knobs, recipe):
    session = prepare(pair(), [with_policy(recipe, name, **knobs)], Prompt(TEXT), Limits(max_new_tokens=10))
    figures = [stamped.event for stamped in session if isinstance(stamped.event, Figure)]
    assert check(session.trace) == []
    told = {figure.name: figure.data for figure in figures if figure.shape == "matrix"}
    assert len(told) == 2 and all(len(data["values"]) == 3 and len(data["values"][0]) == 2 for data in told.values())
    if name == "uncomp":
        assert {number for layer in told["tokens a head may hold"]["values"] for number in layer} == {7, 12}
        assert all(0 < number <= 1 for layer in told["entropy of the queries"]["values"] for number in layer)
    else:
        assert all(0.8 - 1e-6 <= number <= 1 for layer in told["attention of the sampled rows that they carry"]["values"] for number in layer)
        assert any(number < 1 for layer in told["cells of the prompt's attention that were read"]["values"] for number in layer)


def test_the_figure_counts_what_left_and_what_came_back():
    def turnover(dropped: str) -> list[dict]:
        session = prepare(pair(), [with_policy(Recipe("greedy"), "loopserve", dropped=dropped, **LOOP_TIGHT)], Prompt(TEXT), Limits(max_new_tokens=12))
        events = [stamped.event for stamped in session]
        told = [event.data["series"] for event in events if isinstance(event, Figure) and event.shape == "scalar" and "let go" in event.data["series"]]
        evicted = sum(event.evicted for event in events if isinstance(event, Cache))
        assert evicted == (sum(series["let go"] for series in told) if dropped == "gone" else 0)
        return told

    gone, view = turnover("gone"), turnover("view")
    assert not any(series["came back"] for series in gone) and any(series["came back"] for series in view) and len(gone) == len(view) == 4


@each
def test_a_table_that_pays_no_attention_goes_on(name, knobs):
    lane = write(alone(make(name, **knobs)), {"target": TableModel("abc")}, [0, 1, 2] * 8, Limits(0, 6), Draws(0))
    assert lane.generated == 6


@pytest.mark.parametrize("knobs, says", [(dict(window=32), "raise high and low above it"), (dict(kernel=4), "take 5"), (dict(marks="a b"), "let `fit` print")])
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make("uncomp", **knobs)
    assert str(refusal.value).count(".") <= 1 + ("marks" in knobs)


# --- a prompt that several sequences share ---

def test_sequences_that_grow_side_by_side_hold_and_read_one_copy_of_their_prompt():
    """As in Hydragen, Juravsky et al. 2024, arXiv 2402.05099: bytes for the prompt and what each sequence added, not for a prompt each."""
    session = prepare(pair(), [Recipe("best_of_n", {"n": 6, "temperature": 2.0})], Prompt(TEXT), Limits(max_new_tokens=5))
    prompt, seen = None, []
    for _ in session:
        store = session._runners[0].lane.target.store
        prompt = prompt or store.length
        row = store.heads * store.keys[0].rows.shape[2] * store.keys[0].rows.element_size() if store.keys[0].rows is not None else 0
        if store.parents and row:
            assert store.length == prompt and store.bytes() == 2 * store.depth * row * (prompt + len(store.parents))
            seen.append(len(store.parents))
    assert max(seen) > 20, "the sequences did not part"


def test_a_forks_row_is_that_of_a_run_of_its_own():
    """In float64, with every sequence's own tokens behind one prompt."""
    model = models()["target"]
    store, tails = model.new_store(), [[5, 6], [5, 9], [80, 7]]
    model.forward([Work(store, PROMPT, list(range(-1, len(PROMPT) - 1)))])
    store.keep(len(PROMPT) - 1)
    (rows,), _ = model.forward([Work(store, [tail[0] for tail in tails], [-1] * 3)])
    (rows,), _ = model.forward([Work(store, [tail[1] for tail in tails], [0, 1, 2])])
    for row, tail in zip(rows, tails):
        ids = PROMPT + tail
        (own,), _ = model.forward([Work(model.new_store(), ids, list(range(-1, len(ids) - 1)))])
        assert (row - own[-1]).abs().max() < 1e-9
