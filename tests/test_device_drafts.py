"""Rounds of speculation on a stand-in for a GPU, where the host reads drafts and verdicts late: what it reads then, and
the random numbers it has used, are those of the CPU.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import pytest
import torch
from pairs import TOKENIZER, network
from registry import registered

from playground.algorithms.speculative import foreseen_verdict, unread_drafts
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import Session, prepare
from playground.engine.graphs import graph_inputs
from playground.engine.model import Model
from playground.events import Commit, Done, Draft, Step, Verdict
from support.gpu_standin import Standin

PROMPT, LENGTH = Prompt("the red fox, the red fox, the"), 14


@pytest.fixture(scope="module")
def cpu() -> Models:
    return models(lambda network: network)


@pytest.fixture(scope="module")
def gpu() -> tuple[Standin, Models]:
    with Standin() as machine:
        return machine, models(machine.move)


def models(move) -> Models:
    """A target and a draft that often disagree."""
    target, draft = network("llama").double(), network("llama").double()
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += torch.randn_like(weights) * 0.1 * weights.std(correction=0)
    return Models(Model(move(target), TOKENIZER, "target"), Model(move(draft), TOKENIZER, "draft"))


def speculative(*extras: str, **knobs) -> LaneConfig:
    return LaneConfig("speculative", {}, [(name, knobs.get(name, {})) for name in extras])


HOT = {"temperature": {"t": 1.5}}
LANES = {
    "chain": speculative("draft_model", "greedy_match"),
    "tree": speculative("draft_model", "greedy_match", draft_model={"width": 3}),
    "chain, sampled": speculative("temperature", "draft_model", "rejection", **HOT),
    "tree, sampled": speculative("temperature", "top_p", "draft_model", "rejection", draft_model={"width": 3}, **HOT),
    "without replacement": speculative("temperature", "rsd_c", "rejection", **HOT),
    "deterministic": speculative("temperature", "prompt_lookup", "rejection", **HOT),
    "a sampler that reads the text": speculative("temperature", "repetition_penalty", "draft_model", "rejection",
                                                 **HOT),
    "a grammar": speculative("temperature", "regex", "draft_model", "rejection",
                             regex={"pattern": "[a-z ,]{1,400}"}, **HOT),
}


def run(pair: Models, config: LaneConfig, seed: int) -> Session:
    session = prepare(pair, [config], PROMPT, Limits(seed, LENGTH))
    list(session)
    assert isinstance(session.trace.events[-1].event, Done), session.trace.events[-1].event
    return session


def shown(session: Session) -> list:
    """What a reader sees of drafts, verdicts and tokens."""
    events = [stamped.event for stamped in session.trace.events]
    return [event for event in events if isinstance(event, Draft | Verdict | Step | Commit)]


def alike(found: list, expected: list) -> bool:
    """Whether events are the same, up to rounding."""
    return [rounded(event) for event in found] == [rounded(event) for event in expected]


def rounded(value):
    if isinstance(value, float):
        return round(value, 5) + 0.0
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return rounded([getattr(value, each.name) for each in fields(value)]) if is_dataclass(value) else value


def used(session: Session) -> Counter:
    """How often each random number was used."""
    return +session._runners[0].lane.draws._uses


@pytest.mark.slow
@pytest.mark.parametrize("kind", LANES)
def test_drafts_verdicts_and_random_numbers_are_those_of_the_cpu(cpu, gpu, kind):
    machine, pair = gpu
    for seed in range(2):
        with machine:
            found = run(pair, LANES[kind], seed)
        expected = run(cpu, LANES[kind], seed)
        assert alike(shown(found), shown(expected)) and used(found) == used(expected)


@pytest.fixture
def ends(cpu, gpu, monkeypatch) -> None:
    """Every fifth token ends a text, so that drafts often contain an end."""
    for pair in (cpu, gpu[1]):
        for model in (pair.target, pair.draft):
            monkeypatch.setitem(vars(model), "end_ids", frozenset(range(0, model.vocabulary, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "tree", "chain, sampled", "tree, sampled"])
def test_what_is_drafted_after_an_end_token_leaves_no_trace(cpu, gpu, ends, monkeypatch, kind):
    right, removed = unread_drafts._kept, []
    monkeypatch.setattr(unread_drafts, "_kept", lambda lm, tree: note(removed, len(tree), right(lm, tree)))
    (machine, pair), config = gpu, LANES[kind]
    for seed in range(5):
        with machine:
            found = run(pair, config, seed)
        expected = run(cpu, config, seed)
        assert alike(shown(found), shown(expected)) and used(found) == used(expected)
    assert any(removed), "no draft had an end before its last level"


def note(removed: list[int], count: int, nodes: list[int]) -> list[int]:
    removed.append(count - len(nodes))
    return nodes


class Unreadable(Sequence):
    """Tokens before a row that nobody knows yet."""

    def __len__(self) -> int:
        raise AssertionError("the text was read")

    def __getitem__(self, row: int) -> list[int]:
        raise AssertionError("the text was read")


FORGETFUL = [cls for cls in registered("sampler") if not cls.reads_text]


@pytest.mark.parametrize("sampler", FORGETFUL, ids=lambda cls: cls.name)
def test_a_sampler_that_is_said_not_to_read_the_text_does_not(sampler):
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    assert sampler().apply(scores, Unreadable()).shape == scores.shape


def test_a_foreseen_draw_is_the_next_one():
    draws, p = Draws(7), torch.rand(3, 50, dtype=torch.double).softmax(-1)
    keys = [[("redraw", 4, 0)], [("token", 5, 2)], [("token", 6, 0)]]
    foreseen = draws.indices(p, keys, draws.peek)
    made = [draws.pick(row, *key) for row, (key,) in zip(p, keys)]
    assert foreseen[:, 0].tolist() == made and draws._uses.total() == 3


def test_a_draw_that_was_taken_back_is_made_again():
    draws = Draws(7)
    first = draws.uniform("draft/0/0", 4)
    draws.undo([("draft/0/0", 4)])
    assert draws.uniform("draft/0/0", 4) == first != draws.uniform("draft/0/0", 4)


# --- wrong variants ---

def forgets_rejections(tree, p, children):
    left, chances = right_after(tree, p, children)
    return p, chances


right_after = foreseen_verdict._after_rejections


def draws_from_p(monkeypatch) -> None:
    monkeypatch.setattr(foreseen_verdict, "_after_rejections", forgets_rejections)


def keeps_the_number_of_a_redraw(monkeypatch) -> None:
    right = foreseen_verdict.Foreseen.redraw
    monkeypatch.setattr(foreseen_verdict.Foreseen, "redraw", lambda seen, lm, rest, node, position: (
        seen.redraws[node] if node in seen.redraws else right(seen, lm, rest, node, position)))


def drafts_beyond_an_end(monkeypatch) -> None:
    monkeypatch.setattr(unread_drafts, "_kept", lambda lm, tree: list(range(len(tree))))


def uses_numbers_of_removed_nodes(monkeypatch) -> None:
    monkeypatch.setattr(Draws, "undo", lambda draws, keys: None)


def gives_the_first_token_only(monkeypatch) -> None:
    right = graph_inputs.GraphInputs.fill
    monkeypatch.setattr(graph_inputs.GraphInputs, "fill", lambda inputs, texts: right(
        inputs, {place: replace_given(text) for place, text in texts.items()}))


def replace_given(text: graph_inputs.TextRows) -> graph_inputs.TextRows:
    return text if text.given is None else text._replace(given=text.given[:1].expand_as(text.given))


WRONG = {
    draws_from_p: "chain, sampled",
    keeps_the_number_of_a_redraw: "chain, sampled",
    gives_the_first_token_only: "tree",
}
WRONG_AT_ENDS = {drafts_beyond_an_end: "chain", uses_numbers_of_removed_nodes: "chain, sampled"}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_rounds_are_detected(cpu, gpu, monkeypatch, wrong):
    wrong(monkeypatch)
    assert not as_on_the_cpu(cpu, gpu, LANES[WRONG[wrong]])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_AT_ENDS, ids=lambda wrong: wrong.__name__)
def test_wrong_rounds_whose_drafts_have_ends_are_detected(cpu, gpu, ends, monkeypatch, wrong):
    wrong(monkeypatch)
    assert not as_on_the_cpu(cpu, gpu, LANES[WRONG_AT_ENDS[wrong]])


def as_on_the_cpu(cpu: Models, gpu: tuple[Standin, Models], config: LaneConfig) -> bool:
    """Whether a wrong lane, which may fail, shows what one on the CPU shows, and uses its random numbers."""
    machine, pair = gpu
    for seed in range(5):
        with machine:
            found = prepare(pair, [config], PROMPT, Limits(seed, LENGTH))
            list(found)
        expected = run(cpu, config, seed)
        if not alike(shown(found), shown(expected)) or used(found) != used(expected):
            return False
    return True
