"""DeepConf: which texts stop and which answer wins, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from registry import Collapse
from tables import TableModel, Text, distance, law

import playground
from playground.contract import Decoder, find, make
from playground.errors import Refusal
from playground.events import Branches, Note
from strategies.search.deepconf import ConfidentText
from support.chosen_answers import END, chosen, whole
from support.search_oracles import PROMPT, lane_of
from support.search_runs import logp, of, run
from support.speculation import GREEDY, MODEL
from support.wrong_variants import refused

DeepConf = find("deepconf")
COLLAPSES = {
    "deepconf": [
        Collapse(of("deepconf", n=1, temperature=1.0), MODEL),
        Collapse(of("deepconf", n=3, temperature=0.0), GREEDY),
        Collapse(of("deepconf", n=4, percentile=0.0, weight="equal", answer="text"),
                 of("self_consistency", n=4, answer="text")),
    ],
}
BRIEF = {"deepconf": {"n": 2, "warm_up": 1}}


# --- by hand ---

def confidences(model: TableModel, text: Text, k: int) -> list[float]:
    rows = [model.scores((*PROMPT, *text[:i])).log_softmax(-1).tolist() for i in range(len(text))]
    return [-sum(sorted(row)[-k:]) / k for row in rows]


def groups(values: list[float], window: int) -> list[float]:
    return [sum(values[i - window:i]) / window for i in range(window, len(values) + 1)] or [sum(values) / len(values)]


def percentile(values: list[float], share: float) -> float:
    """As numpy has it: linear between the two neighbours."""
    if share == 0:
        return -math.inf
    at = (len(values) - 1) * share / 100
    low, high = sorted(values)[math.floor(at)], sorted(values)[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def elected(model: TableModel, decoder: Decoder, texts: list[Text]) -> Text:
    """The text that wins among complete ones: a text with a window below the bar is one that stopped."""
    low = {text: min(groups(confidences(model, text, decoder.k), decoder.window)) for text in texts}
    full = {text: min([*groups(confidences(model, text, decoder.k), decoder.window)]
                      if len(text) >= decoder.window else [math.inf]) for text in texts}
    warm, later = texts[:decoder.warm_up], texts[decoder.warm_up:]
    bar = percentile([low[text] for text in warm], decoder.percentile)
    written = [*warm, *(text for text in later if full[text] >= bar)]
    above = [text for text in written if low[text] >= bar]
    votes = defaultdict(list)
    for text in whole(above) if above else []:
        if text != (END,):  # the end alone is no answer
            votes[text].append(text)
    if not votes:
        return max(whole(written), key=lambda text: logp(model, PROMPT, text))
    return max(votes, key=lambda text: (len(votes[text]) * low[text], len(votes[text]) * logp(model, PROMPT, text)))


def check_deepconf(cls: type[Decoder]) -> None:
    """The law of the returned text, over all triples of texts of two tokens."""
    cases = ({"warm_up": 1, "percentile": 50.0, "window": 1}, {"warm_up": 2, "percentile": 90.0},
             {"warm_up": 3, "percentile": 40.0}, {"warm_up": 1, "window": 1, "k": 2})
    for seed, settings in enumerate(cases):
        model = TableModel("ab.", ".", seed + 3, spread=1.2)
        decoder = cls(**{"n": 3, "answer": "text", "window": 2, "k": 1, "temperature": 0.7, **settings})
        found = law(lane_of(decoder), {"target": model}, PROMPT, 2)
        wanted = chosen(model, 3, 0.7, lambda texts, m=model, d=decoder: elected(m, d, texts))
        assert distance(found, wanted) < 1e-9


class AfterTheTemperature(DeepConf):
    """The confidence of another distribution."""

    def confidence(self, logp):
        return super().confidence((logp / self.temperature).log_softmax(-1))


class OfTheLeastProbable(DeepConf):
    def confidence(self, logp):
        return -float(logp.sort().values[:self.k].double().mean())


class MeanOfTheWarmUp(DeepConf):
    def _bar(self, texts):
        return sum(text.lowest for text in texts) / len(texts) + 0.1


class StoppedTextsVote(DeepConf):
    def _votes(self, texts, bar):
        return super()._votes(texts, -math.inf)


class EveryVoteCountsOne(DeepConf):
    def _weight(self, texts):
        return len(texts)


@pytest.mark.oracle("deepconf")
def test_the_law_is_that_of_the_vote_by_hand():
    check_deepconf(DeepConf)


@pytest.mark.refuses("deepconf")
@pytest.mark.parametrize("wrong", [
    AfterTheTemperature, OfTheLeastProbable, MeanOfTheWarmUp, StoppedTextsVote, EveryVoteCountsOne
])
def test_a_wrong_deepconf_is_refused(wrong):
    refused(check_deepconf, wrong)


# --- what stops ---

def two_kinds(context: Text) -> torch.Tensor:
    """One text in three begins with r, is peaked and answers 1; the others are flat and answer 2: r f x 1 2 and end."""
    length, first = len(context) - 1, context[1:2]
    if length == 0:
        row = [0.35, 0.65, 0, 0, 0, 0]
    elif length < 5:
        row = [0, 0, 1, 0, 0, 0] if first == (0,) else [0.3, 0.3, 0.4, 0, 0, 0]
    else:
        row = [0, 0, 0, 0, 0, 1] if length > 5 else [0, 0, 0, float(first == (0,)), float(first == (1,)), 0]
    return (torch.tensor(row, dtype=torch.float64) * 0.94 + 0.01).log()


def test_unsure_texts_stop_early_and_the_vote_goes_to_the_sure_ones():
    model = TableModel("rfx12.", ".", rule=two_kinds)
    settings = {"n": 24, "warm_up": 4, "percentile": 75.0, "window": 2, "k": 6, "temperature": 1.0}
    plain = run(of("self_consistency", n=24, temperature=1.0), model, [0], 8)
    recorded = run(of("deepconf", **settings), model, [0], 8)
    assert "2" in plain.lane.text and "1" in recorded.lane.text and "2" not in recorded.lane.text
    dropped = {number for event in recorded.of(Branches) for number in event.dropped}
    texts = recorded.texts()
    assert len(dropped) >= 8 and all(len(texts[number]) < 7 for number in dropped) and not dropped & {1, 2, 3, 4}
    written = sum(len(text) for number, text in texts.items() if number)
    assert f"{len(dropped)} of 24 texts were stopped early; {written} tokens" in recorded.of(Note)[-1].text


def test_a_window_counts_when_it_is_full():
    decoder = make("deepconf", window=3)
    for window, groups in ((3, [3.0, 4.0]), (1, [1.0, 5.0, 3.0, 4.0]), (9, [3.25])):
        text = ConfidentText(None, window=window)
        for value in (1.0, 5.0, 3.0, 4.0):
            text.add(-1.0, value)
        assert text.groups == groups and text.lowest == min(groups)
        assert text.mean_confidence == 3.25 and text.mean == -1.0
    assert decoder.confidence(torch.tensor([0.7, 0.2, 0.1]).log()) == pytest.approx(
        -(math.log(0.7) + math.log(0.2) + math.log(0.1)) / 3)


def test_more_texts_in_the_warm_up_than_in_all_are_refused():
    with pytest.raises(Refusal, match="choose a shorter one"):
        make("deepconf", n=4, warm_up=5)


def test_answers_of_the_bundled_model_are_weighed():
    question = "Gecost buys 6 boxes of 7 keys. Then 3 of the keys are gone. How many keys does Gecost have now?"
    recorded = playground.run("deepconf", question, chat=True, knobs={"n": 3, "warm_up": 2})
    assert recorded.text.strip().endswith("#### 39")
