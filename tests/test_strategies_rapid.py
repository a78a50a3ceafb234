"""A shorter context drafts for the longer one and shifts its distribution: against a computation by hand."""
from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import Law, TableModel, distance, law, product_law

from playground.algorithms.speculative.verification import Ruling
from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Verdict
from playground.trace import check
from support.laws import AT_ONE, EXACT, WRONG
from support.online_drafting import collapses
from support.speculation import GREEDY


def rapid(*samplers: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig("rapid", knobs, list(samplers))


COLLAPSES = {
    "rapid": [*collapses(lambda *added: rapid(*added, gamma=0)), Collapse(rapid(eta=0.0), GREEDY)],
}


def moved_by_hand(scores: torch.Tensor, q: list[float], eta: float, tail: float) -> list[float]:
    """The shifted p, value by value."""
    p = scores.softmax(-1).tolist()
    raised = [float(s.exp()) * 2.718281828459045 ** (eta * (b - a)) for s, a, b in zip(scores - scores.max(), p, q)]
    raised = [value / sum(raised) for value in raised]
    kept = [a if value < tail * max(raised) else value for a, value in zip(p, raised)]
    return [value / sum(kept) for value in kept]


def one_place(p: list[float], q: list[float], moved: list[float]) -> tuple[list[float], list[float]]:
    """Probabilities that each token is drafted and accepted, and that it is sampled after a rejection."""
    stands = [min(a, b) for a, b in zip(q, moved)]
    left = [max(a - b, 0.0) for a, b in zip(p, stands)]
    rest = left if sum(left) > 0 else p
    return stands, [(1 - sum(stands)) * value / sum(rest) for value in rest]


def rapid_law(model: TableModel, prompt: list[int], length: int, gamma: int, eta: float, tail: float) -> Law:
    """Law of a text by the rule itself: no lane, no tree, no draws. The short view has the prompt's last token alone.
    """
    found: Law = defaultdict(float)

    def places(text: tuple, chance: float, left: int) -> None:
        if len(text) == length or chance == 0:
            found[text] += chance
            return
        left = min(gamma, length - len(text) - 1) if left < 0 else left
        scores = model.scores((*prompt, *text))
        p, q = scores.softmax(-1).tolist(), model.scores((prompt[-1], *text)).softmax(-1).tolist()
        if not left:
            stands, redrawn = [0.0] * len(p), p
        else:
            stands, redrawn = one_place(p, q, moved_by_hand(scores, q, eta, tail))
        for token in range(len(p)):
            places((*text, token), chance * stands[token], left - 1)
            places((*text, token), chance * redrawn[token], -1)

    places((), 1.0, -1)
    return dict(found)


@pytest.mark.slow
@pytest.mark.oracle("rapid")
@pytest.mark.parametrize(
    "gamma, eta, tail", [(1, 5.0, 0.1), (3, 5.0, 0.1), (3, 1.0, 0.0), (2, 50.0, 0.5), (2, 0.0, 0.1)]
)
def test_the_output_distribution_is_that_of_the_rule(gamma, eta, tail):
    models, prompt = {"target": TableModel("abc", seed=6)}, [1, 0]
    found = law(rapid(AT_ONE, gamma=gamma, eta=eta, tail=tail), models, prompt, 3)
    assert sum(found.values()) == pytest.approx(1.0)
    assert distance(found, rapid_law(models["target"], prompt, 3, gamma, eta, tail)) < EXACT


def off(decoder) -> float:
    """Distance of a lane's output distribution from that of the rule."""
    model, prompt = TableModel("abcde", seed=6), [1, 0]
    found = law(Assembly(decoder, [make("temperature", t=1.0)]), {"target": model}, prompt, 2)
    return distance(found, rapid_law(model, prompt, 2, decoder.gamma, decoder.eta, decoder.tail))


class ForgetsTheMove(find("rapid")):
    """Resamples a rejected draft token from the positive part of p - q."""

    def _sampled(self, lm, child, tree, position, p, q, moved):
        ruling = super()._sampled(lm, child, tree, position, p, q, moved)
        left = (p - q).clamp(min=0)
        return (
            ruling
            if ruling.child is not None
            else Ruling(None, lm.draw(left / left.sum(), position, "again"), ruling.tests, left)
        )


class MovesScoresByScores(find("rapid")):
    """Shifts by the difference of log-probabilities in place of probabilities."""

    def shifted(self, scores, q):
        return (scores + self.eta * (q.log() - scores.log_softmax(-1))).softmax(-1)


class NotMadeWhole(find("rapid")):
    """Omits the last step, so that the shifted p does not sum to 1."""

    def shifted(self, scores, q):
        p = scores.softmax(-1)
        moved = (scores + self.eta * (q - p)).softmax(-1)
        return torch.where(moved < self.tail * moved.max(), p, moved)


@pytest.mark.slow
@pytest.mark.refuses("rapid")
@pytest.mark.parametrize("wrong", [ForgetsTheMove, MovesScoresByScores, NotMadeWhole])
def test_a_wrong_rule_has_another_distribution(wrong):
    assert off(find("rapid")(gamma=2, eta=4.0, tail=0.5)) < EXACT
    assert off(wrong(gamma=2, eta=4.0, tail=0.5)) > WRONG


@pytest.mark.slow
def test_at_eta_0_the_distribution_is_the_long_contexts_and_it_moves_with_eta():
    apart = {0.0: 0.0, 1.0: 0.0, 5.0: 0.0}
    for eta in apart:
        for seed in range(8):
            model, prompt = TableModel("abcd", seed=seed), [1, 0]
            found, own = (
                law(rapid(AT_ONE, gamma=1, eta=eta), {"target": model}, prompt, 2),
                product_law(model, prompt, 2),
            )
            # total variation, on average
            apart[eta] += sum(abs(found.get(text, 0.0) - chance) for text, chance in own.items()) / 16
    assert apart[0.0] < EXACT and apart[0.0] + 0.02 < apart[1.0] and apart[1.0] + 0.02 < apart[5.0]


def test_with_identical_contexts_every_draft_token_is_accepted():
    # what the short view reads is its last token, so all of it
    models, prompt = {"target": TableModel("abc", seed=6)}, [1]
    assert distance(law(rapid(AT_ONE, gamma=2), models, prompt, 3), product_law(models["target"], prompt, 3)) < EXACT
    session = prepare(
        pair(),
        [rapid(AT_ONE, length=2048, threshold=0.0)],
        Prompt("The bird sings.", context="The green bird sings."),
        Limits(0, 16),
    )
    assert all(test.kept for stamped in session if isinstance(stamped.event, Verdict) for test in stamped.event.tests)


def test_greedily_a_draft_token_is_accepted_if_it_is_the_argmax_of_the_shifted_p():
    model, prompt, moved = TableModel("abcd", seed=2), [1, 0], 0
    found = law(rapid(gamma=3, eta=8.0), {"target": model}, prompt, 7)
    text, left = [], -1
    while len(text) < 7:
        left = min(3, 7 - len(text) - 1) if left < 0 else left
        scores, q = model.scores((*prompt, *text)), model.scores((prompt[-1], *text)).softmax(-1)
        best = int(torch.tensor(moved_by_hand(scores, q.tolist(), 8.0, 0.1)).argmax()) if left else int(scores.argmax())
        moved += best != int(scores.argmax())
        left = left - 1 if left and best == int(q.argmax()) else -1
        text.append(best)
    assert found == {tuple(text): 1.0} and moved


@pytest.mark.slow
def test_at_eta_0_the_greedy_text_is_that_of_the_whole_passage():
    prompt = Prompt("What does the bird do?", context="The fox is red. The green bird sings.")
    session = prepare(pair(), [GREEDY, rapid(eta=0.0, part=4, length=4)], prompt, Limits(0, 24))
    recorded = list(session)
    plain, lane = (
        [token for s in recorded if s.lane == i and s.event.kind == "commit" for token in s.event.ids] for i in (0, 1)
    )
    assert plain == lane and check(session.trace) == []
    assert {test.kept for s in recorded if isinstance(s.event, Verdict) for test in s.event.tests} == {True, False}


PASSAGE = "Foxes sleep in holes. Birds sing at dawn. Horses eat fresh grass. Birds build nests there."


BOTH = "Birds sing at dawn. Birds build nests there."


@pytest.mark.parametrize("length, chosen", [(4, "Birds sing at dawn."), (8, BOTH), (2048, BOTH)])
def test_the_short_context_has_the_chunks_most_similar_to_the_question_in_order(length, chosen):
    assert make("rapid", part=4, length=length).passages(PASSAGE, "When do birds sing?") == {"retrieved": chosen}


def test_an_empty_short_context_is_the_question_alone():
    assert make("rapid", part=4).passages(PASSAGE, "Who swims?") == {"retrieved": ""}
    session = prepare(pair(), [rapid(part=4)], Prompt("Who swims?", context=PASSAGE), Limits(0, 4))
    notes = [stamped.event.text for stamped in session if stamped.event.kind == "note"]
    assert any("reads only the question" in note for note in notes)
    assert len(session._runners[0].lane.prompts["retrieved"]) < len(session._runners[0].lane.prompts["target"]) / 2


def test_common_words_count_less_than_rare_ones():
    passage = "Birds like the birds. Birds fear the fox. Birds near birds sit."
    assert make("rapid", part=4, length=4).passages(passage, "birds or fox") == {"retrieved": "Birds fear the fox."}


def test_without_a_passage_it_is_refused():
    session = prepare(pair(), [rapid()], Prompt("Who sings?"), Limits(0, 4))
    assert "needs a context" in [stamped.event for stamped in session][-1].message
