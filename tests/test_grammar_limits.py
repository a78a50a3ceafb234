"""Malicious constraints that try to crash or stall the page: each ends in a sentence, in bounded time, and the
next grammar compiles.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from time import perf_counter, thread_time

import pytest
from tables import TableModel
from toys import byte_tokenizer

from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Failed
from playground.grammar import limits
from playground.grammar import matcher as engine_module
from playground.grammar.matcher import GrammarEngine
from support.grammar_compilers import LATEST, NORMAL, lark_chain, model  # noqa: F401

LONG = limits.SOURCE_CHARACTERS + 1


def gbnf_chain(rules: int) -> str:
    return "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(rules)) + f'\nr{rules} ::= "a"'


def reference_chain(length: int, around: Callable[[dict], dict] = lambda reference: reference) -> str:
    links = {f"d{i}": around({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}})


def listed(reference: dict) -> dict:
    return {"type": "array", "items": reference}


PRIMES = [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]
NESTED = '{"type":"array","items":' * 900 + "{}" + "}" * 900


def tag(begin: str = "<a>", end: str = "</a>", **constraint) -> dict:
    return {"begin": begin, "end": end, **(constraint or {"regex": "x"})}


TAGS = {
    "no tag but 50,000 brackets": ("[" * 50_000, "not valid JSON"),
    "400 of them": ([tag(f"<{i}>") for i in range(400)], "400 tags"),
    "2,000 of them": ([tag(f"<{i}>") for i in range(2000)], "characters, and at most"),
    "9,000 triggers": ({"structures": [tag()], "triggers": [f"<{i}" for i in range(9000)]}, "no trigger begins"),
    "every prefix is a trigger": ({"structures": [tag("x" * 190)], "triggers": ["x" * i for i in range(190, 0, -1)]},
                                  "never complete"),
    "a begin of 50,000 letters": ([tag("a" * 50_000)], "characters"),
    "an end of 50,000 letters": ([tag(end="a" * 50_000)], "characters"),
    "half of an escaped pair in a begin": (r'[{"begin": "\ud800", "end": "b", "regex": "x"}]', "surrogate"),
    "half of an escaped pair in an end": (r'[{"begin": "a", "end": "\udfff", "regex": "x"}]', "surrogate"),
    "half of an escaped pair in a trigger": (
        r'{"triggers": ["\ud800"], "structures": [{"begin": "a", "end": "b", "regex": "x"}]}',
        "surrogate|no tag begins",
    ),
    "half of an escaped pair in a pattern": (r'[{"begin": "a", "end": "b", "regex": "\ud800"}]', "surrogate"),
    "a NUL character in an end": ([tag(end="\0")], "NUL"),
    "64 patterns of a huge repeat": ([tag(f"<{i}>", regex="a{30000}") for i in range(64)], "processor time|too"),
    "64 schemas of a large prime": ([tag(f"<{i}>", schema={"type": "integer", "multipleOf": 9973}) for i in range(64)],
                                    "processor time|memory|too|may go on"),
    "the same begin twice": ([tag(), tag()], "more than one"),
    "a schema of 900 levels": (f'[{{"begin": "a", "end": "b", "schema": {NESTED}}}]', "levels of|cannot be used"),
    "a grammar of 3,000 rules": ([tag(lark=lark_chain(3000))], "too deeply|processor time"),
    "a GBNF of 3,000 rules": ([tag(gbnf=gbnf_chain(3000))], "3,002 rules"),
    "a choice of 5,000": ([tag(choice="|".join(map(str, range(5000))))], "5,000 options"),
    "two constraints in a tag": ([tag(regex="x", choice="y")], "one of schema"),
    "objects in place of texts": ([{"begin": {}, "end": [], "regex": "x"}], "one of schema"),
    "a number in place of a list": ({"structures": 5}, "no list"),
    "a list in place of a tag": ([[[[]]]], "one of schema"),
    "triggers that are objects": ({"structures": [tag()], "triggers": [{}]}, "no list of strings"),
    "a schema that is a text": ([tag(schema="x" * 1000)], "an object in braces"),
    "a number of 5,000 digits": (f'[{{"begin": "a", "end": "b", "schema": {{"minimum": {"9" * 5000}}}}}]', "not valid"),
}
ATTACKS = {
    "lark: a chain of 5,000 rules": ("lark", "source", lark_chain(5000), "nested too deeply|processor time"),
    "lark: a chain of 5,000 terminals": (
        "lark",
        "source",
        lark_chain(5000).replace("r", "R").replace("staRt", "start"),
        "nested too deeply|processor time",
    ),
    "lark: 20,000 brackets": ("lark", "source", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply"),
    "lark: only recursion": ("lark", "source", "start: start", "no finite text"),
    "lark: half of a surrogate pair": ("lark", "source", 'start: "\ud800"', "surrogate"),
    "lark: a NUL character": ("lark", "source", 'start: "\0"', "NUL"),
    "lark: a schema with a large prime": (
        "lark",
        "source",
        'start: %json {"type":"integer","multipleOf":1000003}',
        "digits of multipleOf",
    ),
    "json: a chain of 8,000 references": ("json_schema", "source", reference_chain(8000), "characters, and at most"),
    "json: a chain of 200 references": ("json_schema", "source", reference_chain(200), r"101 \$refs in a chain"),
    "json: 1,500 references through arrays": (
        "json_schema",
        "source",
        reference_chain(1500, listed),
        "nested too deeply|processor time",
    ),
    "json: 900 levels": ("json_schema", "source", NESTED, "levels of objects"),
    "json: multipleOf a large prime": (
        "json_schema",
        "source",
        '{"type":"integer","multipleOf":1000003}',
        "multipleOf, and at most 10,000",
    ),
    "json: several primes": ("json_schema", "source", json.dumps({"allOf": PRIMES}), "processor time|memory"),
    "json: minItems of a million": ("json_schema", "source", '{"type":"array","minItems":1000000}', "as minItems"),
    "json: an integer of 5,000 digits": ("json_schema", "source", '{"minimum":' + "9" * 5000 + "}", "not valid JSON"),
    "json: half of a surrogate pair": ("json_schema", "source", '{"const":"\ud800"}', "surrogate"),
    "json: half of an escaped pair": ("json_schema", "source", r'{"const":"\ud800"}', "cannot be used"),
    "json: 50,000 brackets": ("json_schema", "source", "[" * 50_000, "nested too deeply|cannot be used"),
    "json: no number": ("json_schema", "source", '{"minimum":NaN}', "cannot be used"),
    "regex: a huge repeat": ("regex", "pattern", "a{1000000}", "processor time|too"),
    "regex: repeats of repeats": ("regex", "pattern", "((a{1000}){1000}){1000}", "processor time|too"),
    "regex: 200,000 characters": ("regex", "pattern", "a" * 200_000, "200,000 characters"),
    "regex: half of a surrogate pair": ("regex", "pattern", "\udfff", "surrogate"),
    "gbnf: 20,000 rules": ("gbnf", "source", gbnf_chain(20_000), "characters, and at most"),
    "gbnf: 3,000 rules": ("gbnf", "source", gbnf_chain(3000), "3,002 rules"),
    "gbnf: 5,000 brackets": (
        "gbnf",
        "source",
        "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        "nested too deeply: 5,000 deep",
    ),
    "gbnf: a huge repeat": ("gbnf", "source", 'root ::= "a"{1000000}', "repeated more than"),
    "choice: 50,000 options": (
        "choice",
        "options",
        "|".join(map(str, range(50_000))),
        "characters, and at most|50,000 options",
    ),
    "choice: 5,000 options": ("choice", "options", "|".join(map(str, range(5000))), "5,000 options"),
    "choice: one of 300,000 letters": ("choice", "options", "a" * 300_000, "300,000 characters"),
    "choice: half of a surrogate pair": ("choice", "options", "yes|\ud800", "surrogate"),
    "syncode: 900 optional letters": ("syncode", "source", "start: /([a-z]?){900}b/", "too large|processor time"),
    "syncode: 22 optional parts": (
        "syncode",
        "source",
        "start: " + " ".join(f'"{chr(97 + i)}"?' for i in range(22)),
        "processor time|memory",
    ),
    "syncode: a chain of 5,000 rules": ("syncode", "source", lark_chain(5000), "cannot be used|cannot read|too large"),
    "syncode: no hexadecimal number": (
        "syncode",
        "source",
        r"start: /\xZZ/",
        "cannot be used|cannot read|byte by byte",
    ),
    "syncode: 200 terminals": (
        "syncode",
        "source",
        "start: " + " | ".join(f'"w{i}"' for i in range(200)),
        "200 terminals",
    ),
    "syncode: half of a surrogate pair": ("syncode", "source", 'start: "\ud800"', "surrogate"),
    **{
        f"tags: {name}": ("structural_tags", "source", source if isinstance(source, str) else json.dumps(source), says)
        for name, (source, says) in TAGS.items()
    },
    "syncode: too long": ("syncode", "source", 'start: "a"' + " " * LONG, "characters, and at most"),
}


def said(model: TableModel, config: LaneConfig, length: int = 4) -> str:
    """The failure of a page run of one lane; empty if there is none. `prepare` and the run are the page's."""
    session = prepare(Models(model), [config], Prompt("Once"), Limits(max_new_tokens=length))
    return next((stamped.event.message for stamped in session if isinstance(stamped.event, Failed)), "")


def constrained(name: str, knob: str, source: str, strategy: str = "greedy") -> LaneConfig:
    return LaneConfig(strategy, {}, [(name, {knob: source})])


# --- attacks, through a page run ---

@pytest.mark.parametrize("name, knob, source, says", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_ends_in_one_sentence_in_time_and_a_normal_grammar_compiles_afterwards(
    model, name, knob, source, says
):
    start = perf_counter()
    message = said(model, constrained(name, knob, source))
    took = perf_counter() - start
    assert re.search(says, message), message
    assert "\n" not in message and "Traceback" not in message and len(message) < 700
    assert took < LATEST
    assert said(model, constrained(NORMAL[0], "source", NORMAL[1])) == ""


@pytest.mark.parametrize("strategy", ["asap", "awrs", "smc", "sample"])
def test_strategies_that_follow_a_grammar_refuse_the_same_sources(model, strategy):
    message = said(model, constrained("lark", "source", lark_chain(5000), strategy))
    assert "cannot be used" in message


@pytest.mark.parametrize(
    "items, says",
    [
        ("|".join(map(str, range(20_000))), "20,000 items"),
        ("a" * 3000 + "|b", "3,000 characters"),
        ("a" * (limits.ITEMS_CHARACTERS + 1), "characters, and at most"),
        ("tea|\ud800", "surrogate"),
    ],
)
def test_a_list_of_items_is_measured_before_any_work(items, says):
    with pytest.raises(Refusal, match=says):
        make("static", items=items)


def test_many_items_beside_a_long_one_are_too_wide_a_matrix():
    with pytest.raises(Refusal, match="too many to search"):
        limits.check_rows(9000, 1500)


def test_code_beside_a_monitored_program_is_bounded():
    with pytest.raises(Refusal, match="code above the text has 20,001 characters"):
        make("monitors", above="x" * 20_001)


# --- while decoding ---

def test_a_grammar_that_becomes_too_complex_ends_the_run_with_a_sentence(model):
    source = "start: A\nA: /(.*a.{12})/ & /(.*b.{13})/ & /(.*c.{14})/"
    assert "too complex to follow" in said(model, constrained("lark", "source", source, "sample"), length=60)


def test_forced_tokens_are_found_in_bounded_time(monkeypatch):
    tokenizer = byte_tokenizer(merges=0)
    matcher = GrammarEngine(tokenizer, len(tokenizer), [0]).compile("choice", "a" * 5000).matcher()
    whole = matcher.forced()
    monkeypatch.setattr(engine_module.limits, "FORCED_SECONDS", 0.005)
    start = thread_time()
    some = matcher.forced()
    assert thread_time() - start < 1
    assert 0 < len(some) <= len(whole) and some == whole[:len(some)]


def test_masks_of_a_draft_tree_stop_at_the_deadline_of_a_step(monkeypatch):
    tokenizer = byte_tokenizer(merges=0)
    matcher = GrammarEngine(tokenizer, len(tokenizer), [0]).compile("regex", "[a-z]*").matcher()
    a = tokenizer.encode("a")[0]
    assert matcher.masks_of_tree([a] * 3, [-1, 0, 1]).any(1).all()
    monkeypatch.setattr(engine_module.limits, "STEP_SECONDS", -1.0)
    with pytest.raises(Refusal, match="for one step"):
        matcher.masks_of_tree([a] * 3, [-1, 0, 1])


def test_the_lookups_of_one_step_are_bounded_by_the_bytes_they_walk_over(model, monkeypatch):
    monkeypatch.setattr(limits, "STEP_BYTES", 100)
    assert "too much time for one step" in said(model, constrained("syncode", "source", make("syncode").source))


def test_the_memory_of_the_lookups_is_bounded(model, monkeypatch):
    monkeypatch.setattr(limits, "STORE_BYTES", 2 * len(model.tokenizer))
    assert "too much memory" in said(model, constrained("syncode", "source", make("syncode").source))
