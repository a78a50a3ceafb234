"""OmniDraft's online distillation: the loss by its definition, every draft by hand, and the law whatever is learned."""
from __future__ import annotations

from math import e, log

import pytest
import torch
from drafting_runs import recorded
from pairs import pair
from tables import distance, product_law

from playground.contract import find
from playground.events import Commit, Event, Figure
from strategies.speculative import omnidraft
from strategies.speculative.omnidraft import DraftedChain
from support.laws import AT_ONE, EXACT, WRONG
from support.online_drafting import speculation, speculative_lane
from support.speculation import GREEDY
from support.two_tokenizers import crossed, law_between, speaking, strangers

OmniDraft = find("omnidraft")
FAST = {"depth": 3, "interval": 2, "lr": 2e-3, "scope": "all"}


# --- the loss ---

def by_definition(q_logits, p_logits, pairs, drafted, accepted, weight) -> float:
    """Sums over tokens: KL(q' || p) over common tokens, and the surprise at tokens of accepted runs."""
    total = 0.0
    for row, target in zip(q_logits.tolist(), p_logits.tolist()):
        whole = sum(e**row[theirs] for _, theirs in pairs)
        everything = sum(e**logit for logit in target)
        for ours, theirs in pairs:
            q, p = e**row[theirs] / whole, e**target[ours] / everything
            total += q * log(q / p) / len(q_logits)
    for place in accepted:
        row = q_logits[place].tolist()
        whole = sum(e**row[theirs] for _, theirs in pairs)
        total -= weight * log(e ** row[drafted[place]] / whole)
    return total


@pytest.mark.oracle("omnidraft")
@pytest.mark.parametrize("accepted", [[], [1, 2]])
def test_the_loss_is_the_reverse_divergence_over_common_tokens_and_the_surprise_at_accepted_runs(accepted):
    chance = torch.Generator().manual_seed(0)
    rows, target = torch.randn(3, 5, generator=chance).double(), torch.randn(3, 6, generator=chance).double()
    pairs, drafted = [(0, 3), (4, 1), (5, 0)], [3, 0, 1]
    chain = DraftedChain([2, 4, *drafted], 3, target, accepted)
    expected = by_definition(rows, target, pairs, drafted, accepted, 0.2)
    assert float(chain.lesson(torch.tensor(pairs).T, 0.2).loss(rows)) == pytest.approx(expected)
    swapped = DraftedChain([2, 4, *drafted], 3, target.flip(0), accepted)
    wrong = float(swapped.lesson(torch.tensor(pairs).T, 0.2).loss(rows))
    assert wrong != pytest.approx(expected), "rows of other positions are noticed"


def test_the_rows_that_count_predict_the_chain():
    lesson = DraftedChain([7, 8, 9, 1, 2], 2, torch.zeros(2, 3), []).lesson(torch.tensor([[0], [1]]), 0.2)
    assert (lesson.tokens, lesson.places) == ([7, 8, 9, 1], [2, 3])


# --- what the draft reads and learns ---

class TurnsIntoAnother:
    """In place of a training: after every update the draft is another random model with the same tokens."""

    def __init__(self, lm, strategy, loaded, *about):
        self.model, self.letters, self.updates = loaded, loaded.letters, 0

    def learn(self, lessons, rate):
        self.updates += 1
        self.model = speaking(self.letters, seed=70 + self.updates)
        return 0.0


@pytest.fixture
def changing(monkeypatch):
    monkeypatch.setattr(omnidraft, "DraftTraining", TurnsIntoAnother)
    monkeypatch.setattr(omnidraft, "untrainable", lambda model, scope: "")


class Watched(OmniDraft):
    """Collects the chains it learns from, with the text before each."""

    def __deepcopy__(self, memo):
        return self  # so that the test sees what it collects

    def propose(self, lm, budget):
        self.text = list(lm.tokens)
        return (yield from super().propose(lm, budget))

    def _chain(self, tree, rows, verdict):
        chain = super()._chain(tree, rows, verdict)
        self.seen = [*getattr(self, "seen", []), (self.text, chain)]
        return chain


def test_each_chain_has_the_targets_rows_before_its_tokens_accepted_or_not(changing):
    models, drafter = strangers(3), Watched(**FAST)
    crossed(speculation(drafter, AT_ONE), models, [0, 1, 0], 14)
    ours, theirs = (models[name].letters for name in ("target", "draft"))
    rejected = 0
    for text, chain in drafter.seen:
        whole = "".join(ours[token] for token in text)
        read, drafted = chain.tokens[:-chain.length], chain.tokens[len(chain.tokens) - chain.length:]
        assert "".join(theirs[token] for token in read) == whole
        path = [ours.index(theirs[token]) for token in drafted]
        for place in range(chain.length):
            assert torch.equal(chain.target[place], models["target"].scores((*text, *path[:place])))
        rejected += drafter.seen[-1][0][len(text):][:len(path)] != path[:len(drafter.seen[-1][0]) - len(text)]
    assert len(drafter.seen) > 4 and rejected, "chains that were accepted whole prove nothing of rejected tokens"


def written(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Commit) for token in event.ids]


@pytest.mark.slow
def test_a_draft_learns_what_this_target_writes_and_the_text_stays_the_targets():
    models = pair(noise=0.2)
    plain, found = written(recorded(GREEDY, models=models, length=80)[1]), {}
    for lr in (0.0, 3e-3):
        config = speculative_lane("omnidraft", verifier="greedy_match", **{**FAST, "lr": lr})
        events = recorded(config, models=models, length=80)[1]
        assert written(events) == plain
        found[lr] = [event.data["series"]["loss"] for event in events
                     if isinstance(event, Figure) and event.name == "training loss of the draft"]
    assert not found[0.0] and len(found[3e-3]) > 3


# --- the output distribution, whatever is learned ---

class ClaimsTheOldQ(OmniDraft):
    """Wrong: tokens of the changed draft are verified against the q of the one that was loaded."""

    def merged(self, run):
        for node in range(len(run)):
            run.q[node] = torch.full_like(run.q[node], 1 / len(run.q[node]))
        return super().merged(run)


def off(drafter: OmniDraft, verifier: str = "rejection") -> float:
    models = strangers()
    found = law_between(speculation(drafter, AT_ONE, verifier=verifier), models, [0, 1, 0], 3)
    return distance(found, product_law(models["target"], [0, 1, 0], 3))


@pytest.mark.slow
@pytest.mark.strategy("omnidraft")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets_though_the_draft_changes_within_the_text(changing, verifier):
    assert off(OmniDraft(depth=2, interval=1), verifier) < EXACT


@pytest.mark.refuses("omnidraft")
def test_verifying_against_another_q_than_the_changed_drafts_is_detected(changing):
    assert off(ClaimsTheOldQ(depth=1, interval=1)) > WRONG
