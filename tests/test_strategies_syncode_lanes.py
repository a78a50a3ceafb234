"""Lanes under SynCode, from one run to the next, and what is refused."""
from __future__ import annotations

import pytest
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
from playground.grammar.matcher import Matcher
from strategies.constrained.syncode import Terminals
from strategies.constrained.syncode.mask_store import Lookup, MaskStore, StoredMasks, stored
from support.syncode_grammars import SOURCES, SUM, TOKENIZER, TOKENS

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
@pytest.mark.parametrize("name", SOURCES)
def test_with_undecided_tokens_checked_the_text_equals_the_engines(name, decoder):
    for seed in range(4):
        alone, looked_up = lane(("lark", SOURCES[name]), decoder, seed), lane(("syncode", SOURCES[name]), decoder, seed)
        assert (looked_up.tokens, looked_up.reason) == (alone.tokens, alone.reason)


def undecided_written(**knobs) -> int:
    """How many tokens of 12 texts the store had not decided."""
    count = 0
    for seed in range(12):
        strategy = make("syncode", ready="arithmetic")
        strategy.begin(0, TOKENS.bytes)
        matcher = strategy.matcher(models()["target"].grammars.compile(*strategy.grammar()))
        for token in lane(("syncode", {"ready": "arithmetic", **knobs}), "sample", seed).tokens[2:]:
            count += bool(strategy.masks.lookup(matcher.place.at).undecided[token])
            assert matcher.advance(token)
    return count


@pytest.mark.slow
def test_masked_tokens_are_never_written_and_checked_ones_sometimes():
    assert undecided_written(undecided="banned") == 0 < undecided_written()


def test_text_the_lexer_cannot_follow_is_left_to_the_engine_if_there_is_one(monkeypatch):
    monkeypatch.setattr(Terminals, "advance", lambda self, at, byte: None)
    assert lane(("syncode", {"ready": "arithmetic"})).tokens == lane(("lark", {"ready": "arithmetic"})).tokens
    with pytest.raises(AssertionError, match="no token of this model here"):  # how these lanes report a failure
        lane(("syncode", {"ready": "arithmetic", "undecided": "banned"}))


def test_the_engine_stops_a_store_that_is_sure_of_too_much(monkeypatch):
    monkeypatch.setattr(MaskStore, "allowed", lambda store, *key: Lookup(store.lengths > 0, store.lengths < 0))
    with pytest.raises(AssertionError, match="does not allow"):
        lane(("syncode", {"ready": "json"}))


@pytest.mark.parametrize("engine", ["confirms", "compares"])
def test_the_engine_computes_masks_only_to_compare(engine, monkeypatch):
    computed, inner = [], Matcher.bitmask
    monkeypatch.setattr(Matcher, "bitmask", lambda matcher: computed.append(1) or inner(matcher))
    lane(("syncode", {"ready": "json", "engine": engine}))
    assert bool(computed) == (engine == "compares")


def recorded(**knobs) -> list:
    target, draft = models().values()
    session = prepare(
        Models(target, draft), [LaneConfig("greedy", {}, [("syncode", knobs)])], Prompt("The bird"), Limits(0, 8)
    )
    return [stamped.event for stamped in session]


def scalars(events: list, title: str) -> list[dict[str, float]]:
    return [event.data["series"] for event in events if isinstance(event, Figure) and event.name == title]


def test_lookups_and_what_they_saved_are_reported_at_every_position():
    events = recorded()
    matrices = [event for event in events if isinstance(event, Figure) and event.shape == "matrix"]
    assert "NUMBER '+'" in [row for matrix in matrices for row in matrix.data["rows"]]
    decided = scalars(events, "tokens by who decided")
    assert all(series["of them legal by the engine"] <= series["undecided"] for series in decided) and any(
        series["undecided"] for series in decided
    )
    saved = scalars(events, "masks so far, and what they took")
    assert saved[-1]["masks"] >= saved[-1]["lookups in the store"] > 0 == saved[-1]["computed by the engine"]
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("Lexemes" in note and "may grow" in note for note in notes)
    assert "single tokens so far" in notes[-1]


def test_a_comparison_reports_times_and_where_the_masks_differ(monkeypatch):
    events = recorded(engine="compares")
    times = scalars(events, "time of one mask, ms")
    assert times and all(series["engine"] > 0 < series["store and confirmation"] for series in times)
    assert not any("would refuse" in event.text for event in events if isinstance(event, Note))
    monkeypatch.setattr(MaskStore, "then", lambda store, *key: Lookup(store.lengths < 0, store.lengths < 0))
    assert any("and allow" in event.text for event in recorded(engine="compares") if isinstance(event, Note))


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
