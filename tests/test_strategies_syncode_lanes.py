"""Lanes under SynCode, from one run to the next, and what is refused."""
from __future__ import annotations

import pytest
import torch
from tables import TableModel, write

from playground.contract import make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Figure, Note
from playground.grammar import limits
from strategies.constrained import syncode
from strategies.constrained.syncode import Terminals
from strategies.constrained.syncode.mask_store import Lookup, MaskStore, StoredMasks, stored
from support.syncode_grammars import EXACT, SOURCES, SUM, TOKENIZER, TOKENS

# --- lanes ---

def models(seed: int = 0, spread: float = 2.0) -> dict:
    return {
        "target": TableModel(tokenizer=TOKENIZER, seed=seed, spread=spread),
        "draft": TableModel(tokenizer=TOKENIZER, seed=seed + 9, spread=spread),
    }


def lane(extra: tuple, decoder: str = "greedy", seed: int = 0, length: int = 24):
    return write(assemble(LaneConfig(decoder, {}, [extra])), models(seed), [54, 71], Limits(seed, length), Draws(seed))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["greedy", "sample", "speculative"])
@pytest.mark.parametrize("name", EXACT)
def test_with_undecided_tokens_checked_the_text_equals_the_engines(name, decoder):
    for seed in range(4):
        alone, looked_up = lane(("lark", SOURCES[name]), decoder, seed), lane(("syncode", SOURCES[name]), decoder, seed)
        assert (looked_up.tokens, looked_up.reason) == (alone.tokens, alone.reason)


def undecided_written(**knobs) -> int:
    """How many tokens of 12 texts the store had not decided."""
    count = 0
    for seed in range(12):
        made = make("syncode", ready="arithmetic")
        made.begin(0, TOKENS.bytes)
        written = lane(("syncode", {"ready": "arithmetic", **knobs}), "sample", seed).tokens[2:]
        found = [made.looked_up(made._text(written[:place]), len(TOKENIZER)) for place in range(len(written))]
        count += sum(bool(place.undecided[token]) for place, token in zip(found, written))
    return count


@pytest.mark.slow
def test_masked_tokens_are_never_written_and_checked_ones_sometimes():
    assert undecided_written(undecided="banned") == 0 < undecided_written()


def test_text_the_lexer_cannot_follow_is_left_to_the_engine_if_there_is_one(monkeypatch):
    monkeypatch.setattr(Terminals, "advance", lambda self, at, byte: None)
    assert lane(("syncode", {"ready": "arithmetic"})).tokens == lane(("lark", {"ready": "arithmetic"})).tokens
    with pytest.raises(AssertionError, match="no token of this model here"):  # how these lanes report a failure
        lane(("syncode", {"ready": "arithmetic", "undecided": "banned"}))


def test_an_all_permissive_store_still_writes_valid_text(monkeypatch):
    everything = torch.ones(len(TOKENIZER), dtype=torch.bool)
    monkeypatch.setattr(MaskStore, "then", lambda self, *key: Lookup(everything, everything))
    monkeypatch.setattr(MaskStore, "inside", lambda self, *key: everything)
    assert lane(("syncode", {"ready": "json"})).tokens == lane(("lark", {"ready": "json"})).tokens


def test_trusting_an_all_permissive_store_is_detected(monkeypatch):
    everything = torch.ones(len(TOKENIZER), dtype=torch.bool)
    monkeypatch.setattr(
        syncode.SynCode, "narrow", lambda self, masks, histories: torch.stack([everything for _ in masks])
    )
    with pytest.raises(AssertionError, match="does not allow"):
        lane(("syncode", {"ready": "json"}))


def recorded(**knobs) -> list:
    target, draft = models().values()
    session = prepare(
        Models(target, draft), [LaneConfig("greedy", {}, [("syncode", knobs)])], Prompt("The bird"), Limits(0, 8)
    )
    return [stamped.event for stamped in session]


def test_lookups_and_their_deciders_are_reported_at_every_position():
    events = recorded()
    matrices = [event for event in events if isinstance(event, Figure) and event.shape == "matrix"]
    decided = [event.data["series"] for event in events if isinstance(event, Figure) and event.shape == "scalar"]
    assert "NUMBER '+'" in [row for matrix in matrices for row in matrix.data["rows"]]
    assert all(series["of them legal by the engine"] <= series["undecided"] for series in decided) and any(
        series["undecided"] for series in decided
    )
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("Lexemes" in note and "may grow" in note for note in notes) and not any(
        "engine refused" in note for note in notes
    )


def test_overruling_by_the_engine_is_reported(monkeypatch):
    monkeypatch.setattr(MaskStore, "inside", lambda self, *key: torch.ones_like(self.lengths, dtype=torch.bool))
    assert any("The engine refused" in event.text for event in recorded() if isinstance(event, Note))


# --- from one run to the next ---

def test_a_second_run_with_the_same_grammar_and_tokenizer_reuses_the_masks(monkeypatch):
    made, inner = [], MaskStore._made
    monkeypatch.setattr(MaskStore, "_made", lambda self, *key: made.append(key) or inner(self, *key))
    source = SUM.replace("1,3", "1,7")  # used by no other test
    first = lane(("syncode", {"source": source})).tokens
    assert made
    made.clear()
    assert lane(("syncode", {"source": source})).tokens == first and not made


def test_stores_are_cached_by_grammar_and_vocabulary_with_a_limit():
    spelled = [b"a", b"b", b""]
    assert stored("x", spelled) is stored("x", list(spelled))
    assert stored("x", spelled) is not stored("y", spelled) is not stored("y", [b"a", b"c", b""])
    first = stored("x", spelled)
    for number in range(limits.STORES):
        stored(f"z{number}", spelled)
    assert stored("x", spelled) is not first


def test_grown_stores_are_dropped_from_the_cache(monkeypatch):
    first = stored("grown", [b"a", b"b"])
    monkeypatch.setattr(StoredMasks, "size", limits.STORE_BYTES)
    stored("next", [b"a", b"b"])
    assert stored("grown", [b"a", b"b"]) is not first


def test_it_does_not_claim_to_save_the_engines_mask():
    assert "save no time" in make("syncode").__doc__ and "not parsed" not in make("syncode").__doc__


# --- refusals ---

@pytest.mark.parametrize(
    "source, says",
    [
        ('start: a | b\na: "x"\nb: "x"', "Reduce/Reduce"),
        ('start: "a" start? | start "b"', "conflict"),
        ("start: /a(?=b)/", "byte by byte"),
        ("start: /a*/", "may be empty"),
        ("start: x", "SynCode cannot read"),
    ],
)
def test_grammars_it_cannot_follow_are_refused_with_the_reason(source, says):
    with pytest.raises(Refusal, match=says):
        Terminals(source)


def test_without_the_library_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lark", None)
    with pytest.raises(Refusal, match="pip install"):
        Terminals(SUM)
