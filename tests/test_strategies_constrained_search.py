"""Searches under a constraint rank texts by the model's own probabilities: the mask removes tokens without
changing the others.
"""
from __future__ import annotations

import math

import pytest
import torch
from pairs import TOKENIZER, network, pair
from tables import TableModel, write
from toys import byte_tokenizer
from transformers import PreTrainedModel

from playground.algorithms.search import beams
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.grammar.matcher import GrammarEngine
from support.search_runs import logp

PATTERN = "(the|then) (fox|bird) (sing|listen)s"
TEXTS = [f"{a} {b} {c}s" for a in ("the", "then") for b in ("fox", "bird") for c in ("sing", "listen")]
LETTERS = byte_tokenizer(merges=0)  # a token is a byte, so that a text has one tokenisation only
END, START = LETTERS.eos_token_id, 100
OPTIONS = ["ab", "acdef", "acdeg", "bcd", "bce", "c"]


def answer(decoder: str, constraint: tuple[str, dict], model, prompt: list[int], length: int = 40, **knobs):
    assembly = assemble(LaneConfig(decoder, knobs, [constraint] if constraint else []))
    return write(assembly, {"target": model}, prompt, Limits(max_new_tokens=length), Draws(0)).main


def allowed_by(pattern: str, prompt: int):
    """The same grammar in the form of the library: which tokens may follow."""
    grammar = GrammarEngine(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id]).compile("regex", pattern)

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        matcher = grammar.matcher()
        if not all(matcher.advance(token) for token in ids[prompt:].tolist()) or matcher.stopped:
            return [TOKENIZER.eos_token_id]  # a finished beam is padded
        return matcher.mask().nonzero()[:, 0].tolist()

    return allowed


def by_the_library(model: PreTrainedModel, prompt: list[int], beams: int) -> list[int]:
    ids = torch.tensor([prompt])
    end = TOKENIZER.eos_token_id
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beams,
        length_penalty=1.0,
        early_stopping="never",
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=end,
        pad_token_id=end,
        prefix_allowed_tokens_fn=allowed_by(PATTERN, len(prompt)),
    )
    return written[0, len(prompt):].tolist()


def lopsided(seed: int) -> TableModel:
    return TableModel(tokenizer=LETTERS, seed=seed, spread=3.0)


def chance(model: TableModel, option: str) -> float:
    """Log-probability of an option and the end."""
    return logp(model, [START], (*LETTERS.convert_tokens_to_ids(list(option)), END))


@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beam_search_under_a_grammar_equals_the_librarys(width):
    prompt = TOKENIZER.encode("The green bird")
    expected = by_the_library(network("llama"), prompt, width)
    found = answer("beam_search", ("regex", {"pattern": PATTERN}), pair().target, prompt, beams=width)
    assert found.written == expected and found.text in TEXTS


@pytest.mark.oracle("beam_search", "diverse_beam_search")
@pytest.mark.parametrize("name, knobs", [("beam_search", {}), ("diverse_beam_search", {"groups": 1})])
@pytest.mark.parametrize("seed", range(4))
def test_with_a_beam_per_option_it_finds_the_most_probable_one_like_static(name, knobs, seed):
    model, options = lopsided(seed), "|".join(OPTIONS)
    best = max(OPTIONS, key=lambda option: chance(model, option))
    found = answer(name, ("choice", {"options": options}), model, [START], beams=8, length_exponent=0.0, **knobs)
    assert found.text == best == answer("static", (), model, [START], items=options, beams=8).text
    assert found.reason == "end" and set(found.origins) == {"sampled"}


@pytest.mark.refuses("beam_search")
def test_renormalising_over_the_allowed_tokens_finds_other_texts(monkeypatch):
    monkeypatch.setattr(
        "strategies.search.beam_search.log_probabilities",
        lambda rows: torch.cat([row.scores for row in rows]).log_softmax(-1),
    )
    assert any(
        answer("beam_search", ("choice", {"options": "|".join(OPTIONS)}), model, [START], beams=8).text
        != max(OPTIONS, key=lambda option: chance(model, option) / (len(option) + 1))
        for model in map(lopsided, range(4))
    )


@pytest.mark.oracle("best_of_n")
@pytest.mark.parametrize("name", ["best_of_n", "self_consistency"])
def test_forced_tokens_and_the_end_count_in_the_score_of_a_sample(name):
    """Of equally frequent texts, the one the model finds more probable wins, even if most of it was forced."""
    def scores(context: tuple[int, ...]) -> torch.Tensor:
        """a or b, of equal chance; what is forced after an a is a thousand times less probable than after a b."""
        row = torch.full((len(LETTERS),), -40.0, dtype=torch.float64)
        a, b, c, d = LETTERS.convert_tokens_to_ids(list("abcd"))
        row[[a, b]] = math.log(0.499) if context[-1] == START else math.log(0.2)
        row[c], row[d] = math.log(1e-4), math.log(0.3)
        row[END] = math.log(0.1)
        return row

    model = TableModel(tokenizer=LETTERS, rule=scores)
    knobs = {"n": 12, "score": "sum"} if name == "best_of_n" else {"n": 12, "answer": "text"}
    found = answer(name, ("choice", {"options": "acc|bdd"}), model, [START], **knobs)
    assert found.reason == "end" and found.origins == ["sampled"] * 4
    assert name != "best_of_n" or found.text == "bdd"


def test_a_rollout_of_adadec_under_a_grammar_is_scored_among_all_tokens():
    """"c" leads to tokens the model would write, "a" to a forced one that it would not."""
    a, b, c, d = LETTERS.convert_tokens_to_ids(list("abcd"))

    def scores(context: tuple[int, ...]) -> torch.Tensor:
        row = torch.full((len(LETTERS),), -30.0, dtype=torch.float64)
        if context[-1] == START:
            row[[a, c]] = torch.tensor([0.55, 0.45], dtype=torch.float64).log()
        else:
            row[d] = 0.0
        return row

    model = TableModel(tokenizer=LETTERS, rule=scores)
    constraint = ("choice", {"options": "ab|cd"})
    assert answer("greedy", constraint, model, [START]).text == "ab"
    assert answer("adadec", constraint, model, [START], tau=0.0, width=2, depth=1).text == "cd"


def test_log_probabilities_of_beams_are_the_models_own():
    model = lopsided(0)
    seen = []
    inner = beams.log_probabilities

    def watched(rows):
        seen.append((inner(rows), torch.cat([row.raw for row in rows]).log_softmax(-1)))
        return seen[-1][0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("strategies.search.beam_search.log_probabilities", watched)
        answer("beam_search", ("choice", {"options": "|".join(OPTIONS)}), model, [START])
    for found, own in seen:
        legal = found > -math.inf
        assert legal.any() and not legal.all() and torch.equal(found[legal], own[legal])
