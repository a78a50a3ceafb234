"""Verifiers and the decoder against the target's distribution, brute force, and the library's assisted generation."""
from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from pairs import network, pair
from tables import TableModel, distance, law, product_law, write

from playground.algorithms.speculative.speculative_loop import rounds
from playground.algorithms.speculative.verification import Ruling, match, reject, walk
from playground.contract import Drafter, Verifier, find, make
from playground.contract.lane_config import Assembly
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.sampling import one_hot, residual_distribution
from playground.events import Verdict
from support.speculation_oracles import AT_ONE, EXACT, NAMES, Recording, argmax, assert_refused, speculation, tables

PROMPT = [0, 1, 0]
CHAIN, SIBLINGS = make("draft_model", depth=2), make("draft_model", depth=1, width=2)


# --- verifiers: the text follows the target's distribution, whatever was drafted ---

def check_law(verifier: Verifier, drafter: Drafter) -> None:
    models = tables()
    found = law(speculation(drafter, verifier, AT_ONE), models, PROMPT, 2)
    assert distance(found, product_law(models["target"], PROMPT, 2)) < EXACT


class RedrawsFromTarget(find("rejection")):
    """A rejected token is resampled from p, not from the residual max(p - q, 0)."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position = rows.distribution(node), rows.position(node)
            return reject(p, children, tree, lambda ratio: lm.flip(ratio, position),
                          lambda rest: lm.draw(p, position, "redraw"))

        return walk(lm, tree, rows, rule)


class SwapsTheRatio(find("rejection")):
    """Accepts with min(1, q / p)."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position, (child, *_) = rows.distribution(node), rows.position(node), children
            q, token = tree.q[child], tree.tokens[child]
            if lm.flip(min(1.0, float(q[token] / p[token])), position)[0]:
                return Ruling(child)
            return Ruling(None, lm.draw(residual_distribution(p, q), position, "redraw"))

        return walk(lm, tree, rows, rule)


class ComparesEverySiblingWithTheTarget(find("rejection")):
    """Tests the second sibling against p in place of the residual that the first rejection left."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position, rest = rows.distribution(node), rows.position(node), rows.distribution(node)
            for child in children:
                token, q = tree.tokens[child], tree.q[child]
                if lm.flip(min(1.0, float(p[token] / q[token])), position)[0]:
                    return Ruling(child)
                rest = residual_distribution(rest, q)
            return Ruling(None, lm.draw(rest, position, "redraw"))

        return walk(lm, tree, rows, rule)


class DrawsAgainAfterAMiss(find("sample_match")):
    """Discards the sampled token if no child proposed it, and samples another."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            ruling = match(lm.pick(rows, node).token, children, tree, rows.distribution(node))
            return ruling if ruling.child is not None else Ruling(None, lm.pick(rows, node, "again").token)

        return walk(lm, tree, rows, rule)


class MatchesTheMostProbable(find("sample_match")):
    """Takes the most probable token although tokens are sampled."""

    def judge(self, lm, tree, rows):
        return walk(
            lm, tree, rows, lambda node, children: match(rows.best(node), children, tree, rows.distribution(node))
        )


class DividesByNothing(find("k_seq")):
    """rho = 1 however many rows drafted, and the residual of a single one."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position, q = rows.distribution(node), rows.position(node), tree.q[children[0]]
            for child in children:
                token = tree.tokens[child]
                if lm.flip(min(1.0, float(p[token] / q[token])), position)[0]:
                    return Ruling(child)
            return Ruling(None, lm.draw(residual_distribution(p, q), position, "redraw"))

        return walk(lm, tree, rows, rule)


@pytest.mark.oracle("rejection")
@pytest.mark.parametrize("drafter", [CHAIN, SIBLINGS, make("rsd_c", branching="2")],
                         ids=["chain", "independent siblings", "distinct siblings"])
def test_rejection_keeps_the_targets_distribution(drafter):
    check_law(make("rejection"), drafter)


@pytest.mark.refuses("rejection")
@pytest.mark.parametrize("wrong", [RedrawsFromTarget, SwapsTheRatio, ComparesEverySiblingWithTheTarget], ids=NAMES)
def test_a_wrong_rejection_rule_has_another_distribution(wrong):
    assert_refused(check_law, wrong(), SIBLINGS)


@pytest.mark.oracle("sample_match")
@pytest.mark.parametrize("drafter", [CHAIN, SIBLINGS], ids=["chain", "siblings"])
def test_sample_and_match_keeps_the_targets_distribution(drafter):
    check_law(make("sample_match"), drafter)


@pytest.mark.refuses("sample_match")
@pytest.mark.parametrize("wrong", [DrawsAgainAfterAMiss, MatchesTheMostProbable], ids=NAMES)
def test_a_wrong_match_has_another_distribution(wrong):
    assert_refused(check_law, wrong(), CHAIN)


@pytest.mark.oracle("k_seq")
def test_k_seq_keeps_the_targets_distribution():
    check_law(make("k_seq"), make("spectr", rows=2, length=2))


@pytest.mark.refuses("k_seq")
def test_k_seq_without_its_divisor_has_another_distribution():
    assert_refused(check_law, DividesByNothing(), make("spectr", rows=2, length=2))


# --- greedy match: the longest path of argmaxes, found by looking at every node ---

class Scattered(Drafter):
    """Trees of random shape and tokens; siblings differ."""

    drawn = "deterministic"

    def __init__(self, seed: int, size: int = 9):
        self.chance, self.size = Random(seed), size

    def propose(self, lm, budget):
        yield from ()
        tree, places = TokenTree("scattered"), set()
        for _ in range(self.size):
            place = (self.chance.randrange(-1, len(tree)), self.chance.randrange(lm.vocabulary))
            if place not in places and len(tree.path(place[0])) < budget:
                places.add(place)
                tree.add(place[1], place[0])
        return tree


def longest_path_of_argmaxes(model: TableModel, text: list[int], tree: TokenTree) -> list[int]:
    """Tokens of the deepest node that greedy decoding would pass through, and the token after it."""
    paths = [[], *(tree.prefix(node) for node in range(len(tree)))]
    right = [path for path in paths if all(argmax(model, text + path[:i]) == token for i, token in enumerate(path))]
    longest = max(right, key=len)
    return [*longest, argmax(model, text + longest)]


def check_greedy_match(verifier: type[Verifier]) -> None:
    accepted = 0
    for seed in range(4):
        model, seen = TableModel("abc", seed=seed), Recording(verifier())
        write(speculation(Scattered(seed), seen), {"target": model}, PROMPT, Limits(0, 30), Draws(0))
        for text, tree, verdict in seen.rounds:
            tokens = [*(tree.tokens[node] for node in verdict.kept), verdict.token]
            assert tokens == longest_path_of_argmaxes(model, text, tree)
            accepted += len(verdict.kept)
    assert accepted > 20, "too few draft tokens were accepted to prove anything"


class LooksAtTheFirstSibling(find("greedy_match")):
    def judge(self, lm, tree, rows):
        def rule(node, children):
            return match(rows.best(node), children[:1], tree, one_hot(rows.best(node), rows.raw[0]))

        return walk(lm, tree, rows, rule)


class AcceptsTheRunnerUp(find("greedy_match")):
    """A draft token is accepted if it is among the two most probable tokens."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            two = rows.raw[rows.row(node)].topk(2).indices.tolist()
            found = next((token for token in two if token in [tree.tokens[child] for child in children]), two[0])
            return match(found, children, tree, one_hot(found, rows.raw[0]))

        return walk(lm, tree, rows, rule)


@pytest.mark.oracle("greedy_match")
def test_greedy_match_accepts_the_longest_path_of_argmaxes():
    check_greedy_match(find("greedy_match"))


@pytest.mark.refuses("greedy_match")
@pytest.mark.parametrize("wrong", [LooksAtTheFirstSibling, AcceptsTheRunnerUp], ids=NAMES)
def test_a_wrong_greedy_match_is_detected(wrong):
    assert_refused(check_greedy_match, wrong)


# --- the decoder: text and passes are those of the library's assisted generation ---

LONG = [54, 71, 71, 54, 9, 71, 71, 200, 13, 54, 80]


@cache
def library_assisted(length: int, depth: int) -> tuple[list[int], int]:
    """Text that transformers writes with an assistant model, and the passes of the target it takes."""
    target, draft = network("llama"), network("llama")
    draft.load_state_dict(pair().draft.network.state_dict())
    for model in (target, draft):
        model.generation_config.eos_token_id = None
    draft.generation_config.num_assistant_tokens = depth
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    passes = []
    target.register_forward_hook(lambda *call: passes.append(1))
    ids = torch.tensor([LONG])
    ids = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=length,
                          do_sample=False)
    return ids[0].tolist(), len(passes)


def check_assisted(decoder: type) -> None:
    """The prompt has a pass of its own here; the library reads it together with the first draft tokens."""
    expected, passes = library_assisted(40, 4)
    seen = Recording(make("rejection"))
    assembly = Assembly(decoder(drafter=make("draft_model", depth=4), verifier=seen))
    lane = write(assembly, {"target": pair().target, "draft": pair().draft}, LONG, Limits(0, 40), Draws(0))
    assert lane.tokens == expected and len(seen.rounds) == passes


class BelievesTheDraft(Verifier):
    """Accepts all draft tokens of a chain and takes the target's token after them."""

    def __init__(self, recorded: Verifier):
        self.recorded = recorded

    def judge(self, lm, tree, rows):
        self.recorded.judge(lm, tree, rows)
        return Verdict(kept=list(range(len(tree))), token=rows.best(len(tree) - 1))


class AcceptsOneAtMost(Verifier):
    """The text is right, but every round discards accepted tokens."""

    def __init__(self, recorded: Verifier):
        self.recorded = recorded

    def judge(self, lm, tree, rows):
        verdict = self.recorded.judge(lm, tree, rows)
        return Verdict(kept=verdict.kept[:1], token=rows.best(verdict.kept[0])) if verdict.kept[1:] else verdict


class WithoutVerification(find("speculative")):
    def decode(self, lm):
        yield from rounds(lm, self.drafter, BelievesTheDraft(self.verifier))


class Wasteful(find("speculative")):
    def decode(self, lm):
        yield from rounds(lm, self.drafter, AcceptsOneAtMost(self.verifier))


@pytest.mark.slow
@pytest.mark.oracle("speculative")
def test_speculation_writes_the_librarys_text_in_as_many_forwards():
    check_assisted(find("speculative"))


@pytest.mark.refuses("speculative")
@pytest.mark.parametrize("wrong", [WithoutVerification, Wasteful], ids=NAMES)
def test_a_wrong_round_differs_from_the_library_in_text_or_forwards(wrong):
    assert_refused(check_assisted, wrong)
