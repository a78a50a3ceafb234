"""A draft with another tokenizer: its draft is re-tokenised for the target, and the output distribution stays the
target's.
"""
from __future__ import annotations

from math import prod

import pytest
import torch
from registry import Collapse
from tables import TableModel, distance, product_law

from playground.contract import find, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.events import Draft, Verdict
from strategies.speculative.omnidraft import Spellings
from support.laws import AT_ONE, EXACT, WRONG
from support.online_drafting import collapses, figures, speculation, speculative_lane
from support.speculation import GREEDY
from support.two_tokenizers import crossed, law_between, speaking, strangers

CHAIN = speculative_lane("draft_model", AT_ONE, depth=3)
COLLAPSES = {
    "omnidraft": [
        *collapses(lambda *added: speculative_lane("omnidraft", *added, depth=0)),
        Collapse(speculative_lane("omnidraft", AT_ONE, depth=3, lr=0.0), CHAIN),
        Collapse(speculative_lane("omnidraft", AT_ONE, depth=3, lr=0.0, longest=1), CHAIN),
    ],
}


# --- two models with different tokens ---

class Knowing(find("omnidraft")):
    """Knows some translations beforehand, right and wrong ones."""

    recorded = {(0, 1): 2, (1, 0): 2, (0, 0, 1): 1}

    def _begin(self, lm):
        super()._begin(lm)
        self._spellings.known.update(self.recorded)


class Nested(Knowing):
    """Knows translations of which one is a prefix of another."""

    recorded = {(0, 1): 2, (0, 1, 0): 1}


class NestedAlike(Knowing):
    """Knows two translations of one token, one a prefix of the other."""

    recorded = {(0, 1): 2, (0, 1, 0): 2}


class NestedDeeply(Knowing):
    """Knows runs that are nested prefixes three deep, and others that begin within them."""

    recorded = {(0, 1): 2, (0, 1, 0): 1, (0, 1, 1): 2, (1, 0): 2, (1, 0, 1): 0, (1, 1): 0}


class DraftsEverySpellingOfAToken(NestedAlike):
    """Two children with one token: the shorter run is reached only if the longer one was not sampled."""

    def _merges(self, tokens):
        return list(self._spellings.beginnings(tokens, self.longest))


class DraftsTheLongestRunAlone(Nested):
    """Whether a run gives a node depends on the tokens sampled after it, so below that node q is biased."""

    def _begin(self, lm):
        super()._begin(lm)
        known = self._spellings.beginnings
        self._spellings.beginnings = lambda tokens, most: list(known(tokens, most))[:1]


class InPlace(Knowing):
    """The paper's rule: the merged draft token replaces the first of its run, with the product of the probabilities of
    the run.
    """

    def merged(self, run):
        tree, self._runs, at, parent = TokenTree(run.source, run.drawn), [], 0, ROOT
        while at < len(run):
            token, length = next(self._spellings.beginnings(run.tokens[at:], self.longest), (run.tokens[at], 1))
            share, q = prod(run.confidence[at:at + length]), run.q[at].clone()
            if length > 1:
                q[run.tokens[at]] -= share
                q[token] += share
            parent = self._add(tree, run.tokens[at:at + length], tree.add(token, parent, q))
            at += length
        return tree


class MergedFirst(Knowing):
    """Tests the merged draft token before the sampled one it contains."""

    def merged(self, run):
        tree = super().merged(run)
        tree.order = sorted(tree.order, key=lambda node: (tree.parents[node], tree.q[node] is not None))
        return tree


def nearly_certain() -> dict[str, TableModel]:
    """Few courses of chance: the draft says "ab" for certain, then draws; the target draws two tokens, then writes "a".
    """
    even, a, b = ([0.5, 0.5], [0.0, 1.0], [1.0, 0.0])

    def draft(context):
        return torch.tensor([a, b, even, a][min(len(context) - 1, 3)], dtype=torch.float64).log()

    def target(context):
        return torch.tensor([0.3, 0.2, 0.5] if len(context) < 3 else [1.0, 0.0, 0.0], dtype=torch.float64).log()

    return {"target": speaking(["a", "b", "ab"], rule=target), "draft": speaking(["b", "a"], rule=draft)}


def check_nested(drafter: type[Nested]) -> None:
    models = nearly_certain()
    found = law_between(speculation(drafter(depth=3), AT_ONE), models, [0], 4)
    assert distance(found, product_law(models["target"], [0], 4)) < EXACT


@pytest.mark.oracle("omnidraft")
@pytest.mark.parametrize("drafter", [Nested, NestedAlike, NestedDeeply])
def test_the_output_distribution_is_the_targets_if_one_translation_is_a_prefix_of_another(drafter):
    check_nested(drafter)


@pytest.mark.oracle("omnidraft")
@pytest.mark.parametrize("seed", [0, 3])
def test_the_output_distribution_is_the_targets_for_random_models_with_nested_translations(seed):
    models = strangers(seed)
    for drafter in (Nested, NestedAlike, NestedDeeply):
        found = law_between(speculation(drafter(depth=3), AT_ONE), models, [0, 1, 0], 2)
        assert distance(found, product_law(models["target"], [0, 1, 0], 2)) < EXACT


@pytest.mark.refuses("omnidraft")
@pytest.mark.parametrize("wrong", [DraftsTheLongestRunAlone, DraftsEverySpellingOfAToken])
def test_drafting_a_translation_only_if_no_longer_one_was_sampled_changes_the_distribution(wrong):
    with pytest.raises(AssertionError, match="distance"):
        check_nested(wrong)


@pytest.mark.slow
@pytest.mark.oracle("omnidraft")
@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_output_distribution_is_the_targets_whatever_translations_are_known(verifier, longest):
    for drafter in (make("omnidraft", depth=3, longest=longest), Knowing(depth=3, longest=longest)):
        models = strangers()
        found = law_between(speculation(drafter, AT_ONE, verifier=verifier), models, [0, 1, 0], 3)
        assert distance(found, product_law(models["target"], [0, 1, 0], 3)) < EXACT


@pytest.mark.slow
def test_the_output_distribution_is_the_targets_at_text_ends_and_with_a_sampler():
    models = strangers(seed=4, ends=True)
    found = law_between(speculation(Knowing(depth=2), AT_ONE), models, [0, 1], 3)
    assert distance(found, product_law(models["target"], [0, 1], 3)) < EXACT
    found = law_between(speculation(Knowing(depth=2), ("temperature", {"t": 0.5})), models, [0, 1], 2)
    assert distance(found, product_law(models["target"], [0, 1], 2, lambda scores, history: scores / 0.5)) < EXACT


@pytest.mark.refuses("omnidraft")
@pytest.mark.parametrize("wrong", [InPlace, MergedFirst])
def test_a_wrong_position_of_the_merged_draft_token_is_detected(wrong):
    models = strangers()
    found = law_between(speculation(wrong(depth=2), AT_ONE), models, [0, 1, 0], 3)
    assert distance(found, product_law(models["target"], [0, 1, 0], 3)) > WRONG


@pytest.mark.parametrize("drafter", [make("omnidraft"), Knowing(depth=5)], ids=["learning", "misled"])
def test_greedily_the_text_is_the_targets_own(drafter):
    kinds = set()
    for seed in range(8):
        models = strangers(seed, ends=seed % 2 == 1)
        plain, _ = crossed(GREEDY, models, [0, 1], 20)
        lane, recorded = crossed(speculation(drafter), models, [0, 1], 20)
        assert lane.tokens == plain.tokens
        kinds |= {test.kept for event in recorded if isinstance(event, Verdict) for test in event.tests}
    assert kinds == {True, False}, "guesses that all stand or all fall prove nothing"


def agreeing() -> dict[str, TableModel]:
    """Both write abababab: the target in pairs, the draft letter by letter."""
    def target(context):
        return torch.tensor([0.0, 0.0, 5.0], dtype=torch.float64)

    def draft(context):
        return torch.tensor([5.0, 0.0] if context[-1] == 1 else [0.0, 5.0], dtype=torch.float64)

    return {"target": speaking(["a", "b", "ab"], rule=target), "draft": speaking(["b", "a"], rule=draft)}


def test_draft_tokens_that_spell_a_target_token_are_learned_and_merged_from_then_on():
    lane, recorded = crossed(speculative_lane("omnidraft", depth=4), agreeing(), [0, 1], 9)
    assert lane.tokens[2:] == [2] * 9
    firsts, verdicts = (
        [[draft.tokens[:1], draft.parents.count(-1)] for draft in recorded if isinstance(draft, Draft)],
        [e for e in recorded if isinstance(e, Verdict)],
    )
    assert firsts[0] == [[0], 1] and firsts[1] == [[0], 2], "the first round knows no spelling, the second does"
    assert [len(verdict.kept) for verdict in verdicts[:3]] == [0, 2, 2]
    assert figures(recorded, "known spellings")[-1]["series"] == {"spellings": 1}
    assert figures(recorded, "runs merged into one token")[0]["spans"] == [[1, 2, "a + b", 2], [2, 3, "a + b", 2]]


def test_without_merging_only_common_tokens_are_drafted():
    lane, recorded = crossed(speculative_lane("omnidraft", depth=4, longest=1), agreeing(), [0, 1], 5)
    assert lane.tokens[2:] == [2] * 5 and not [e for e in recorded if isinstance(e, Verdict) and e.kept]


def test_every_translation_of_a_chain_is_in_the_tree():
    drafter = Knowing(depth=4)
    drafter._spellings, run = Spellings(), TokenTree()
    drafter._spellings.known = {(0, 1): 2}
    for token in (0, 1, 0, 1):
        run.add(token, len(run) - 1)
    tree = drafter.merged(run)
    leaves = {tuple(tree.prefix(node)) for node in range(len(tree)) if node not in tree.parents}
    assert leaves == {(0, 1, 0, 1), (0, 1, 2), (2, 0, 1), (2, 2)}
    assert len({tuple(tree.prefix(node)) for node in range(len(tree))}) == len(tree)


def test_learned_translations_are_reused_in_the_next_run_of_the_same_pair():
    memory, series = Memory(), []
    models, prompt = Models(*agreeing().values()), Prompt("ab")
    for _ in range(2):
        session = prepare(models, [speculative_lane("omnidraft", depth=4)], prompt, Limits(0, 9), memory=memory)
        series.append([stamped.event for stamped in session])
    first = [[event for event in recorded if isinstance(event, Verdict)][0] for recorded in series]
    assert [len(verdict.kept) for verdict in first] == [0, 2]
