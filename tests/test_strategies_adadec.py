"""AdaDec: at uncertain positions it pauses and scores short rollouts. Every pause is recomputed independently."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from runs import figures, run, same, series, written
from tables import TableModel
from torch import Tensor

from playground.algorithms.sampling.token_readings import TokenReading
from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.engine.sampling import entropy
from playground.errors import Refusal
from playground.events import Commit, Note, Step, rounded
from strategies.sampling.adadec import Rollout

GREEDY = LaneConfig("greedy")


def adadec(**knobs) -> LaneConfig:
    return LaneConfig("adadec", knobs)


COLLAPSES = {
    "adadec": [
        Collapse(adadec(tau=4.0), GREEDY),
        Collapse(adadec(tau=0.0, width=1), GREEDY),
        Collapse(adadec(tau=0.0, depth=0), GREEDY),
    ],
}


ROLLOUTS = "candidates: mean probability per token"
Reads = Callable[[list[int]], Tensor]  # log-probabilities [V] after a text
Score = Callable[[list[float]], float]  # of the candidate's own log-probability and those of its rollout


def per_token(logps: list[float]) -> float:
    return sum(logps) / len(logps)


def rollout(reads: Reads, text: list[int], depth: int, ends: frozenset[int]) -> list[int]:
    new = []
    while len(new) < depth and not {text[-1], *new} & ends:
        new.append(int(reads(text + new).argmax()))
    return new


def best_candidate(
    reads: Reads, text: list[int], depth: int, ends: frozenset[int], score: Score, width: int = 3
) -> tuple[int, list[float]]:
    """The token to commit, and the score of each candidate."""
    scores, candidates = [], reads(text).topk(width).indices.tolist()
    for token in candidates:
        tokens = [token, *rollout(reads, [*text, token], depth, ends)]
        scores.append(score([float(reads(text + tokens[:i])[next_]) for i, next_ in enumerate(tokens)]))
    return candidates[scores.index(max(scores))], scores


def computed(
    reads: Reads, prompt: list[int], length: int, depth: int, ends: frozenset[int], score: Score = per_token
) -> tuple[list[int], list[list[float]]]:
    """What AdaDec writes where it pauses at every token, and the scores at each pause."""
    text, pauses = list(prompt), []
    while len(text) < len(prompt) + length and not set(text[len(prompt):]) & ends:
        token, scores = best_candidate(reads, text, depth, ends, score)
        text.append(token)
        pauses.append(scores)
    return text[len(prompt):], pauses


def table_reads(model: TableModel) -> Reads:
    return lambda text, model=model: model.scores(tuple(text)).log_softmax(-1)


@pytest.mark.oracle("adadec")
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_at_every_pause_the_candidate_with_the_best_rollout_is_committed(depth):
    for seed in range(5):
        model = TableModel("abcde", "e", seed)
        lane, events = run(adadec(tau=0.0, depth=depth), {"target": model}, [0, 1], 7)
        tokens, pauses = computed(table_reads(model), [0, 1], 7, depth, model.end_ids)
        assert lane.main.written == tokens
        shown = [[math.log(value) for value in data["values"]] for data in figures(events, ROLLOUTS)]
        assert len(shown) == len(pauses) and all(map(same, shown, pauses))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_rollouts_equal_the_librarys_forwards_over_the_whole_text(architecture):
    library, models, prompt = network(architecture), {"target": pair(architecture).target}, [54, 71, 71, 9]

    def reads(text: list[int]) -> Tensor:
        return library(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].log_softmax(-1)

    with torch.inference_mode():
        tokens, pauses = computed(reads, prompt, 5, 3, models["target"].end_ids)
    lane, events = run(adadec(tau=0.0, depth=3), models, prompt, 5)
    assert lane.main.written == tokens
    shown = [[math.log(value) for value in data["values"]] for data in figures(events, ROLLOUTS)]
    assert all(same(a, b, 1e-6) for a, b in zip(shown, pauses)) and len(shown) == len(tokens)


WRONG_SCORES = {
    "a sum, which favours rollouts that end early": sum,
    "a sum over the tokens of the rollout alone": lambda logps: sum(logps) / max(1, len(logps) - 1),
    "the candidate left out": lambda logps: per_token(logps[1:] or logps),
    "the last token twice, as where a finished rollout goes on counting": lambda logps: (
        sum([*logps, logps[-1]]) / len(logps)
    ),
}


@pytest.mark.refuses("adadec")
@pytest.mark.parametrize("score", WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_a_wrong_rollout_score_changes_the_text(score):
    models = [TableModel("abcde", "e", seed) for seed in range(12)]
    differ = [
        computed(table_reads(model), [0, 1], 7, 5, model.end_ids, score)[0]
        != written(adadec(tau=0.0), {"target": model}, [0, 1], 7)
        for model in models
    ]
    assert any(differ)


class SumsTheRollout(Rollout):
    @property
    def score(self):
        return sum(self.logps)


class LeavesTheCandidateOut(Rollout):
    @property
    def score(self):
        return per_token(self.logps[1:] or self.logps)


class JudgesTheLastToken(Rollout):
    @property
    def score(self):
        return self.logps[-1]


@pytest.mark.refuses("adadec")
@pytest.mark.parametrize("wrong", [SumsTheRollout, LeavesTheCandidateOut, JudgesTheLastToken])
def test_an_adadec_with_a_wrong_score_is_refused(wrong, monkeypatch):
    monkeypatch.setattr("strategies.sampling.adadec.Rollout", wrong)
    with pytest.raises(AssertionError):
        test_at_every_pause_the_candidate_with_the_best_rollout_is_committed(5)


def of_letters(following: dict[str, list[float]], letters: str = "abc.") -> TableModel:
    """Probabilities of the next letter by the text so far; "" applies to every other text."""
    def rule(context):
        text = "".join(letters[token] for token in context)
        return torch.tensor(following.get(text, following[""]), dtype=torch.float64).log()

    return TableModel(letters, ".", rule=rule)


def test_worked_example_the_second_choice_wins_with_a_more_certain_continuation():
    model = of_letters(
        {"a": [0.1, 0.5, 0.4, 0], "ab": [0.34, 0.33, 0.33, 0], "ac": [0.01, 0.01, 0.98, 0], "": [0.9, 0.04, 0.03, 0.03]}
    )
    lane, events = run(adadec(tau=0.5, width=2, depth=1), {"target": model}, [0], 3)
    assert lane.text == "cca"
    assert figures(events, ROLLOUTS)[0] == {
        "labels": ["ba", "cc"],
        "values": [pytest.approx(math.sqrt(0.5 * 0.34)), pytest.approx(math.sqrt(0.4 * 0.98))],
    }
    notes = [event.text for event in events if isinstance(event, Note)]
    assert len(notes) == 1 and notes[0].startswith("'c' in place of 'b'")


def test_a_rollout_ends_with_the_end_token_and_is_scored_over_its_own_tokens():
    model = of_letters({"a": [0, 0.5, 0.3, 0.2], "ab": [0, 0, 0.4, 0.6], "": [0.7, 0.1, 0.1, 0.1]})
    _, events = run(adadec(tau=0.0, width=3, depth=3), {"target": model}, [0], 1)
    assert figures(events, ROLLOUTS)[0] == {"labels": ["b<.>", "caaa", "<.>"], "values": [
        pytest.approx(math.sqrt(0.5 * 0.6)), pytest.approx((0.3 * 0.7 ** 3) ** 0.25), pytest.approx(0.2)]}


def test_it_pauses_exactly_where_entropy_reaches_the_threshold():
    steps, pauses = [], []
    for seed in range(3):
        _, events = run(adadec(tau=1.0), {"target": TableModel("abcde", seed=seed)}, [0, 1], 12)
        steps += [(seed, event.position, event.entropy) for event in events if isinstance(event, Step)]
        pauses += [(seed, data["spans"][0][0], data["spans"][0][3]) for data in figures(events, "pauses")]
    unsure = [step for step in steps if step[2] >= 1.0]
    assert [pause[:2] for pause in pauses] == [step[:2] for step in unsure] and 0 < len(pauses) < len(steps)
    assert [rounded(pause[2]) for pause in pauses] == [step[2] for step in unsure]


def test_it_pauses_if_entropy_equals_the_threshold():
    undecided = TableModel("abcd", rule=lambda context: torch.zeros(4, dtype=torch.float64))
    (level,) = series(run(adadec(tau=0.0), {"target": undecided}, [0], 1)[1], "entropy", "entropy, nats")
    for tau, count in ((level, 3), (math.nextafter(level, 9), 0)):
        assert len(figures(run(adadec(tau=tau), {"target": undecided}, [0], 3)[1], "pauses")) == count


# at depth 1 the row after the winner is known already
@pytest.mark.parametrize("depth, forwards", [(0, 6), (1, 7), (4, 6 * 5)])
def test_a_rollout_costs_one_forward_per_level(depth, forwards):
    model = TableModel("abcde")
    run(adadec(tau=0.0, depth=depth), {"target": model}, [0, 1], 6)
    assert model.forwards == forwards


def test_only_the_candidate_is_committed_and_a_higher_token_limit_changes_nothing():
    model = TableModel("abcde", seed=2)
    _, events = run(adadec(tau=0.0), {"target": model}, [0, 1], 12)
    commits = [event.ids for event in events if isinstance(event, Commit)]
    assert [len(ids) for ids in commits] == [1] * 12
    assert written(adadec(tau=0.0), {"target": model}, [0, 1], 5) == sum(commits[:5], [])


def test_adadec_is_deterministic():
    with pytest.raises(Refusal, match="AdaDec does not work with a sampler such as Temperature"):
        assemble(LaneConfig("adadec", {}, [("temperature", {})]))
    assert assemble(LaneConfig("adadec", {}, [("repetition_penalty", {})])).decoder.name == "adadec"


def reading(rest: float, rank: int, count: int = 40) -> TokenReading:
    """Rows whose other seven tokens have `rest` of the weight of the first, and tokens of this rank."""
    p = torch.full((8,), rest / 7).index_fill(0, torch.tensor([0]), 1.0)
    return TokenReading(torch.full((count,), rank), p.log().repeat(count, 1) - torch.arange(8) * 1e-4)


def test_its_threshold_is_learnt_from_texts_at_the_entropy_where_errors_begin():
    sure, unsure = reading(0.1, rank=0), reading(5.0, rank=2)
    low, high = (float(entropy(part.logits)[0]) for part in (sure, unsure))
    assert low < find("adadec").fit([sure, unsure])["tau"] < high
