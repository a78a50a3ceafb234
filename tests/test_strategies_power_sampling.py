"""Power sampling: its chain by hand over all texts, the law that the chain leaves as it is, and wrong variants."""
from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from registry import Collapse
from tables import Law, TableModel, Text, distance, law

import playground
from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal
from playground.events import Forward, Note
from support.laws import EXACT
from support.search_runs import of, run
from support.wrong_variants import refused

PowerSampling = find("power_sampling")
PROMPT = (0, 1)
MODEL = LaneConfig("sample", {"temperature": 1.0, "top_p": 1.0})
COLLAPSES = {
    "power_sampling": [
        Collapse(of("power_sampling", temperature=1.0, steps=0), MODEL),
        Collapse(of("power_sampling", temperature=0.5, steps=0, blocks=1),
                 LaneConfig("sample", {"temperature": 0.5, "top_p": 1.0})),
    ],
}
BRIEF = {"power_sampling": {"steps": 1, "blocks": 1}}


def texts(model: TableModel, size: int, start: Text = ()) -> list[Text]:
    """All texts of `size` tokens, or that end before."""
    if len(start) == size or start and start[-1] in model.end_ids:
        return [start]
    return [text for token in range(model.vocabulary) for text in texts(model, size, (*start, token))]


def chance(model: TableModel, text: Text, after: int = 0, t: float = 1.0) -> float:
    """The probability of a text from its token `after` on, at a temperature of each token."""
    return math.prod(
        float((model.scores((*PROMPT, *text[:i])) / t).softmax(-1)[text[i]]) for i in range(after, len(text))
    )


def moved(model: TableModel, found: Law, size: int, t: float, corrected: bool = True) -> Law:
    """The law after one step of the chain."""
    after: Law = defaultdict(float)
    for text, p in found.items():
        for cut in range(len(text)):
            for other in texts(model, size, text[:cut]):
                proposed = p / len(text) * chance(model, other, cut, t)
                ratio = (chance(model, other) / chance(model, text)) ** (1 / t)
                ratio *= chance(model, text, cut, t) / chance(model, other, cut, t)
                accepted = min(1.0, ratio * (len(text) / len(other) if corrected else 1.0))
                after[other] += proposed * accepted
                after[text] += proposed * (1 - accepted)
    return dict(after)


def cold(model: TableModel, size: int, t: float) -> Law:
    return {text: chance(model, text, 0, t) for text in texts(model, size)}


def power(model: TableModel, size: int, t: float) -> Law:
    """The law that is wanted."""
    weights = {text: chance(model, text) ** (1 / t) for text in texts(model, size)}
    return {text: weight / sum(weights.values()) for text, weight in weights.items()}


def check_power_sampling(cls: type[Decoder]) -> None:
    """One step of the lane is one step of the chain, with and without an end token."""
    for letters, ends, size, t in (("ab", "", 3, 0.5), ("ab.", ".", 2, 0.25), ("a.", ".", 3, 0.5)):
        model = TableModel(letters, ends, seed=size)
        decoder = cls(temperature=t, steps=1, blocks=1)
        found = law(Assembly(decoder), {"target": model}, list(PROMPT), size)
        assert distance(found, moved(model, cold(model, size, t), size, t)) < EXACT


class SwapsTheLaws(PowerSampling):
    def log_ratio(self, text, proposal, cut):
        return super().log_ratio(*([drawn._replace(logp=drawn.logq, logq=drawn.logp) for drawn in way]
                                   for way in (text, proposal)), cut)


class ForgetsTheProposal(PowerSampling):
    def log_ratio(self, text, proposal, cut):
        return super().log_ratio(*([drawn._replace(logq=0.0) for drawn in way] for way in (text, proposal)), cut)


class ForgetsTheLengths(PowerSampling):
    """As the authors' code: both texts are weighed as if they were equally long."""

    def log_ratio(self, text, proposal, cut):
        return super().log_ratio(text, proposal, cut) + math.log(len(proposal)) - math.log(len(text))


class ComparesOneToken(PowerSampling):
    """Accepts all: at one token, the target's ratio is the proposal's."""

    def log_ratio(self, text, proposal, cut):
        return super().log_ratio(text[:cut + 1], proposal[:cut + 1], cut)


@pytest.mark.oracle("power_sampling")
def test_a_step_has_the_law_of_the_chain_by_hand():
    check_power_sampling(PowerSampling)


@pytest.mark.refuses("power_sampling")
@pytest.mark.parametrize("wrong", [SwapsTheLaws, ForgetsTheProposal, ForgetsTheLengths, ComparesOneToken])
def test_a_wrong_power_sampling_is_refused(wrong):
    refused(check_power_sampling, wrong)


@pytest.mark.oracle("power_sampling")
@pytest.mark.parametrize("t", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("ends", ["", "."])
def test_the_chain_leaves_the_power_of_the_models_law_as_it_is(t, ends):
    model = TableModel("ab.", ends, seed=4)
    wanted = power(model, 3, t)
    assert distance(moved(model, wanted, 3, t), wanted) < EXACT
    if ends and t < 1:  # without the correction for lengths it does not
        assert distance(moved(model, wanted, 3, t, corrected=False), wanted) > 1e-3


def test_two_blocks_are_two_chains_one_after_the_other():
    model, t = TableModel("ab", seed=2), 0.5
    first = moved(model, cold(model, 1, t), 1, t)
    grown = {(*text, token): p * chance(model, (*text, token), 1, t) for text, p in first.items() for token in (0, 1)}
    found = law(of("power_sampling", temperature=t, steps=1, blocks=2), {"target": model}, list(PROMPT), 2)
    assert distance(found, moved(model, grown, 2, t)) < EXACT


def test_at_temperature_one_every_proposal_is_accepted():
    recorded = run(of("power_sampling", temperature=1.0, steps=5), TableModel("abcd"), list(PROMPT), 16)
    assert "20 of 20 proposals were accepted" in recorded.of(Note)[-1].text


# --- what only the law of whole texts does ---

def forked(context: Text) -> torch.Tensor:
    """a, .6, with ten equal continuations; b, .4, with one certain."""
    if len(context) == len(PROMPT):
        row = [0.6, 0.4, *[0.0] * 10]
    else:
        row = [0.0, 0.0, *([0.1] * 10 if context[-1] == 0 else [1.0, *[0.0] * 9])]
    return torch.tensor(row, dtype=torch.float64).log()


def test_it_prefers_a_certain_continuation_where_a_low_temperature_prefers_many_mediocre_ones():
    """.4^4 = .0256 against 10 (.06)^4 = .00013: by the law of texts b has 99.5 %, token by token a has 83.5 %."""
    model = TableModel("abcdefghijkl", rule=forked)
    wanted, by_token = power(model, 2, 0.25), cold(model, 2, 0.25)
    assert sum(p for text, p in wanted.items() if text[0] == 1) == pytest.approx(0.995, abs=1e-3)
    assert sum(p for text, p in by_token.items() if text[0] == 0) == pytest.approx(0.835, abs=1e-3)
    firsts = [run(of("power_sampling", steps=40, blocks=1), model, list(PROMPT), 2, seed).lane.main.written[0]
              for seed in range(30)]
    assert firsts.count(1) >= 27


def test_what_the_texts_share_is_read_once():
    """A forward for the prompt, and one for each token whose row is needed: none for a token that was read before."""
    recorded = run(of("power_sampling", steps=8, blocks=2), TableModel("ab", spread=0.1), list(PROMPT), 6)
    forwards, note = recorded.of(Forward), recorded.of(Note)[-1].text
    drawn = int(note.split("; ")[1].split()[0])
    assert len(recorded.lane.main.written) == 6 and len(forwards) < drawn and len(forwards) <= 1 + 2 + 4 + 8 + 16 + 32
    assert sum(forward.tokens for forward in forwards) <= len(PROMPT) + 2 + 4 + 8 + 16 + 32 + 64


@pytest.mark.parametrize("toggle", [("top_p", {}), ("regex", {"pattern": "a*"}), ("sink_window", {})])
def test_what_would_change_the_law_is_refused(toggle):
    with pytest.raises(Refusal, match="Power sampling does not work with"):
        assemble(LaneConfig("power_sampling", {}, [toggle]))


def test_the_bundled_model_writes_a_text_of_its_own_law():
    question = "Gecost buys 6 boxes of 7 keys. Then 3 of the keys are gone. How many keys does Gecost have now?"
    recorded = playground.run("power_sampling", question, chat=True, knobs={"steps": 2}, max_new_tokens=48)
    assert recorded.text.strip().endswith("#### 39")
