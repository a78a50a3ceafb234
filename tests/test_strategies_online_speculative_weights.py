"""Online speculative decoding that trains the draft itself: every draft is that of a network trained by hand."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from drafting_runs import recorded
from pairs import network, pair
from tables import TableModel, write
from torch.func import functional_call

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.speculative.learning import draft_training
from playground.algorithms.speculative.learning.draft_training import LearnedWeights, untrained_lora
from playground.algorithms.speculative.learning.query_kinds import QueryKinds
from playground.contract import find
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.events import Note
from strategies.speculative import online_speculative
from support.drafted_rounds import RecordsRounds, departs
from support.laws import AT_ONE, EXACT, WRONG, off, tables
from support.online_drafting import speculation
from support.speculation import speculative_lane

NAME, PROMPT, RATE, EVERY, RANK = "online_speculative", [54, 71, 71, 54, 9, 71, 71], 2e-3, 2, 4
FAST = {"depth": 3, "interval": EVERY, "lr": RATE, "rank": RANK}
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)


class Recording(RecordsRounds, find(NAME)):
    """Records the text before each round, and what was drafted."""


class TrainedByHand:
    """The library's network of the draft, trained with AdamW as its paper writes it, from whole forwards."""

    def __init__(self, scope: str):
        self.target, self.draft, self.ends = network("llama"), network("llama"), pair().target.end_ids
        self.draft.load_state_dict(pair().draft.network.state_dict())
        self.draft.requires_grad_(False)
        if scope == "all":
            self.leaves = {name: weight for name, weight in self.draft.named_parameters() if weight.ndim == 2}
        else:
            self.leaves = untrained_lora(DifferentiableLlama(pair().draft.fused), RANK)
        self.leaves = {name: leaf.clone().requires_grad_() for name, leaf in self.leaves.items()}
        self.moments = {name: [torch.zeros_like(leaf)] * 2 for name, leaf in self.leaves.items()}
        self.scope, self.time, self.seen = scope, 0, []

    def weights(self) -> dict[str, torch.Tensor]:
        if self.scope == "all":
            return self.leaves
        own, changed = dict(self.draft.named_parameters()), {}
        for index in range(self.draft.config.num_hidden_layers):
            for kind, parts in zip(("qkv", "out"), PARTS):
                names = [f"model.layers.{index}.{part}.weight" for part in parts]
                whole = self.leaves[f"{kind}.{index}.down"] @ self.leaves[f"{kind}.{index}.up"]
                for name, part in zip(names, whole.T.split([len(own[name]) for name in names])):
                    changed[name] = own[name] + part
        return changed

    def logits(self, text: list[int]) -> torch.Tensor:
        given = {"input_ids": torch.tensor([text]), "use_cache": False}
        return functional_call(self.draft, self.weights(), (), given).logits[0, -1]

    @torch.no_grad()
    def chain(self, text: list[int], length: int) -> list[int]:
        path: list[int] = []
        for _ in range(length):
            path.append(int(self.logits(text + path).argmax()))
            if path[-1] in self.ends:
                break
        return path

    def observe(self, text: list[int], path: list[int], after: list[int]) -> None:
        """Learn from the first draft token that is not in the text after the round."""
        accepted = next((i for i, token in enumerate(path) if after[len(text) + i] != token), None)
        if accepted is None:
            return
        self.seen.append(text + path[:accepted])
        if len(self.seen) == EVERY:
            self._step()
            self.seen = []

    def _step(self) -> None:
        with torch.no_grad():
            p = [self.target(input_ids=torch.tensor([text])).logits[0, -1].softmax(-1) for text in self.seen]
        loss = -sum((row * self.logits(text).log_softmax(-1)).sum() for row, text in zip(p, self.seen)) / EVERY
        gradients = torch.autograd.grad(loss, list(self.leaves.values()))
        norm = torch.stack([each.square().sum() for each in gradients]).sum().sqrt()
        self.time += 1
        for (name, leaf), gradient in zip(self.leaves.items(), gradients):
            gradient = gradient * min(1.0, 1 / float(norm + 1e-6))
            first, second = self.moments[name]
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            self.moments[name] = [first, second]
            scaled = first / (1 - 0.9**self.time), second / (1 - 0.999**self.time)
            leaf.data -= RATE * scaled[0] / (scaled[1].sqrt() + 1e-8)


def mistaken(drafter, length: int = 26) -> bool:
    """Whether the draft of some round differs from the one computed anew."""
    models, draft = pair(noise=0.2), TrainedByHand(drafter.scope)
    draft.draft.load_state_dict(models.draft.network.state_dict())
    if drafter.scope == "all":
        for name, weight in models.draft.network.named_parameters():
            if name in draft.leaves:
                draft.leaves[name].data.copy_(weight)
    lane = write(speculation(drafter), {"target": models.target, "draft": models.draft}, PROMPT, Limits(3, length),
                 Draws(3))
    assert drafter._training.learned.updates > 1, "too few updates to prove anything"
    return departs(drafter, lane.tokens, draft)


class LearnsTheRowAfter(Recording):
    """Wrong: the row after the rejected token is trained, as in the released code."""

    def _store(self, rows, node):
        super()._store(rows, node)
        last = self._waiting.pop()
        self._waiting.append(last._replace(place=last.place - 1))


class NeverReads(Recording):
    """Wrong: the draft goes on with the weights that were loaded."""

    def _learn(self, lm):
        loss = self._training.learn([self._lesson(lm)], self.lr)
        lm.read_with("draft", self._training._loaded)
        return loss


@pytest.mark.slow
@pytest.mark.oracle("online_speculative")
@pytest.mark.parametrize("scope", ["all", "lora"])
def test_every_draft_is_that_of_a_network_trained_by_hand(scope):
    assert not mistaken(Recording(scope=scope, **FAST))


@pytest.mark.refuses("online_speculative")
@pytest.mark.parametrize("wrong", [LearnsTheRowAfter, NeverReads])
def test_training_another_row_and_drafting_with_the_old_weights_are_detected(wrong):
    assert mistaken(wrong(scope="all", **FAST))


# --- the output distribution, whatever is learned ---

class TurnsIntoAnother:
    """In place of a training: after every update the draft is another random model."""

    def __init__(self, lm, strategy, loaded, *about):
        self.model, self.learned, self._letters = loaded, SimpleNamespace(updates=0), loaded.letters

    def learn(self, lessons, rate):
        self.learned.updates += 1
        self.model = TableModel(self._letters, seed=90 + self.learned.updates)
        return 0.0

    def logits(self, tokens, places):
        return torch.zeros(len(places), len(self._letters), dtype=torch.float64)


class ClaimsTheOldQ(find(NAME)):
    """Wrong: tokens of the changed draft are verified against the q of the one that was loaded."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        for node, parent in enumerate(tree.parents):
            context = (*lm.tokens, *(tree.prefix(parent) if parent >= 0 else ()))
            tree.q[node] = TableModel(self._training._letters, seed=1).scores(context).softmax(-1)
        return tree


@pytest.fixture
def changing(monkeypatch):
    monkeypatch.setattr(online_speculative, "DraftTraining", TurnsIntoAnother)
    monkeypatch.setattr(online_speculative, "untrainable", lambda model, scope: "")


@pytest.mark.slow
@pytest.mark.strategy("online_speculative")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets_though_the_draft_changes_within_the_text(changing, verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, depth=1, interval=1, positions="tested")
    assert off(lane, tables("ab"), [0, 1, 0], 3) < EXACT


@pytest.mark.slow
@pytest.mark.refuses("online_speculative")
def test_verifying_against_the_q_of_the_loaded_draft_changes_the_distribution(changing):
    drafter = ClaimsTheOldQ(depth=1, interval=1, positions="tested")
    assert off(speculation(drafter, AT_ONE), tables("ab"), [0, 1, 0], 3) > WRONG


# --- copies, memory, limits ---

def test_the_loaded_draft_stays_as_it_was_and_two_visitors_learn_apart():
    models, memories = pair(noise=0.2), (Memory(), Memory())
    before = [tensor.clone() for tensor in models.draft.network.parameters()]
    for memory in (memories[0], *memories):
        session = prepare(Models(models.target, models.draft), [speculative_lane(NAME, "greedy_match", **FAST)],
                          Prompt("ab"), Limits(0, 16), memory=memory)
        list(session)
    assert all(torch.equal(one, other) for one, other in zip(before, models.draft.network.parameters()))
    (first,), (second,) = (memory._things.values() for memory in memories)
    assert first.updates > second.updates > 0 and first.digest() != second.digest()


def test_learned_weights_are_copied_with_their_optimiser():
    learned = LearnedWeights({"w": torch.ones(2, 3)})
    memory = Memory()
    memory.keep("draft", learned)
    copies = [memory.recall("draft", dict) for _ in range(2)]
    for _ in range(3):
        copies[0].step(copies[0].tensors["w"].square().sum(), 0.1)
    assert torch.equal(learned.tensors["w"], copies[1].tensors["w"]) and copies[0].digest() != learned.digest()
    assert float(copies[0].tensors["w"].detach().mean()) == pytest.approx(0.7, abs=0.01), "three steps of 0.1"


def test_a_draft_that_cannot_be_trained_learns_a_correction_and_says_so(monkeypatch):
    monkeypatch.setattr(pair().draft, "fused", None)  # as of a quantised draft
    events = recorded(speculative_lane(NAME, "greedy_match", interval=1), length=6)[1]
    (note,) = [event.text for event in events if isinstance(event, Note) and "cannot be trained" in event.text]
    assert "Here only a correction" in note


def test_a_draft_with_too_many_weights_is_not_trained(monkeypatch):
    monkeypatch.setitem(draft_training.MOST_WEIGHTS, "all", 10)
    assert "at most 10 are trained" in draft_training.untrainable(pair().draft, "all")
    assert not draft_training.untrainable(pair().draft, "lora")


# --- kinds of questions ---

def test_questions_are_routed_to_the_kind_they_resemble():
    kinds, chance = QueryKinds(), torch.Generator().manual_seed(0)
    centres = torch.randn(3, 16, generator=chance)
    prompts = [centres[number % 3] + 0.1 * torch.randn(5, 16, generator=chance) for number in range(12)]
    assert [kinds.route(prompt, 3) for prompt in prompts] == [0, 1, 2] * 4
    assert kinds.route(-centres[0][None], 3) in (0, 1, 2), "no fourth kind"
    assert len(kinds) == 3 and sum(kinds.counts) == 13


def test_what_was_learned_from_one_kind_is_not_used_for_another():
    memory, models = Memory(), pair(noise=0.2)
    lane = speculative_lane(NAME, "greedy_match", kinds=4, **FAST)
    for text in ("aaaa", "{}[]", "aaaa"):
        list(prepare(Models(models.target, models.draft), [lane], Prompt(text), Limits(0, 12), memory=memory))
    learned = [thing for thing in memory._things.values() if isinstance(thing, LearnedWeights)]
    assert len(learned) == 2 and learned[0].digest() != learned[1].digest()
