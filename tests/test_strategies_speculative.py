"""Drafters and verification rules, against numbers worked out by hand and by brute force."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import network, pair
from registry import Collapse, corners, title
from tables import Enumerating, TableModel, watch, write

from playground.algorithms.speculative.speculative_loop import rounds
from playground.algorithms.speculative.verification import Ruling, match, reject
from playground.contract import Verifier, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT, TokenTree, chain
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.events import Draft, Verdict
from playground.trace import metrics
from support.speculation_oracles import NAMES, Recording, assert_refused

GREEDY, MODEL = LaneConfig("greedy"), LaneConfig("greedy", {}, [("temperature", {"t": 1.0})])


def speculative_lane(drafter: str, verifier: str = "rejection", *samplers: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig("speculative", {}, [(drafter, knobs), (verifier, {}), *samplers])


COLLAPSES = {
    "draft_model": [
        Collapse(speculative_lane("draft_model", depth=0), GREEDY),
        Collapse(speculative_lane("draft_model", "rejection", *MODEL.extras, depth=0), MODEL),
    ],
    "prompt_lookup": [
        Collapse(speculative_lane("prompt_lookup", depth=0), GREEDY),
        Collapse(speculative_lane("prompt_lookup", n_max=1, n_min=4), GREEDY),
        Collapse(speculative_lane("prompt_lookup", "rejection", *MODEL.extras, depth=0), MODEL),
    ],
}


# --- verification rules: P = (.5, .3, .2), Q = (.2, .5, .3) ---

P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def siblings(count: int, q: torch.Tensor, drawn: str, draws: Enumerating) -> TokenTree:
    """Draft tokens sampled from q one after another, with or without replacement."""
    tree, rest = TokenTree(drawn=drawn), q
    for place in range(count):
        token = draws.pick(rest, "draft", place)
        tree.add(token, ROOT, q)
        if drawn == "without_replacement":
            rest = rest.index_fill(0, torch.tensor([token]), 0.0)
    return tree


def rulings(count: int, p: torch.Tensor, q: torch.Tensor, drawn: str = "independent") -> list[tuple[int, bool, float]]:
    """Every outcome of the rejection rule: the committed token, whether it was a draft token, and its probability."""
    draws, found = Enumerating(), []
    for _ in draws.runs():
        tree = siblings(count, q, drawn, draws)
        ruling = reject(
            p,
            tree.children(ROOT),
            tree,
            lambda ratio: draws.flip(ratio, "accept", 0),
            lambda rest: draws.pick(rest, "redraw", 0),
        )
        found.append(
            (
                tree.tokens[ruling.child] if ruling.child is not None else ruling.token,
                ruling.child is not None,
                draws.weight,
            )
        )
    return found


def accepted(*case) -> float:
    return sum(weight for _, was_guess, weight in rulings(*case) if was_guess)


def law_of(outcomes: list[tuple[int, bool, float]], size: int) -> list[float]:
    return [sum(weight for token, _, weight in outcomes if token == wanted) for wanted in range(size)]


@pytest.mark.parametrize("count, drawn, chance", [
    (1, "independent", 0.7), (2, "independent", 0.76), (3, "independent", 0.808),
    (1, "without_replacement", 0.7), (2, "without_replacement", 0.808571), (3, "without_replacement", 1.0),
])
def test_draft_tokens_are_accepted_as_often_as_the_papers_state(count, drawn, chance):
    assert accepted(count, P, Q, drawn) == pytest.approx(chance, abs=1e-6)


def test_one_draft_token_is_accepted_with_the_overlap_of_p_and_q():
    assert accepted(1, P, Q) == pytest.approx(float(torch.minimum(P, Q).sum()))


def test_rejected_tokens_are_resampled_from_the_residual():
    assert {token for token, was_guess, _ in rulings(1, P, Q) if not was_guess} == {0}


def test_a_draft_that_equals_the_target_is_always_accepted():
    assert accepted(1, P, P) == pytest.approx(1)


@st.composite
def distributions(draw, size: int):
    """A distribution in which some tokens may be impossible."""
    weights = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@pytest.mark.parametrize("drawn", ["independent", "without_replacement"])
@settings(deadline=None, max_examples=40)
@given(data=st.data(), size=st.integers(2, 4))
def test_rejection_sampling_gives_p_for_any_p_and_q(drawn, data, size):
    p, q = data.draw(distributions(size)), data.draw(distributions(size))
    count = min(3, int((q > 0).sum()) if drawn == "without_replacement" else 3)
    assert law_of(rulings(count, p, q, drawn), size) == pytest.approx(p.tolist(), abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), size=st.integers(2, 4), guesses=st.lists(st.integers(0, 1), min_size=1, max_size=3))
def test_rejection_sampling_gives_p_for_deterministic_drafts(data, size, guesses):
    p, draws, found = data.draw(distributions(size)), Enumerating(), Counter()
    tree = TokenTree()
    for guess in guesses:
        tree.add(guess)
    for _ in draws.runs():
        ruling = reject(
            p,
            tree.children(ROOT),
            tree,
            lambda ratio: draws.flip(ratio, "accept", 0),
            lambda rest: draws.pick(rest, "redraw", 0),
        )
        found[ruling.token if ruling.child is None else tree.tokens[ruling.child]] += draws.weight
    assert [found[token] for token in range(size)] == pytest.approx(p.tolist(), abs=1e-9)


def test_sample_and_match_accepts_with_the_total_probability_of_the_children():
    tree = TokenTree()
    tree.add(1), tree.add(2)
    standing = [match(token, [0, 1], tree, P).child for token in range(3)]
    assert standing == [None, 0, 1]
    assert sum(float(P[token]) for token, child in enumerate(standing) if child is not None) == pytest.approx(0.5)


def test_a_mismatch_commits_the_sampled_token():
    assert match(0, [0], chain([2], "test"), P) == Ruling(None, 0, match(0, [0], chain([2], "test"), P).tests, P)


@pytest.mark.slow
@pytest.mark.parametrize("depth, expected", [(2, 2.19), (4, 2.7731)])
def test_tokens_per_round_equal_the_papers_formula(depth, expected):
    """Leviathan et al.: (1 - alpha ** (depth + 1)) / (1 - alpha), here with alpha = 0.7."""
    models = {
        "target": TableModel("abc", rule=lambda context: P.log()),
        "draft": TableModel("abc", rule=lambda context: Q.log()),
    }
    found, draws = 0.0, Enumerating()
    for _ in draws.runs():
        tokens = len(first_round(models, depth, draws))
        found += draws.weight * tokens
    assert found == pytest.approx(expected, abs=1e-4)


def first_round(models: dict, depth: int, draws) -> list[int]:
    """Tokens of the first commit."""
    for lane in watch(
        assemble(speculative_lane("draft_model", "rejection", *MODEL.extras, depth=depth)),
        models,
        [0],
        Limits(0, depth + 1),
        draws,
    ):
        if lane.generated:
            return lane.tokens[1:]
    raise AssertionError("nothing was written")


# --- events of a round ---

def recorded_rounds(config: LaneConfig, models: Models, length: int = 24, seed: int = 0) -> list[tuple[Draft, Verdict]]:
    session = prepare(models, [config], Prompt("The green bird"), Limits(seed, length))
    events = [stamped.event for stamped in session]
    return list(zip([e for e in events if isinstance(e, Draft)], [e for e in events if isinstance(e, Verdict)]))


@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_acceptance_tests_are_reported_in_order(verifier):
    for draft, verdict in recorded_rounds(speculative_lane("draft_model", verifier, *MODEL.extras, width=3), pair()):
        assert [test.node for test in verdict.tests if test.kept] == verdict.kept
        for test in verdict.tests:
            assert 0 <= test.p <= 1 and 0 < test.q <= 1
            if verifier == "rejection":
                assert test.kept == (test.draw < min(1, test.p / test.q))
        assert verdict.origin == ("bonus" if len(verdict.kept) == depth_of(draft, verdict) else "redraw")


def depth_of(draft: Draft, verdict: Verdict) -> int:
    """The greatest possible depth of the walk: to a leaf below the last accepted node."""
    node = verdict.kept[-1] if verdict.kept else ROOT
    return len(verdict.kept) + (node in draft.parents)


def test_a_resampled_token_reports_its_distribution():
    refused = [
        verdict
        for _, verdict in recorded_rounds(speculative_lane("draft_model", "rejection", *MODEL.extras), pair())
        if verdict.origin == "redraw"
    ]
    assert refused
    for verdict in refused:
        assert sum(candidate.final for candidate in verdict.leftover) <= 1 + 1e-6
        assert verdict.token in [candidate.id for candidate in verdict.leftover] or len(verdict.leftover) == 8


@pytest.mark.parametrize(
    "config",
    [
        speculative_lane("draft_model", "rejection", *extras, width=width)
        for width in (1, 2)
        for extras in ([], MODEL.extras)
    ],
    ids=title,
)
def test_a_draft_that_is_the_target_has_every_draft_token_accepted(config):
    models = pair()
    for draft, verdict in recorded_rounds(config, Models(models.target, models.target)):
        assert verdict.origin == "bonus" and len(verdict.kept) == max(map(len, paths(draft)))


def paths(draft: Draft) -> list[list[int]]:
    tree = TokenTree(parents=draft.parents)
    return [tree.path(node) for node in range(len(draft.parents))]


def test_no_draft_exceeds_the_remaining_length():
    for depth, width in product((1, 3, 16), (1, 2)):
        written = 0
        for draft, verdict in recorded_rounds(
            speculative_lane("draft_model", "rejection", *MODEL.extras, depth=depth, width=width), pair(), length=9
        ):
            assert max(map(len, paths(draft))) <= 9 - written - 1
            written += len(verdict.kept) + 1
        assert written <= 9


@pytest.mark.parametrize(
    "drafter, knobs",
    [("draft_model", {"depth": 8}), ("draft_model", {"depth": 8, "width": 2}), ("spectr", {"length": 8})],
    ids=str,
)
def test_the_draft_takes_no_forward_after_an_end_token(drafter, knobs):
    def rule(context):
        return torch.tensor([0.0, 9.0, 9.0] if len(context) > 3 else [9.0, 0.0, 0.0])

    models = {name: TableModel("abc", ends="bc", rule=rule) for name in ("target", "draft")}
    written = write(assemble(speculative_lane(drafter, "greedy_match", **knobs)), models, [0], Limits(0, 20), Draws(0))
    assert (written.tokens, models["draft"].forwards) == ([0, 0, 0, 0, 1], 4)


def test_draft_tokens_after_the_first_rejection_count_as_untested():
    session = prepare(
        pair(), [speculative_lane("draft_model", "greedy_match")], Prompt("The green bird"), Limits(0, 24)
    )
    rounds_ = [stamped.event for stamped in session if isinstance(stamped.event, Verdict)]
    assert metrics(session.trace)["acceptance_rate"] == pytest.approx(
        sum(len(v.kept) for v in rounds_) / sum(len(v.tests) for v in rounds_)
    )


# --- shared random numbers ---

@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize(
    "drafter, knobs",
    [(name, knobs) for name in ("draft_model", "prompt_lookup") for knobs in corners(find(name), most=3)],
    ids=str,
)
def test_sample_and_match_writes_what_plain_sampling_writes_with_the_same_seed(drafter, knobs, architecture):
    models = {"target": pair(architecture).target, "draft": pair(architecture).draft}
    samplers = [("temperature", {"t": 0.7}), ("top_p", {"p": 0.9}), ("repetition_penalty", {"penalty": 1.2})]
    prompt = [54, 71, 71, 54, 9, 71, 71]
    plain, guessed = (
        write(assemble(config), models, prompt, Limits(5, 12), Draws(5)).tokens
        for config in (
            LaneConfig("greedy", {}, samplers),
            speculative_lane(drafter, "sample_match", *samplers, **knobs),
        )
    )
    assert plain == guessed


# --- prompt lookup ---

END = 99


def guess(text: list[int], count: int = 4, ends: Callable = lambda token: token == END, **knobs) -> list[int]:
    return make("prompt_lookup", **knobs).look_up(text, count, ends)


@pytest.mark.parametrize("n_max", [2, 3])
def test_the_continuation_of_the_last_two_tokens_is_proposed(n_max):
    assert guess([1, 2, 3, 4, 2, 3], n_max=n_max) == [4, 2, 3]


def test_a_draft_ends_before_an_end_token_without_trying_a_shorter_match():
    assert guess([5, 6, END, 7, 5, 6]) == []


@pytest.mark.parametrize("text, knobs, expected", [
    ([1], {}, []), ([1, 1], {}, [1]), ([7, 7, 7, 7], {}, [7]), ([1, 2, 3], {}, []),
    ([1, 5, 1, 6, 1], {"occurrence": "earliest"}, [5, 1, 6, 1]), ([1, 5, 1, 6, 1], {"occurrence": "latest"}, [6, 1]),
    ([1, 2, 9, 8, 2], {"n_min": 2}, []), ([1, 2, 9, 8, 2], {"n_min": 1}, [9, 8, 2]),
])
def test_worked_examples_of_prompt_lookup(text, knobs, expected):
    assert guess(text, **knobs) == expected


@pytest.mark.oracle("prompt_lookup")
@pytest.mark.parametrize("occurrence", ["earliest", "latest"])
@settings(deadline=None, max_examples=150)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    n_max=st.integers(1, 5),
    n_min=st.integers(1, 3),
    count=st.integers(0, 5),
)
def test_prompt_lookup_equals_a_brute_force_search(occurrence, text, n_max, n_min, count):
    endings = [(n, start) for n in range(n_min, n_max + 1) for start in range(len(text) - n)
               if text[start:start + n] == text[len(text) - n:]]
    longest = max((n for n, _ in endings), default=0)
    starts = [start for n, start in endings if n == longest]
    expected = text[(min if occurrence == "earliest" else max)(starts) + longest:][:count] if starts else []
    assert guess(text, count, n_max=n_max, n_min=n_min, occurrence=occurrence) == expected


def test_a_repeating_text_takes_one_forward_per_eleven_tokens():
    copier = TableModel("abcdefgh", rule=lambda context: torch.eye(8, dtype=torch.float64)[(context[-1] + 1) % 8] * 50)
    write(
        assemble(speculative_lane("prompt_lookup", depth=10)),
        {"target": copier},
        list(range(8)) * 3,
        Limits(0, 44),
        Draws(0),
    )
    assert copier.forwards == 1 + 44 / 11, "the prompt, and then rounds of ten guesses and a bonus"


def test_a_text_without_repetition_takes_one_forward_per_token():
    counter = TableModel(
        "".join(map(chr, range(97, 123))), rule=lambda context: torch.eye(26, dtype=torch.float64)[len(context)] * 50
    )
    write(assemble(speculative_lane("prompt_lookup")), {"target": counter}, [0], Limits(0, 20), Draws(0))
    assert counter.forwards == 20


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
