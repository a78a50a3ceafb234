"""Decoding that tries several continuations: cautious next token prediction and contrastive search, against
independent oracles.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from tables import Law, TableModel, Text, distance, law

from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.engine.sampling import entropy
from playground.errors import Refusal
from playground.events import Forward
from strategies.sampling.cntp import Continuation
from support.lookahead_runs import contrastive, figures, run

GREEDY = LaneConfig("greedy")


def cntp(**knobs) -> LaneConfig:
    return LaneConfig("cntp", knobs)


COLLAPSES = {
    "cntp": [
        Collapse(cntp(trials=1), LaneConfig("sample", {"temperature": 1.0, "top_p": 1.0})),
        Collapse(cntp(temperature=0.0), GREEDY),
        Collapse(cntp(low=2.0, high=6.0, temperature=0.5), LaneConfig("sample", {"temperature": 0.5, "top_p": 1.0})),
    ],
    "contrastive_search": [Collapse(contrastive(alpha=0.0), GREEDY), Collapse(contrastive(k=1), GREEDY)],
}


# --- how many trials ---

@pytest.mark.parametrize("formula, breaks", [
    ("released", [(0.0, 1), (0.175, 1), (0.176, 2), (0.340, 2), (0.342, 3), (1.49, 9), (1.5, 10), (9.0, 10)]),
    ("printed", [(0.0, 1), (0.307, 1), (0.309, 2), (0.456, 2), (0.458, 3), (1.49, 9), (1.501, 10), (9.0, 10)]),
])
def test_the_number_of_trials_grows_with_the_entropy(formula, breaks):
    decoder = make("cntp", count=formula)
    assert [(nats, decoder.number(nats)) for nats, _ in breaks] == breaks
    counts = [decoder.number(i / 100) for i in range(300)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 10


def test_empty_bounds_are_refused():
    with pytest.raises(Refusal, match="choose a low below high"):
        make("cntp", low=1.0, high=0.5)


# --- the distribution of CNTP: two trials per branching, summed over all pairs ---

Perplexity = Callable[[list[float]], float]


def per_token(chances: list[float]) -> float:
    return math.exp(-sum(map(math.log, chances)) / len(chances))


@dataclass
class Cautious:
    """A lane of two trials wherever entropy reaches `unsure` nats, computed by hand."""

    model: TableModel
    terminators: set[int]
    t: float = 1.0
    unsure: float = 1.0
    perplexity: Perplexity = per_token
    judged_at: float | None = None  # temperature of the probabilities that score a trial, if different
    whole: bool = True  # False: only the first token of the winner is kept

    def p(self, text: Text, t: float | None = None) -> list[float]:
        return (self.model.scores(text) / (t or self.t)).softmax(-1).tolist()

    def trials(self, text: Text, room: int) -> list[tuple[Text, float, float]]:
        """Every trial with its probability and its perplexity."""
        found, growing = [], [((), 1.0, [])]
        while growing:
            trial, weight, chances = growing.pop(0)
            judged = self.p(text + trial, self.judged_at)
            for token, chance in enumerate(self.p(text + trial)):
                longer = ((*trial, token), weight * chance, [*chances, judged[token]])
                ended = token in self.terminators | self.model.end_ids or len(longer[0]) == room
                (found if ended else growing).append(longer)
        return [(trial, weight, self.perplexity(chances)) for trial, weight, chances in found]

    def steps(self, text: Text, room: int) -> list[tuple[Text, float]]:
        """The possible next commits, with probabilities."""
        row = self.p(text)
        if float(entropy(torch.tensor(row, dtype=torch.float64).log()[None])) < self.unsure:
            return [((token,), chance) for token, chance in enumerate(row)]
        trials, won = self.trials(text, room), defaultdict(float)
        for first, p, own in trials:
            for second, q, other in trials:
                won[first if own <= other else second] += p * q
        return [(text if self.whole else text[:1], p) for text, p in won.items()]

    def law(self, prompt: Text, length: int, so_far: Text = ()) -> Law:
        if len(so_far) == length or so_far and so_far[-1] in self.model.end_ids:
            return {so_far: 1.0}
        found = defaultdict(float)
        for step, p in self.steps((*prompt, *so_far), length - len(so_far)):
            for text, q in self.law(prompt, length, (*so_far, *step)).items():
                found[text] += p * q
        return dict(found)


TWO = {"trials": 2, "low": 0.9, "high": 1.0, "terminators": "b"}  # the second trial comes at exactly 1 nat
SEEDS = range(4)


def table(seed: int) -> TableModel:
    return TableModel("abc", "c", seed=seed, spread=1.2)


@cache
def law_of_two(seed: int, t: float) -> Law:
    return law(cntp(**TWO, temperature=t), {"target": table(seed)}, [0, 1], 3)


@pytest.mark.oracle("cntp")
@pytest.mark.parametrize("t", [1.0, 1.7])
@pytest.mark.parametrize("seed", SEEDS)
def test_cntp_has_the_distribution_of_the_more_certain_of_two_trials(seed, t):
    assert sum(law_of_two(seed, t).values()) == pytest.approx(1)
    assert distance(law_of_two(seed, t), Cautious(table(seed), {1}, t).law((0, 1), 3)) < 1e-12


WRONG = {
    "the sum of the log-probabilities in place of their mean": {
        "perplexity": lambda chances: -sum(map(math.log, chances))
    },
    "the least sure trial": {"perplexity": lambda chances: -per_token(chances)},
    "the perplexity of another distribution than was drawn from": {"judged_at": 1.0},
    "only the first token of the winner kept": {"whole": False},
    "two trials everywhere": {"unsure": 0.0},
    "one trial everywhere": {"unsure": 9.0},
    "trials that do not stop at a terminator": {"terminators": set()},
}


@pytest.mark.refuses("cntp")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_selection_of_trials_has_another_distribution(wrong):
    setting = {"terminators": {1}, "t": 1.7} | wrong
    assert (
        max(distance(law_of_two(seed, 1.7), Cautious(table(seed), **setting).law((0, 1), 3)) for seed in SEEDS) > 1e-3
    )


class SumOfTheTrial(Continuation):
    @property
    def perplexity(self):
        return -sum(self.logps)


class LeastSureTrial(Continuation):
    @property
    def perplexity(self):
        return 1 / super().perplexity


def law_is_right(seed: int, t: float) -> None:
    found = law_of_two.__wrapped__(seed, t)  # computed again with the change
    assert distance(found, Cautious(table(seed), {1}, t).law((0, 1), 3)) < 1e-12


def is_refused(seeds=SEEDS) -> None:
    with pytest.raises(AssertionError):
        for seed in seeds:
            law_is_right(seed, 1.7)


@pytest.mark.refuses("cntp")
@pytest.mark.parametrize("wrong", [SumOfTheTrial, LeastSureTrial])
def test_a_cntp_that_scores_trials_otherwise_is_refused(wrong, monkeypatch):
    monkeypatch.setattr("strategies.sampling.cntp.Continuation", wrong)
    is_refused()


@pytest.mark.refuses("cntp")
@pytest.mark.parametrize(
    "part, wrong", [("terminates", lambda self, piece: False), ("number", lambda self, entropy: 2)]
)
def test_a_cntp_that_does_not_stop_or_always_tries_is_refused(part, wrong, monkeypatch):
    monkeypatch.setattr(find("cntp"), part, wrong)
    is_refused()


def test_of_two_trials_of_one_token_the_more_probable_wins():
    p = [0.4, 0.3, 0.2, 0.1]
    model = TableModel("abcd", rule=lambda context: torch.tensor(p, dtype=torch.float64).log())
    found = law(cntp(trials=2, low=0.0, high=0.1, terminators="a b c d"), {"target": model}, [0], 1)
    assert found == {(v,): pytest.approx(p[v] ** 2 + 2 * p[v] * sum(q for q in p if q < p[v])) for v in range(4)}


# --- trials, their events and costs ---

PIECES = {
    ".": True,
    ".\n": True,
    ")": True,
    " ),": True,
    ". ": True,
    "\n": True,
    " \n  ": True,
    "word": False,
    " .x": False,
    "": False,
    "'": False,
}


def test_a_trial_ends_with_a_token_that_ends_in_punctuation():
    decoder = make("cntp")
    assert {piece: decoder.terminates(piece) for piece in PIECES} == PIECES


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_winner_has_the_lowest_perplexity_by_the_librarys_forward(architecture):
    library, config = network(architecture), cntp(trials=3, low=0.5, high=2.5, temperature=2.0, longest=8)
    lane, events = run(config, {"target": pair(architecture).target}, [54, 71, 9], 20)
    bars, kept = (
        figures(events, "perplexity of the trials"),
        [data["spans"][0] for data in figures(events, "committed trials")],
    )
    assert len(bars) == len(kept) > 0 and all(min(data["values"]) == span[3] for data, span in zip(bars, kept))
    ids = lane.tokens
    with torch.inference_mode():
        logp = (library(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / 2.0).log_softmax(-1)
    for first, end, label, perplexity in kept:
        places = range(3 + first, 3 + end)
        mean = sum(float(logp[i - 1, ids[i]]) for i in places) / len(places)
        assert math.exp(-mean) == pytest.approx(perplexity, rel=1e-6) and label in ("best of 2", "best of 3")


@pytest.mark.slow
def test_all_trials_end_at_their_first_terminator():
    _, events = run(
        cntp(trials=6, low=0.0, high=0.1, terminators="b d"),
        {"target": TableModel("abcde", spread=0.3)},
        [0],
        400,
        seed=2,
    )
    texts = [text for data in figures(events, "perplexity of the trials")[:-6] for text in data["labels"]]
    assert len(texts) > 60 and all(text[-1] in "bd" and not set(text[:-1]) & set("bd") for text in texts)


def test_a_model_without_punctuation_does_not_hang():
    _, events = run(
        cntp(trials=3, low=0.0, high=0.1, longest=8, terminators="z"),
        {"target": TableModel("abc", spread=0.2)},
        [0],
        40,
    )
    assert {len(text) for data in figures(events, "perplexity of the trials") for text in data["labels"]} == {8}


def test_eight_trials_take_as_many_forwards_as_the_longest():
    model = TableModel("abcde", spread=0.3)
    _, events = run(cntp(trials=8, low=0.0, high=0.1, terminators="b"), {"target": model}, [0], 60, seed=1)
    branchings = figures(events, "perplexity of the trials")
    longest = [max(map(len, data["labels"])) for data in branchings]
    kept = [data["spans"][0] for data in figures(events, "committed trials")]
    assert all(len(data["labels"]) == 8 for data in branchings) and sum(end - first for first, end, *_ in kept) == 60
    # the row a branching starts from is known, and the winner's last token is read by a forward of its own
    assert model.forwards == sum(1 for event in events if isinstance(event, Forward)) == sum(longest)


def test_tokens_of_discarded_trials_are_counted():
    _, events = run(
        cntp(trials=4, low=0.0, high=0.1, terminators="a b c d e"), {"target": TableModel("abcde", spread=0.3)}, [0], 10
    )
    assert [data["series"]["share"] for data in figures(events, "tokens discarded")] == [0.75] * 10
