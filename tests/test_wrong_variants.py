"""For every strategy that guarantees the target's distribution, a wrong variant that the exact test rejects."""
from __future__ import annotations

import pytest
from registry import registered
from tables import TableModel, distance, law, product_law

from playground.contract import Decoder, Verifier, find, make
from playground.contract.assembly import Assembly
from playground.contract.token_tree import ROOT
from playground.events import Verdict
from support.early_exits import EarlyTable
from support.laws import AT_ONE, EXACT, WRONG, Judged, Siblings, draws_again_after_a_miss, independent, redraws_from_p
from support.speculation import Judged as JudgedByNumbers
from support.speculation import divided_by


class ReadsOneRowTwice(Decoder):
    """Draws two tokens from one row: the second does not know of the first."""

    def decode(self, lm):
        rows = yield lm.prefill()
        while True:
            yield lm.keep(lm.pick(rows))
            yield lm.keep(lm.pick(rows, purpose="again"))
            rows = yield lm.extend()


class BelievesAll(Verifier):
    """Accepts every first child, and asks the target only for the token after the last."""

    def judge(self, lm, tree, rows):
        path, node = [], ROOT
        while not rows.unread(node) and (children := tree.children(node)):
            node = children[0]
            path.append(node)
        return Verdict(kept=path, token=-1 if rows.unread(node) else lm.pick(rows, node).token)


class WeighsEachTokenAlone(find("block_verification")):
    """Ignores what the tokens before contribute to the joint weight."""

    def worth(self, block):
        return [1.0, *(min(1.0, float(p[t] / q[t])) for t, p, q in zip(block.tokens, block.p, block.q))]


class TakesEveryDraftTokenTwice(find("exact_transport")):
    """As if every token had been drafted by two sequences."""

    def _transported(self, lm, tree, children, p, position):
        return super()._transported(lm, tree, [*children, *children], p, position)


ANYWHERE = {"smartspec": {"costs": "simulated"}}  # knobs with which it drafts on every machine


def rounds(name: str, drafter, verifier) -> Assembly:
    decoder = make(name, **ANYWHERE.get(name, {}))
    decoder.verifier = verifier
    if drafter:  # some define their own draft tokens
        decoder.drafter = drafter
    return Assembly(decoder, [make(AT_ONE[0], **AT_ONE[1])])


VARIANTS = {
    "sample": Assembly(ReadsOneRowTwice(), [make(AT_ONE[0], **AT_ONE[1])]),
    "speculative": rounds("speculative", make("draft_model", depth=2), BelievesAll()),
    "block_verification": rounds("speculative", make("draft_model", depth=2), WeighsEachTokenAlone()),
    "rejection": rounds("speculative", Siblings(independent), Judged(redraws_from_p)),
    "sample_match": rounds("speculative", Siblings(independent), Judged(draws_again_after_a_miss)),
    "exact_transport": rounds("speculative", make("spectr", rows=2), TakesEveryDraftTokenTwice()),
    "k_seq": rounds("speculative", make("spectr", rows=2), JudgedByNumbers(divided_by(lambda k: 1.0))),
    "layer_skip": rounds("layer_skip", make("layer_skip_draft", depth=2), BelievesAll()),
    "pearl": rounds("pearl", None, BelievesAll()),
    "smartspec": rounds("smartspec", make("draft_model", depth=2), BelievesAll()),
}


def test_every_strategy_that_promises_the_law_has_a_wrong_variant():
    assert VARIANTS.keys() == {cls.name for cls in registered(promising="distribution_identical")}


def off(assembly: Assembly) -> float:
    """Distance of the distribution of three tokens from the target's; its early exit and its draft have their own
    preferences.
    """
    models, prompt = {"target": EarlyTable("ab"), "draft": TableModel("ab", seed=1)}, [0, 1, 0]
    return distance(law(assembly, models, prompt, 3), product_law(TableModel("ab"), prompt, 3))


@pytest.mark.parametrize("assembly", VARIANTS.values(), ids=VARIANTS)
def test_a_wrong_variant_is_found_out(assembly):
    assert off(assembly) > WRONG


@pytest.mark.parametrize(
    "name, drafter", [("speculative", "draft_model"), ("layer_skip", "layer_skip_draft"), ("smartspec", "draft_model")]
)
def test_the_right_ones_pass_where_the_wrong_ones_fail(name, drafter):
    assert off(rounds(name, make(drafter, depth=2), make("rejection"))) < EXACT


def test_pearl_passes_with_the_right_verifier():
    assert off(rounds("pearl", None, make("rejection"))) < EXACT
