"""The guarantees of all strategies that declare them, without a list to maintain; a wrong variant has to fail."""
from __future__ import annotations

import random
from collections import deque
from functools import cache
from itertools import cycle

import pytest
import torch
from architectures import ARCHITECTURES
from pairs import greedy_text, pair
from registry import Collapse, can_be_had, declared, lanes, registered, share, shared_out, title
from tables import TableModel, distance, law, product_law, watch, write
from toys import byte_tokenizer

from playground.algorithms.speculative.verification import Ruling
from playground.contract import Drafter, Verifier, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.sampling import residual_distribution
from playground.trace import metrics
from support.laws import (
    AT_ONE,
    EXACT,
    WRONG,
    Judged,
    Siblings,
    added,
    by_the_book,
    drawing,
    draws_again_after_a_miss,
    independent,
    off,
    redraws_from_p,
    tables,
)

pytestmark = pytest.mark.guarantee
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_neox")
PROMPT = [54, 71, 71, 54, 9, 71, 71]


# --- distribution_identical: the distribution of the text, summed over every random outcome ---


def exact(cornered: bool = False) -> list[LaneConfig]:
    return drawing(lanes("distribution_identical", cornered))


@pytest.mark.matrix
@pytest.mark.parametrize("config", exact(cornered=True), ids=title)
def test_the_distribution_of_two_tokens_is_the_targets(config):
    assert off(config, tables("abc"), [0, 1, 0], 2) < EXACT


@pytest.mark.matrix
@pytest.mark.parametrize("config", exact(cornered=True), ids=title)
def test_the_distribution_over_several_rounds_is_the_targets(config):
    assert off(config, tables("ab"), [0, 1, 0], 3) < EXACT


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("config", exact(), ids=title)
def test_the_distribution_is_the_targets_if_a_text_may_end_early(config):
    assert off(config, tables("ab.", ends="."), [0, 1, 0], 3) < EXACT


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("sampler, part", shared_out(registered("sampler")))
def test_the_distribution_is_the_targets_with_every_sampler(sampler, part):
    for config in share(lanes("distribution_identical", added=(sampler,)), part):
        assert off(*drawing([config]), tables("abc", seed=5), [0, 1, 0], 2) < EXACT, title(config)


@pytest.mark.slow
def test_the_distribution_is_the_targets_if_the_draft_exceeds_the_remaining_length():
    models = {"target": TableModel("abc"), "draft": TableModel("abcd", seed=1)}
    for config in exact():
        assert off(config, models, [0, 1, 0], 2) < EXACT, title(config)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "config", lanes("distribution_identical", added=(("sink_window", {"sinks": 1, "window": 2}),)), ids=title
)
def test_the_distribution_is_that_of_a_target_with_a_window(config):
    models, prompt = tables("ab"), [0, 1, 1]
    found = law(*drawing([config]), models, prompt, 3)
    samplers = assemble(*drawing([config])).samplers

    def seen(scores, history):
        row = history if history == prompt else [history[0], *history[-2:]]  # the prompt itself is read whole
        scores = models["target"].scores(tuple(row))
        for sampler in samplers:
            scores = sampler.apply(scores[None], [history])[0]
        return scores

    assert distance(found, product_law(models["target"], prompt, 3, seen)) < EXACT


@pytest.mark.matrix
@pytest.mark.parametrize(
    "config", lanes("distribution_identical", added=(("choice", {"options": "qz|qx|z"}), AT_ONE)), ids=title
)
def test_under_a_grammar_the_distribution_is_the_targets_among_allowed_tokens(config):
    tokenizer = byte_tokenizer()
    models = {"target": TableModel(tokenizer=tokenizer, seed=3), "draft": TableModel(tokenizer=tokenizer, seed=4)}
    q, x, z = (tokenizer.convert_tokens_to_ids(letter) for letter in "qxz")
    first, second = (models["target"].scores(context).softmax(-1) for context in ((q, q), (q, q, q)))
    chance_of_q = float(first[q] / (first[q] + first[z]))
    chance_of_x = float(second[x] / (second[x] + second[z]))
    by_hand = {(q, x): chance_of_q * chance_of_x, (q, z): chance_of_q * (1 - chance_of_x), (z,): 1 - chance_of_q}
    assert distance(law(config, models, [q, q], 6), by_hand) < EXACT


# --- wrong distributions ---


def takes_children_for_distinct(*case) -> Ruling:
    return by_the_book(*case, drawn="without_replacement")


def takes_children_for_independent(*case) -> Ruling:
    return by_the_book(*case, drawn="independent")


def swaps_p_and_q(lm, tree, rows, node, children) -> Ruling:
    p, (child, *_) = rows.p[rows.row(node)], children
    q, token = tree.q[child], tree.tokens[child]
    if lm.flip(min(1.0, float(q[token] / p[token])), rows.position(node))[0]:
        return Ruling(child)
    return Ruling(None, lm.draw(residual_distribution(p, q), rows.position(node), "redraw"))


def distinct(draw, q) -> list[int]:
    first = draw(q, 0)
    rest = q.index_fill(0, torch.tensor([first]), 0.0)
    return [first, draw(rest / rest.sum(), 1)]


def most_probable(draw, q) -> list[int]:
    return q.topk(2).indices.tolist()


def sharpened(draw, q) -> list[int]:
    return [draw(q ** 3 / (q ** 3).sum(), 0)]


def confident(draw, q) -> list[int]:
    guess = draw(q, 0)
    return [guess] if q[guess] > 0.3 else []


def speculation(drafter: Drafter, verifier: Verifier, *samplers: tuple[str, dict]) -> Assembly:
    decoder = make("speculative")
    decoder.drafter, decoder.verifier = drafter, verifier
    return Assembly(decoder, [make(name, **knobs) for name, knobs in samplers])


RIGHT = {
    "independent siblings": (Siblings(independent), by_the_book),
    "distinct siblings": (Siblings(distinct, "without_replacement"), by_the_book),
}
MUTANTS = {
    "a redraw from p instead of what p has more than q": (Siblings(independent), redraws_from_p),
    "p and q swapped": (Siblings(independent), swaps_p_and_q),
    "independent siblings taken for distinct ones": (Siblings(independent), takes_children_for_distinct),
    "distinct siblings taken for independent ones": (
        Siblings(distinct, "without_replacement"),
        takes_children_for_independent,
    ),
    "the most probable tokens taken for drawn ones": (Siblings(most_probable, "without_replacement"), by_the_book),
    "guesses drawn at another temperature than q says": (Siblings(sharpened), by_the_book),
    "a drawn guess dropped because its own q is small": (Siblings(confident), by_the_book),
    "a second draw after a miss": (Siblings(independent), draws_again_after_a_miss),
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter, rule", RIGHT.values(), ids=RIGHT)
def test_a_correct_rule_has_the_targets_distribution(drafter, rule):
    assert off(speculation(drafter, Judged(rule), AT_ONE), tables("abcd"), [0, 1], 2) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("drafter, rule", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_rule_is_detected(drafter, rule):
    assert off(speculation(drafter, Judged(rule), AT_ONE), tables("abcd"), [0, 1], 2) > WRONG


# --- greedy_identical: exactly the tokens of plain greedy decoding ---

LENGTH = 16


def written(
    lane: LaneConfig | Assembly, models: dict, length: int = LENGTH, seed: int = 0, prompt: list[int] = PROMPT
) -> list[int]:
    assembly = lane if isinstance(lane, Assembly) else assemble(lane)
    ids = write(assembly, models, prompt, Limits(seed, length), Draws(seed)).tokens
    return ids[len(prompt):]


def networks(architecture: str) -> dict:
    models = pair(architecture)
    return {"target": models.target, "draft": models.draft}


@cache
def greedys(architecture: str) -> list[int]:
    """The greedy text on a pair of networks; hundreds of lanes are compared with it."""
    return written(LaneConfig("greedy"), networks(architecture))


class Hinted(Drafter):
    """Trees of random shape that often, but not always, contain the right tokens."""

    def __init__(self, truth: list[int], seed: int = 0):
        self.truth, self.chance = truth, random.Random(seed)

    def propose(self, lm, budget):
        yield from ()
        tree = TokenTree(source="hinted")
        for _ in range(self.chance.randrange(10)):
            parent = self.chance.randrange(-1, len(tree))
            if len(tree.path(parent)) < budget:
                tree.add(self._guess(lm, tree.prefix(parent)), parent)
        return tree

    def _guess(self, lm, prefix: list[int]) -> int:
        coming = self.truth[lm.generated:]
        honest = prefix == coming[:len(prefix)] and len(prefix) < len(coming) and self.chance.random() < 0.7
        return coming[len(prefix)] if honest else self.chance.randrange(lm.vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_greedy_writes_the_librarys_own_argmax(architecture):
    ids = written(LaneConfig("greedy"), networks(architecture))
    assert ids == greedy_text(architecture, PROMPT, LENGTH)[:len(ids)]
    assert len(set(ids)) > 3, "a text of one token proves nothing"


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("config", lanes("greedy_identical"), ids=title)
def test_a_lane_with_the_guarantee_writes_the_greedy_text(config, architecture):
    assert written(config, networks(architecture)) == greedys(architecture)


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("verifier", [cls.name for cls in registered("verifier", promising="greedy_identical")])
def test_the_text_is_greedys_for_any_draft_tree(verifier, architecture):
    truth = greedys(architecture)
    assert written(speculation(Hinted(truth), make(verifier)), networks(architecture)) == truth


@pytest.mark.matrix
@pytest.mark.parametrize("config", lanes("greedy_identical", cornered=True), ids=title)
def test_every_setting_writes_the_greedy_text(config):
    for seed in range(5):
        models, plain = tables("abcde", ends="e", seed=seed), greedy_among_letters(seed)
        assert written(config, models, prompt=[0, 1, 0, 1]) == plain
        if can_be_had(added(config, ("top_k", {"k": 1}))):  # trees branch only if tokens are sampled
            assert written(added(config, ("top_k", {"k": 1})), models, prompt=[0, 1, 0, 1]) == plain


@cache
def greedy_among_letters(seed: int) -> list[int]:
    return written(LaneConfig("greedy"), tables("abcde", ends="e", seed=seed), prompt=[0, 1, 0, 1])


@pytest.mark.slow
def test_the_drafts_of_these_tests_are_partly_accepted():
    for architecture in FAMILIES:
        session = prepare(pair(architecture), [LaneConfig("speculative")], Prompt("The green bird"), Limits(0, LENGTH))
        deque(session, maxlen=0)
        assert 0.05 < metrics(session.trace)["acceptance_rate"] < 0.95, architecture


# --- constraint_sound ---

SLICES = 16  # of all lanes, each a case of its own


def constrained() -> list:
    return [pytest.param((name, knobs), valid, id=f"{name}-{i}") for name, examples in declared("SOUND").items()
            for i, (knobs, valid) in enumerate(examples)]


@pytest.fixture(scope="module")
def babblers() -> list[dict[str, TableModel]]:
    """Models that ignore grammars: one with random preferences, and one with uniform rows."""
    tokenizer = byte_tokenizer(merges=80)
    return [{"target": TableModel(tokenizer=tokenizer, seed=1, spread=spread, context=512),
             "draft": TableModel(tokenizer=tokenizer, seed=2, spread=spread, context=512)} for spread in (2.0, 0.0)]


def test_every_constraint_with_the_guarantee_has_a_validator():
    assert declared("SOUND").keys() == {cls.name for cls in registered(promising="constraint_sound")}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("constraint, valid", constrained())
def test_finished_texts_under_a_constraint_are_valid(constraint, valid, part, babblers):
    asked = lanes(added=(constraint,))[part::SLICES]
    for config, models in zip({title(config): config for config in asked + drawing(asked)}.values(), cycle(babblers)):
        lane = write(assemble(config), models, [54], Limits(0, 120), Draws(3))
        assert lane.reason in ("end", "grammar"), f"{title(config)} did not come to an end: {lane.text!r}"
        assert valid(lane.text), f"{title(config)} wrote {lane.text!r}"


# --- budget_respected ---

@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("policy, part", shared_out(registered(promising="budget_respected"), most=8))
def test_no_head_exceeds_the_budget_after_a_commit(policy, part):
    prompt, budget = [i * i % 5 for i in range(80)], make(policy[0], **policy[1]).budget
    for config in drawing(share(lanes(added=(policy,)), part)):
        generated = 0
        for lane in watch(assemble(config), tables("abcde"), prompt, Limits(0, 20), Draws(0)):
            if lane.generated > generated:
                generated = lane.generated
                assert most_held(lane) <= budget(generated), title(config)


def most_held(lane) -> int:
    """Live slots of the fullest head."""
    return max(int((slots.positions >= 0).sum(-1).max()) for slots in lane.target.store.slots)


# --- collapses ---

MANY = 12  # examples of one strategy, crossed with lanes


def collapses() -> list:
    return [pytest.param(example, id=f"{name}-{i}", marks=[pytest.mark.matrix] if len(examples) > MANY else [])
            for name, examples in declared("COLLAPSES").items() for i, example in enumerate(examples)]


def test_every_strategy_with_the_guarantee_declares_its_neutral_setting():
    assert declared("COLLAPSES").keys() == {cls.name for cls in registered(promising="collapses")}


@pytest.fixture(scope="module")
def baselines() -> dict[tuple, list[int]]:
    """Texts of simpler lanes: most examples are compared with the same few."""
    return {}


@pytest.mark.parametrize("example", collapses())
def test_at_its_neutral_setting_a_strategy_equals_a_simpler_one(example: Collapse, baselines):
    random = networks("mixtral" if "experts" in assemble(example.lane).needs() else "llama")
    for scene, models in enumerate([*(tables("abcde", seed=seed) for seed in range(3)), random]):
        models = models | ({"draft": models["target"]} if example.twins else {})
        key, prompt = (id(models["target"]) if scene == 3 else scene, repr(example.baseline), example.on,
                       example.twins), [1, 2, 3, 1, 2]
        if key not in baselines:
            baselines[key] = written(
                example.baseline, {"target": models[example.on], "draft": models["draft"]}, seed=7, prompt=prompt
            )
        assert written(example.lane, models, seed=7, prompt=prompt) == baselines[key]
