"""Online speculative decoding: a draft that learns from its rejected tokens, and a text that is the target's anyway."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from drafting_runs import constant, recorded
from pairs import network, pair
from registry import Collapse
from tables import write

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.token_tree import ROOT
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from strategies.speculative.online_speculative import CorrectedPosition, DraftCorrection, loss_of
from support.drafted_rounds import RecordsRounds, departs
from support.laws import AT_ONE, EXACT, WRONG, off, tables
from support.online_drafting import speculation
from support.speculation import collapses, speculative_lane

NAME, PROMPT, DEPTH, EVERY, RATE, RANK = "online_speculative", [54, 71, 71, 54, 9, 71, 71], 3, 2, 0.05, 8
FAST = {"scope": "correction", "depth": DEPTH, "interval": EVERY, "lr": RATE, "rank": RANK}
ENUMERATED = {"depth": 2, "interval": 1, "lr": 0.1, "rank": 2}
BRIEF = {"online_speculative": {"depth": 2, "interval": 1, "rank": 2}}
COLLAPSES = {
    NAME: [
        *collapses(NAME, depth=0),
        *(
            Collapse(speculative_lane(NAME, *more, lr=0.0), speculative_lane("draft_model", *more, depth=5))
            for more in ([], ["rejection", AT_ONE])
        ),
    ]
}


# --- every draft of a text, computed anew ---

class Recording(RecordsRounds, find(NAME)):
    """Records the text before each round, and what was drafted."""


class AdamByHand:
    """AdamW as its paper writes it, with the defaults of torch."""

    def __init__(self, weights: list[torch.Tensor]):
        self.weights, self.time = weights, 0
        self.moments = [[torch.zeros_like(each), torch.zeros_like(each)] for each in weights]

    def step(self, gradients: list[torch.Tensor], rate: float) -> None:
        self.time += 1
        for weight, gradient, moments in zip(self.weights, gradients, self.moments):
            moments[0] = 0.9 * moments[0] + 0.1 * gradient
            moments[1] = 0.999 * moments[1] + 0.001 * gradient**2
            mean, square = moments[0] / (1 - 0.9**self.time), moments[1] / (1 - 0.999**self.time)
            weight.data = weight * (1 - 0.01 * rate) - rate * mean / (square.sqrt() + 1e-8)


class LearningDraft:
    """The draft and its learning, by whole forwards of the library's networks."""

    def __init__(self):
        self.models = pair()
        self.target, self.draft = network("llama"), network("llama")
        self.draft.load_state_dict(self.models.draft.network.state_dict())
        made = DraftCorrection(self.models.draft.width, RANK)  # for the random weights it begins with
        self.down, self.up = (part.weight.detach().clone().requires_grad_() for part in (made.down, made.up))
        self.adam, self.seen = AdamByHand([self.down, self.up]), []

    @torch.no_grad()
    def states(self, model, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of the lm_head, and logits, after a text."""
        found = model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
        return found.hidden_states[-1][0, -1], found.logits[0, -1]

    def logits(self, hidden, logits):
        """h + U SiLU(D h) through the lm_head, as logits."""
        h = hidden.float()
        inner = self.down @ h
        change = self.up @ (inner * inner.sigmoid())
        return logits.float() + self.draft.lm_head.weight.detach().float() @ change

    def chain(self, text: list[int], length: int) -> list[int]:
        path: list[int] = []
        for _ in range(length):
            path.append(int(self.logits(*self.states(self.draft, text + path)).argmax()))
            if path[-1] in self.models.target.end_ids:
                break
        return path

    def observe(self, text: list[int], path: list[int], after: list[int]) -> None:
        """Learn from the first draft token that is not in the text after the round."""
        accepted = next((i for i, token in enumerate(path) if after[len(text) + i] != token), None)
        if accepted is None:
            return
        prefix = text + path[:accepted]
        hidden, logits = self.states(self.draft, prefix)
        self.seen.append((hidden, logits, self.states(self.target, prefix)[1].float()))
        if len(self.seen) == EVERY:
            losses = [-(p.softmax(-1) * self.logits(h, q).log_softmax(-1)).sum() for h, q, p in self.seen]
            self.adam.step(torch.autograd.grad(torch.stack(losses).mean(), [self.down, self.up]), RATE)
            self.seen = []


def mistaken(drafter, length: int = 26) -> bool:
    """Whether the draft of some round differs from the one computed anew."""
    models, draft = pair(), LearningDraft()
    lane = write(speculation(drafter), {"target": models.target, "draft": models.draft}, PROMPT, Limits(3, length),
                 Draws(3))
    assert drafter._correction.updates > 1, "too few updates to prove anything"
    return departs(drafter, lane.tokens, draft)


class LearnsTheRowAfter(Recording):
    """Wrong: the row after the rejected token is trained, as in the released code."""

    def observe(self, tree, rows, verdict):
        self._hidden = {node: self._hidden.get(node + 1, self._hidden[node]) for node in self._hidden}
        super().observe(tree, rows, verdict)


class LearnsFromAccepted(Recording):
    """Wrong: the first row of the round is trained, wherever the rejection was."""

    def _store(self, rows, node):
        super()._store(rows, ROOT)


class NeverStartsAgain(Recording):
    """Wrong: positions are trained on again in every later update."""

    def _learned(self, lm):
        kept = list(self._waiting)
        yield from super()._learned(lm)
        self._waiting = kept


@pytest.mark.slow
@pytest.mark.oracle("online_speculative")
def test_every_draft_is_that_of_a_draft_which_learned_from_the_rejections_before():
    assert not mistaken(Recording(**FAST))


@pytest.mark.refuses("online_speculative")
@pytest.mark.parametrize("wrong", [LearnsTheRowAfter, LearnsFromAccepted, NeverStartsAgain])
def test_learning_another_row_or_a_position_twice_is_detected(wrong):
    assert mistaken(wrong(**FAST))


def test_only_rejected_positions_are_learned_unless_all_tested_ones_are_asked_for():
    counts = {}
    for positions in ("rejected", "tested"):
        drafter = Recording(**{**FAST, "interval": 64}, positions=positions)
        models = pair()
        write(speculation(drafter), {"target": models.target, "draft": models.draft}, PROMPT, Limits(3, 24), Draws(3))
        counts[positions] = len(drafter._waiting), drafter._tested, drafter._accepted
    assert counts["rejected"][0] == counts["rejected"][1] - counts["rejected"][2]
    assert counts["tested"][0] == counts["tested"][1] > counts["rejected"][0]


# --- losses ---

def test_the_divergences_are_those_of_their_definitions():
    draft, target = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    q, p = draft.softmax(-1), target.softmax(-1)
    forward, reverse = (p * (p / q).log()).sum(-1).mean(), (q * (q / p).log()).sum(-1).mean()
    entropy = -(p * p.log()).sum(-1).mean()
    assert loss_of(draft, target, "forward") == pytest.approx(float(forward + entropy))
    assert loss_of(draft, target, "reverse") == pytest.approx(float(reverse))
    assert loss_of(draft, target, "both") == pytest.approx(float(0.9 * forward + 0.1 * reverse))


def test_an_update_leaves_the_lm_head_and_the_positions_as_they_were():
    correction, lm_head = DraftCorrection(6, 3), torch.randn(5, 6, requires_grad=True)
    position = CorrectedPosition(torch.randn(6), torch.randn(5), torch.randn(5))
    before = [part.detach().clone() for part in (lm_head, *position)]
    correction.learn([position], lm_head.detach(), 0.1, "forward")
    assert lm_head.grad is None
    assert all(torch.equal(one, other) for one, other in zip(before, (lm_head, *position)))


# --- the output distribution, whatever is learned ---

@pytest.mark.strategy("online_speculative")
@pytest.mark.parametrize("verifier, loss", [("rejection", "forward"), ("sample_match", "reverse")])
def test_the_distribution_is_the_targets_while_the_draft_learns(verifier, loss):
    lane = speculative_lane(NAME, verifier, AT_ONE, loss=loss, positions="tested", **ENUMERATED)
    assert off(lane, tables("ab"), [0, 1, 0], 3) < EXACT


class ClaimsTheOldQ(find(NAME)):
    """Wrong: the draft tokens are drawn from what was learned, and verified against the q before."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        for node, parent in enumerate(tree.parents):
            tree.q[node] = self._logits[parent].softmax(-1)
        return tree


@pytest.mark.slow
@pytest.mark.refuses("online_speculative")
def test_verifying_against_the_q_before_learning_changes_the_distribution():
    drafters = [cls(**{**ENUMERATED, "positions": "tested"}) for cls in (find(NAME), ClaimsTheOldQ)]
    right, wrong = (off(speculation(drafter, AT_ONE), tables("ab"), [0, 1, 0], 3) for drafter in drafters)
    assert right < EXACT and wrong > WRONG


@pytest.mark.slow
def test_a_draft_ruined_by_learning_leaves_the_greedy_text_unchanged():
    models = pair()
    streams = {"target": models.target, "draft": models.draft}
    ruined = Recording(**{**FAST, "lr": 0.1, "interval": 1})
    text = write(speculation(ruined), streams, PROMPT, Limits(3, 30), Draws(3)).tokens
    assert ruined._correction.updates > 5
    assert text == write(Assembly(make("greedy"), []), streams, PROMPT, Limits(3, 30), Draws(3)).tokens


# --- learning, and what is remembered ---

def agreement(lr: float) -> list[bool]:
    """Whether each round of a long text accepted its draft token, for a draft that is wrong in the same way always."""
    draft = constant()
    draft.rule = lambda context: torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
    drafter = Recording(depth=1, interval=4, lr=lr, rank=4)
    found: list[bool] = []
    observe = drafter.observe

    def counted(tree, rows, verdict):
        found.extend(test.kept for test in verdict.tests)
        observe(tree, rows, verdict)

    drafter.observe = counted
    write(speculation(drafter, AT_ONE), {"target": constant(), "draft": draft}, [0], Limits(0, 120), Draws(1))
    return found


@pytest.mark.slow
def test_acceptance_rises_while_the_draft_learns_and_stays_without_learning():
    learning, fixed = agreement(0.1), agreement(0.0)
    late = slice(len(learning) // 2, None)
    assert sum(learning[late]) / len(learning[late]) > 0.7 > 0.55 > sum(fixed) / len(fixed)


@pytest.mark.slow
def test_what_a_visitor_taught_the_draft_is_used_again_and_nobody_elses():
    lane, memory = speculative_lane(NAME, "greedy_match", **{**FAST, "lr": 0.01}), Memory()
    first, second, other = (recorded(lane, own)[0] for own in (memory, memory, Memory()))
    digests = [session.headers[0].memory for session in (first, second, other)]
    assert digests[0] == digests[2] == "" != digests[1]


@pytest.mark.slow
def test_the_memory_of_a_visitor_does_not_grow():
    lane, memory, sizes = speculative_lane(NAME, "greedy_match", **FAST), Memory(), []
    for _ in range(3):
        recorded(lane, memory, length=12)
        (thing,) = memory._things.values()
        sizes.append((len(memory), sum(weights.numel() for weights in thing.parameters())))
    assert sizes == [(1, 2 * RANK * pair().draft.width)] * 3
    assert thing.updates > 1


def test_a_draft_with_a_quantised_lm_head_is_refused():
    model = SimpleNamespace(name="packed", lm_head_weights=None)
    with pytest.raises(Refusal, match="The lm_head of packed is quantised"):
        list(make(NAME)._begin(SimpleNamespace(vocabulary=3), model))


def test_each_lane_learns_in_a_copy_of_its_own():
    correction = DraftCorrection(4, 2)
    memory = Memory()
    memory.keep("draft", correction)
    copy = memory.recall("draft", DraftCorrection)
    copy.learn([CorrectedPosition(torch.randn(4), torch.randn(5), torch.randn(5))] * 2, torch.randn(5, 4), 0.1, "both")
    assert copy.digest() != correction.digest() and copy.updates == 1 and correction.updates == 0
    assert torch.equal(correction.up.weight, torch.zeros(4, 2))
