"""Typical acceptance, block verification, a confidence stop and n-gram caches, against enumerations and brute force."""
from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from registry import Collapse
from tables import TableModel, distance, law, product_law

from playground.contract import Verifier, find, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.engine.sampling import residual_distribution
from strategies.speculative.ngram_cache import Runs
from support import speculation
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import collapses, first_drafts, off, speculative_lane

Typical, Block, Stop, Cache = (
    find(name) for name in ("typical_acceptance", "block_verification", "confidence_stop", "ngram_cache")
)
FIXED = {"threshold": 0.0, "schedule": "constant", "length": 4}
COLLAPSES = {
    "confidence_stop": [
        *collapses("confidence_stop", length=0),
        Collapse(speculative_lane("confidence_stop", "rejection", AT_ONE, **FIXED),
                 speculative_lane("draft_model", "rejection", AT_ONE, depth=4)),
    ],
    "ngram_cache": collapses("ngram_cache", length=0),
}


def refused(check: Callable, wrong: type) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def lane_of(drafter, verifier) -> Assembly:
    decoder = make("speculative")
    decoder.drafter, decoder.verifier = drafter, verifier
    return Assembly(decoder, [make(AT_ONE[0], **AT_ONE[1])])


def first_rounds(models: dict, length: int, **replaced):
    """`first_drafts` of a lane with this drafter or verifier."""
    def assembled(config: LaneConfig) -> Assembly:
        assembly = assemble(config)
        vars(assembly.decoder).update(replaced)
        return assembly

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "assemble", assembled)
        yield from first_drafts(speculative_lane("draft_model", "rejection", AT_ONE, depth=3), models, length)


def rows_of(model: TableModel) -> Callable[[tuple[int, ...]], list[float]]:
    return lambda text: model.scores((0, *text)).softmax(-1).tolist()


# --- typical acceptance ---


def typical_law(models: dict, epsilon: float, delta: float) -> dict[tuple[int, int], float]:
    """Two tokens, with one draft token: it and the target's next token, or two tokens of the target."""
    p, q, found = rows_of(models["target"]), rows_of(models["draft"]), defaultdict(float)
    root = p(())
    threshold = min(epsilon, delta * math.exp(sum(x * math.log(x) for x in root)))
    refused = sum(chance for token, chance in enumerate(q(())) if root[token] <= threshold)
    for a, b in itertools.product(range(3), repeat=2):
        accepted = q(())[a] if root[a] > threshold else 0.0
        found[a, b] = (accepted + refused * root[a]) * p((a,))[b]
    return found


def check_typical(cls: type[Verifier]) -> None:
    for seed, (epsilon, delta) in enumerate([(0.3, 0.9), (0.9, 0.6), (0.25, 0.99), (0.5, 0.0)]):
        models = tables("abc", seed=seed * 2)
        found = law(lane_of(make("draft_model", depth=1), cls(epsilon=epsilon, delta=delta)), models, [0], 2)
        assert distance(found, typical_law(models, epsilon, delta)) < EXACT


class LargerThreshold(Typical):
    def threshold(self, p):
        return max(self.epsilon, self.delta * math.exp(-float(torch.special.entr(p).sum())))


class ConfidentRowsAcceptMore(Typical):
    def threshold(self, p):
        return min(self.epsilon, self.delta * (1 - math.exp(-float(torch.special.entr(p).sum()))))


@pytest.mark.oracle("typical_acceptance")
def test_typical_acceptance_has_the_law_of_its_threshold():
    check_typical(Typical)


@pytest.mark.refuses("typical_acceptance")
@pytest.mark.parametrize("wrong", [LargerThreshold, ConfidentRowsAcceptMore])
def test_a_wrong_threshold_is_refused(wrong):
    refused(check_typical, wrong)


@pytest.mark.slow
@pytest.mark.strategy("typical_acceptance")
def test_of_several_branches_the_longest_accepted_one_is_followed():
    models, seen = tables("abc", seed=2), 0
    p = rows_of(models["target"])
    lane = speculative_lane("spectr", "typical_acceptance", AT_ONE, rows=2, length=2)
    verifier = make("typical_acceptance")
    for _, tree, verdict in first_drafts(lane, models, 4):
        accepted = [
            path for path in ([*tree.path(node)] for node in range(len(tree)))
            if all(p(tuple(tree.prefix(tree.parents[n])))[tree.tokens[n]]
                   > verifier.threshold(torch.tensor(p(tuple(tree.prefix(tree.parents[n]))))) for n in path)
        ]
        assert len(verdict.kept) == max(map(len, accepted), default=0)
        assert not verdict.kept or verdict.kept in accepted
        seen += len(verdict.kept) == 2
    assert seen


def test_a_lane_with_typical_acceptance_does_not_claim_the_targets_distribution():
    def guarantee(verifier):
        return assemble(speculative_lane("draft_model", verifier, AT_ONE)).guarantee()

    assert "distribution_identical" not in guarantee("typical_acceptance")
    assert "distribution_identical" in guarantee("rejection") and "distribution_identical" in guarantee(
        "block_verification"
    )


# --- block verification ---


def worths(models: dict, block: tuple[int, ...]) -> list[float]:
    p, q, found = rows_of(models["target"]), rows_of(models["draft"]), [1.0]
    for i, token in enumerate(block):
        found.append(min(1.0, found[-1] * p(block[:i])[token] / q(block[:i])[token]))
    return found


def check_block(cls: type[Verifier]) -> None:
    """The law is the target's, and the i-th token is accepted with probability w_i, averaged over the drafts."""
    for seed in (1, 2, 3):
        models = tables("abc", seed=2 * seed)
        found = law(lane_of(make("draft_model", depth=2), cls()), models, [0], 3)
        assert distance(found, product_law(models["target"], [0], 3)) < EXACT
    for seed in range(2):
        models, depth, found = tables("abc", seed=2 * seed), 3, 0.0
        for weight, _, verdict in first_rounds(models, depth + 1, verifier=cls()):
            found += weight * len(verdict.kept)
        q, expected = rows_of(models["draft"]), 0.0
        for block in itertools.product(range(3), repeat=depth):
            drawn = math.prod(q(block[:i])[token] for i, token in enumerate(block))
            expected += drawn * sum(worths(models, block)[1:])
        assert found == pytest.approx(expected)


class TokenByToken(Block):
    """Wrong: each token is worth its own ratio, whatever came before it."""

    def worth(self, block):
        return [1.0, *(min(1.0, float(p[t] / q[t])) for t, p, q in zip(block.tokens, block.p, block.q))]


class ResidualWithoutTheWorth(Block):
    def residual(self, block, worth, i):
        return residual_distribution(block.p[i], block.q[i])


class WorthMayExceedOne(Block):
    def worth(self, block):
        found = [1.0]
        for t, p, q in zip(block.tokens, block.p, block.q):
            found.append(found[-1] * float(p[t] / q[t]))
        return [min(1.0, worth) for worth in found]


class OneTokenAfterTheOther(Block):
    """Exact, but rejection sampling: the blocks it accepts are shorter."""

    def judge(self, lm, tree, rows):
        return make("rejection").judge(lm, tree, rows)


@pytest.mark.slow
@pytest.mark.oracle("block_verification")
def test_a_block_is_exact_and_accepted_as_far_as_its_worth_allows():
    check_block(Block)


@pytest.mark.slow
@pytest.mark.refuses("block_verification")
@pytest.mark.parametrize("wrong", [TokenByToken, ResidualWithoutTheWorth, WorthMayExceedOne, OneTokenAfterTheOther])
def test_a_wrong_block_is_refused(wrong):
    refused(check_block, wrong)


# --- a confidence stop ---


def stopped(models: dict, tokens: list[int], threshold: float, rule: str, depth: int) -> bool:
    """Whether a draft may end after these tokens, with more than one token to decide about."""
    q = rows_of(models["draft"])
    if len(tokens) == depth:
        return True
    if rule == "llama.cpp":
        return max(q(tuple(tokens))) < threshold
    return bool(tokens) and q(tuple(tokens[:-1]))[tokens[-1]] < threshold


def check_stop(cls: type) -> None:
    for seed, (rule, threshold) in enumerate([("transformers", 0.4), ("llama.cpp", 0.5), ("transformers", 0.2)]):
        models = tables("abc", seed=seed)
        for _, tree, _ in first_rounds(models, 5, drafter=cls(rule=rule, threshold=threshold, length=3)):
            ends = [stopped(models, tree.tokens[:i], threshold, rule, 3) for i in range(len(tree) + 1)]
            assert ends == [False] * len(tree) + [True], (rule, tree.tokens)


class StopsAtTheMaximumOfTheRow(Stop):
    """Wrong for the library's rule: the drawn token's own probability counts."""

    def _level(self, lm, tree, rows, leaf):
        self.rule = "llama.cpp"
        return super()._level(lm, tree, rows, leaf)


class StopsWhereItIsSure(Stop):
    def __post_init__(self):
        super().__post_init__()
        self.threshold = 1 - self.threshold


@pytest.mark.oracle("confidence_stop")
def test_a_draft_ends_where_the_rule_says_and_nowhere_else():
    check_stop(Stop)


@pytest.mark.refuses("confidence_stop")
@pytest.mark.parametrize("wrong", [StopsAtTheMaximumOfTheRow, StopsWhereItIsSure])
def test_a_wrong_stop_is_refused(wrong):
    refused(check_stop, wrong)


class DropsUnlikelyTokens(Stop):
    """Wrong: a drawn token is not sent to the target because of its probability."""

    def _level(self, lm, tree, rows, leaf):
        added = super()._level(lm, tree, rows, leaf)
        if not added and len(tree):
            for listed in (tree.tokens, tree.parents, tree.q, tree.confidence, tree.order):
                listed.pop()
        return added


@pytest.mark.slow
@pytest.mark.refuses("confidence_stop")
def test_dropping_an_unlikely_draft_token_would_change_the_distribution():
    knobs = {"threshold": 0.4, "length": 2}
    assert off(Stop(**knobs), make("rejection"), "abc", 3) < EXACT
    assert off(DropsUnlikelyTokens(**knobs), make("rejection"), "abc", 3) > WRONG


def test_the_length_follows_the_librarys_schedule():
    drafter, lengths = make("confidence_stop", length=2), []
    for kept, drafted in ((2, 2), (1, 4), (4, 4), (0, 6), (0, 4), (0, 0)):
        drafter.observe(range(drafted), None, SimpleNamespace(kept=[*range(kept)]))
        lengths.append(drafter._allowed)
    assert lengths == [4, 3, 5, 4, 3, 3]
    constant = make("confidence_stop", length=2, schedule="constant")
    constant.observe(range(2), None, SimpleNamespace(kept=[0, 1]))
    assert constant._allowed == 2


# --- n-gram caches ---

LIMITS = {"context": [(2, 66), (2, 50), (1, 50), (1, 50)], "dynamic": [(4, 75), (3, 66), (2, 66), (2, 66)]}


def followers(text: list[int], ngram: list[int]) -> Counter:
    n = len(ngram)
    return Counter(text[i + n] for i in range(len(text) - n) if text[i:i + n] == ngram)


def by_hand(text: list[int], earlier: list[int], corpus: list[int], count: int) -> list[int]:
    drafted: list[int] = []
    while len(drafted) < count and (token := next_by_hand(text, earlier, corpus, drafted)) is not None:
        drafted.append(token)
    return drafted


def next_by_hand(text: list[int], earlier: list[int], corpus: list[int], drafted: list[int]) -> int | None:
    recent = [*text, *drafted][-4:]
    static = followers(corpus, recent[-2:]) if len(recent) > 1 else Counter()
    for cache, source in (("context", text), ("dynamic", earlier)):
        for n in range(min(4, len(recent)), 0, -1):
            counts, (least, percent) = followers(source, recent[-n:]), LIMITS[cache][n - 1]
            total = sum(counts.values())
            if total and total >= least:
                best = max(counts, key=lambda t, c=counts: c[t] * (100 * static[t] if static[t] else 1))
                if 100 * counts[best] >= percent * total:
                    return best
    total = sum(static.values())
    best = max(static, key=static.get, default=None)
    return best if total >= 2 and 100 * static[best] >= 50 * total else None


def random_cases(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    chance = random.Random(3)
    return [tuple(chance.choices(range(chance.choice((3, 5))), k=size) for size in (chance.randint(1, 20), 40, 40))
            for _ in range(count)]


def drafted_by(drafter, text: list[int], earlier: list[int], corpus: list[int]) -> list[int]:
    runs = Runs()
    runs.current.read(earlier)
    lm = SimpleNamespace(tokens=text, generated=1, spell=lambda words: corpus, ends=lambda token: False,
                         memory=lambda name, build: runs)
    steps = drafter.propose(lm, 8)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value.tokens


def check_caches(cls: type) -> None:
    for case in random_cases(150):
        assert drafted_by(cls(length=6, corpus="x"), *case) == by_hand(*case, 6)


class ShortestFirst(Cache):
    def _next(self, recent):
        found = [super(ShortestFirst, self)._next(recent[-n:]) for n in range(1, len(recent) + 1)]
        return next((each for each in found if each[0] is not None), (None, ""))


class NeverAsksTheStaticCache(Cache):
    def __post_init__(self):
        self.static = False


class ForgetsEarlierRuns(Cache):
    def __post_init__(self):
        self.dynamic = False


@pytest.mark.oracle("ngram_cache")
def test_drafts_are_the_favourites_that_counting_finds():
    check_caches(Cache)


@pytest.mark.refuses("ngram_cache")
@pytest.mark.parametrize("wrong", [ShortestFirst, NeverAsksTheStaticCache, ForgetsEarlierRuns])
def test_wrong_caches_are_refused(wrong):
    refused(check_caches, wrong)


@pytest.mark.oracle("ngram_cache")
def test_the_law_of_a_lane_with_ngram_caches_is_the_targets():
    models = tables("abc")
    found = law(speculative_lane("ngram_cache", "rejection", AT_ONE, corpus="abcabcaab"), models, [0, 1], 3)
    assert distance(found, product_law(models["target"], [0, 1], 3)) < EXACT
