"""UNComp budgets heads by the entropy of their queries: compared with attention written out over the whole text."""
from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from pairs import pair
from saved import save_models
from tables import watch
from torch import Tensor

from playground.cli import main
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.events import Failed
from playground.training import variants as learning
from strategies.kv_cache.uncomp import UNComp, matrix_entropy, wide_half, written
from support.budget_policies import TEXT, roomy, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.uncomp_by_hand import BY_HAND, UNCOMP_TIGHT, UNCompByHand, WholeText, by_eigenvalues
from support.wrong_variants import variants_of

ALIKE = {"window": 3, "kernel": 3, "pooling": "max"}


COLLAPSES = {
    "uncomp": roomy("uncomp", high=2048, low=2048),
}


# --- entropy of a matrix ---

def random_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def axes(d: int) -> Tensor:
    """Rows in both directions of every axis, [1, 2 d, d]."""
    return torch.cat([torch.eye(d), -torch.eye(d)])[None].double()


def test_collinear_rows_have_zero_entropy():
    line = random_rows(40, 1) * random_rows(1, 8, seed=1)
    found = matrix_entropy(torch.stack([line, line + 100 * random_rows(8, seed=2)]), 8)
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize("d", [2, 5, 16])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_isotropic_rows_have_maximal_entropy_and_truncated_spectra_their_share(d, share):
    count = max(1, round(share * d))
    assert float(matrix_entropy(axes(d), count)) == pytest.approx(count / d)


def test_entropy_grows_with_the_number_of_eigenvalues_and_is_low_for_few_rows():
    found = [float(matrix_entropy(random_rows(1, 5, 12), count)) for count in range(1, 13)]
    assert found == sorted(found) and found[-1] <= math.log(5) / math.log(12) + 1e-6
    assert float(matrix_entropy(random_rows(1, 5, 12), 99)) == found[-1]


def test_entropy_is_invariant_to_scale_rotation_and_translation():
    half = random_rows(20, 6)
    turn, _ = torch.linalg.qr(random_rows(6, 6, seed=3))
    longer = half * (1 + torch.arange(20)[:, None])
    rows = torch.stack(
        [torch.cat([part, -part]) for part in (half, half @ turn, longer)] + [torch.cat([half, -half]) + 7]
    )
    found = matrix_entropy(rows, 4)
    assert (found - found[0]).abs().max() < 1e-9 and found[0] > 0.1


def test_the_half_of_the_heads_with_higher_entropy_is_wide():
    assert wide_half(torch.tensor([0.1, 0.4, 0.3, 0.2])).tolist() == [False, True, True, False]
    assert wide_half(torch.tensor([0.1, 0.1, 0.1])).tolist() == [True, True, False] and wide_half(
        torch.tensor([0.0])
    ).tolist() == [True]
    assert written([torch.tensor([True, False]), torch.tensor([False, True])]) == "10.01"


# --- by hand: the whole text again for each token, recording what every row saw ---


UNCOMPS = [{}, {"pooling": "avg"}, {"eigenvalues": 2}, {"window": 1, "kernel": 1, "low": 2}, {"high": 22, "low": 18}]


def after_a_run(policy, architecture: str = "llama", forced: tuple[int, ...] = ()):
    """The policy as its lane left it; the lane has a copy."""
    *_, lane = watch(alone(policy), models(architecture), PROMPT, Limits(0, LENGTH, forced=forced), Draws(0))
    return lane.assembly.cache_policy


@pytest.mark.oracle("uncomp")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", UNCOMPS, ids=str)
def test_uncomp_text_and_cache_equal_decoding_by_hand(architecture, knobs):
    policy = make("uncomp", **{**UNCOMP_TIGHT, **knobs})
    found = course(alone(policy), models(architecture))
    by_hand = WholeText(architecture, UNCompByHand(**knobs))
    assert found == by_hand.write(PROMPT, LENGTH)
    for read, held in enumerate(found[1], len(PROMPT)):
        for layer in held:
            rooms = sorted(
                min(read, policy.low if place < len(layer) // 2 else policy.high) for place in range(len(layer))
            )
            assert sorted(map(len, layer)) == rooms
    for layer, entropies in enumerate(after_a_run(policy, architecture)._entropies.tolist()):
        assert entropies == pytest.approx(
            by_eigenvalues(by_hand.queries[layer], len(entropies), policy.eigenvalues), abs=1e-6
        )


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
        self.recent_attention.count = 1000


class NeighboursDoNotHelp(UNComp):
    def retain(self, held):
        self.kernel = 1
        return super().retain(held)


class TheWindowIsNotSafe(UNComp):
    def retain(self, held):
        self.window = 1
        return super().retain(held)


@pytest.mark.refuses("uncomp")
@pytest.mark.parametrize("wrong", variants_of(UNComp, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_choice_of_heads_or_tokens_is_detected(wrong):
    expected = WholeText("llama", UNCompByHand()).write(PROMPT, LENGTH)
    assert course(alone(UNComp(**UNCOMP_TIGHT)), models()) == expected
    assert course(alone(wrong(**UNCOMP_TIGHT)), models())[1] != expected[1]


def uncentred(rows: Tensor) -> float:
    even = rows / rows.norm(dim=-1, keepdim=True)
    shares = torch.linalg.eigvalsh(even.T @ even / len(rows))
    return float(torch.special.entr(shares.clamp(min=0)).sum()) / math.log(rows.shape[1])


def test_entropy_without_centring_differs():
    rows = random_rows(40, 6) + 3
    assert abs(uncentred(rows) - float(matrix_entropy(rows[None], 6))) > 0.1


def test_with_equal_budgets_the_first_eviction_is_snapkvs_and_each_new_token_evicts_one():
    _, rolling = course(alone(make("uncomp", high=9, low=9, **ALIKE)), models())
    _, once = course(alone(make("snapkv", capacity=9, **ALIKE)), models())
    assert rolling[0] == once[0]
    assert {len(head) for held in rolling for layer in held for head in layer} == {9}
    assert {len(head) for layer in once[-1] for head in layer} == {9 + LENGTH - 1}


# --- queries of prompt rows ---

class Overheard(UNComp):
    def observe_queries(self, layer, query_states):
        super().observe_queries(layer, query_states)
        self.counts = getattr(self, "counts", []) + [(layer, query_states.shape[2])]


@pytest.mark.parametrize("chunk", [5, 128])
@pytest.mark.parametrize("forced", [(), (5, 6, 7)])
def test_each_prompt_row_is_observed_once_and_no_other(chunk, forced, monkeypatch):
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", chunk)
    found = course(alone(Overheard(**UNCOMP_TIGHT)), models(), forced=forced)
    counts = after_a_run(Overheard(**UNCOMP_TIGHT), forced=forced).counts
    assert [sum(count for layer, count in counts if layer == at) for at in range(3)] == [len(PROMPT)] * 3
    assert len(counts) == 3 * math.ceil(len(PROMPT) / chunk)
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 128)
    assert found == course(alone(make("uncomp", **UNCOMP_TIGHT)), models(), forced=forced)


class OneHeadSpeaksForItsGroup(UNComp):
    def observe_queries(self, layer, query_states):
        super().observe_queries(layer, query_states[:, :1])


class TheLastRowsSpeak(UNComp):
    def observe_queries(self, layer, query_states):
        super().observe_queries(layer, query_states[:, :, -5:])


class EachHeadHasAMeanOfItsOwn(UNComp):
    def observe_queries(self, layer, query_states):
        super().observe_queries(layer, query_states - query_states.mean(2, keepdim=True))


@pytest.mark.parametrize(
    "wrong", [OneHeadSpeaksForItsGroup, TheLastRowsSpeak, EachHeadHasAMeanOfItsOwn], ids=lambda cls: cls.__name__
)
def test_the_entropy_of_other_queries_is_detected(wrong):
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
    return ".".join(
        "".join(
            "1" if sum(o > mine for o in tally) + tally[:head].count(mine) < heads // 2 else "0"
            for head, mine in enumerate(tally)
        )
        for tally in tallies
    )


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_marks_are_the_majority_over_texts(architecture):
    chance = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 200, (18,), generator=chance).tolist() for _ in range(5)]
    readings = learning.readings(models(architecture)["target"], texts, asks=True)
    assert UNComp.fit(readings)["marks"] == marks_by_hand(texts, architecture)


@pytest.mark.parametrize("marks", ["10.10.10", "01.10.01"])
def test_marks_decide_which_heads_are_wide_for_any_prompt(marks):
    _, found = course(alone(make("uncomp", marks=marks, **UNCOMP_TIGHT)), models())
    assert [[len(head) for head in layer] for layer in found[0]] == [
        [12 if digit == "1" else 7 for digit in layer] for layer in marks.split(".")
    ]


@pytest.mark.parametrize("marks", ["10.10", "1.0.1", "10.10.1"])
def test_marks_of_another_model_are_refused_in_one_sentence(marks):
    session = prepare(
        pair(),
        [with_policy(LaneConfig("greedy"), "uncomp", marks=marks, **UNCOMP_TIGHT)],
        Prompt(TEXT),
        Limits(max_new_tokens=4),
    )
    (failed,) = [stamped.event for stamped in session if isinstance(stamped.event, Failed)]
    assert failed.message == "The marks are not for 3 layers with 2 KV heads each: run `fit` for this model."


def test_the_command_prints_marks_for_a_lane_option(capsys, tmp_path):
    saved = save_models(tmp_path / "models").target
    (tmp_path / "text.txt").write_text("The red fox listens to the green bird. " * 4)
    assert main(["fit", "uncomp", "--model", str(saved), "--texts", str(tmp_path / "text.txt")]) == 0
    line = capsys.readouterr().out.strip()
    marks, stages = line.removeprefix("--with uncomp:marks=").split(",stages=")
    assert set(marks) <= set("01.") and sum(map(int, stages.split("."))) == 2
    assert (
        main(
            ["run", "greedy", "--model", str(saved), "--prompt", "The red fox", "--max-new-tokens", "4", *line.split()]
        )
        == 0
    )
