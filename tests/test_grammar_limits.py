"""Malicious constraints that try to crash or stall the page: each ends in a sentence, in bounded time, and the
next grammar compiles.
"""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag
from time import perf_counter, thread_time

import pytest
from llguidance import LLTokenizer
from tables import TableModel
from toys import byte_tokenizer

from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.lane import Limits
from playground.decoding.session import Models, Prompt, prepare
from playground.engine import grammar_limits as limits
from playground.engine import grammar_matcher as engine_module
from playground.engine.grammar_client import Compiler, ContentCache, Vocabulary, compiled_tables
from playground.engine.grammar_compiler import compile_grammar
from playground.engine.grammar_matcher import GrammarEngine
from playground.engine.lalr import Parser, table_of
from playground.engine.schema_subset import check_size
from playground.errors import Refusal
from playground.events import Failed

ROOT = Path(__file__).resolve().parent.parent
# the last one allows for other load
LATEST = limits.SLOT_SECONDS + limits.WALL_SECONDS + limits.REPEATED_SECONDS + 2
NORMAL = ("lark", 'start: "tea" | "coffee"')
LONG = limits.SOURCE_CHARACTERS + 1


def lark_chain(rules: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(rules)) + f'\nr{rules}: "a"'


def gbnf_chain(rules: int) -> str:
    return "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(rules)) + f'\nr{rules} ::= "a"'


def reference_chain(length: int, around: Callable[[dict], dict] = lambda reference: reference) -> str:
    links = {f"d{i}": around({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}})


def listed(reference: dict) -> dict:
    return {"type": "array", "items": reference}


PRIMES = [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]
NESTED = '{"type":"array","items":' * 900 + "{}" + "}" * 900
ATTACKS = {
    "lark: a chain of 5,000 rules": ("lark", "source", lark_chain(5000), "nested too deeply|processor time"),
    "lark: a chain of 5,000 terminals": (
        "lark",
        "source",
        lark_chain(5000).replace("r", "R").replace("staRt", "start"),
        "nested too deeply|processor time",
    ),
    "lark: 20,000 brackets": ("lark", "source", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply"),
    "lark: a huge repeat": ("lark", "source", 'start: "a"{1000000}', "short enough to follow|processor time"),
    "lark: only recursion": ("lark", "source", "start: start", "no finite text"),
    "lark: half of a surrogate pair": ("lark", "source", 'start: "\ud800"', "surrogate"),
    "lark: a NUL character": ("lark", "source", 'start: "\0"', "NUL"),
    "lark: a schema with a large prime": (
        "lark",
        "source",
        'start: %json {"type":"integer","multipleOf":1000003}',
        "processor time|memory",
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
    "syncode: too long": ("syncode", "source", 'start: "a"' + " " * LONG, "characters, and at most"),
}


@pytest.fixture(scope="module")
def model() -> TableModel:
    return TableModel(tokenizer=byte_tokenizer(merges=80), spread=0.0)


@pytest.fixture
def own() -> Compiler:
    made = Compiler()
    yield made
    made.close()


def said(model: TableModel, recipe: LaneConfig, length: int = 4) -> str:
    """The failure of a page run of one lane; empty if there is none. `prepare` and the run are the page's."""
    session = prepare(Models(model), [recipe], Prompt("Once"), Limits(max_new_tokens=length))
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


# --- the compiler process ---

def test_the_subprocess_compiles_the_same_grammars_and_each_only_once(model, monkeypatch):
    asked = []
    real = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda self, *order: asked.append(order[0]) or real(self, *order))
    engine = GrammarEngine(model.tokenizer, model.vocabulary, sorted(model.end_ids))
    assert engine.compile(*NORMAL) is engine.compile(*NORMAL)
    assert compiled_tables("start: A\nA: /once/") is compiled_tables("start: A\nA: /once/")
    assert asked == ["lark", "syncode"]


def test_a_killed_compiler_is_started_again(model, own):
    vocabulary = _vocabulary(model)
    own.compile(*NORMAL, vocabulary, vocabulary.digest)
    first = own.pid
    os.kill(first, signal.SIGKILL)
    assert "text" in own.compile(*NORMAL, vocabulary, vocabulary.digest)
    assert own.pid != first


def test_a_compiler_killed_in_the_middle_of_a_compilation_gives_a_sentence_or_a_grammar(model, own):
    vocabulary = _vocabulary(model)
    own.compile(*NORMAL, vocabulary, vocabulary.digest)
    with ThreadPoolExecutor() as visitors:
        slow = visitors.submit(own.compile, "regex", "a{1000000}", vocabulary, vocabulary.digest)
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(Refusal, match="cannot be used"):
            slow.result(LATEST)
    assert "text" in own.compile(*NORMAL, vocabulary, vocabulary.digest)


def test_a_crash_takes_neither_the_compiler_nor_another_compilation_with_it(model, own):
    vocabulary = _vocabulary(model)
    own.compile(*NORMAL, vocabulary, vocabulary.digest)
    first = own.pid
    with ThreadPoolExecutor() as visitors:
        bad = visitors.submit(own.compile, "lark", lark_chain(5000), vocabulary, vocabulary.digest)
        good = visitors.submit(own.compile, *NORMAL, vocabulary, vocabulary.digest)
        assert "text" in good.result(LATEST)
        with pytest.raises(Refusal):
            bad.result(LATEST)
    assert own.pid == first


def test_a_slow_grammar_does_not_hold_up_another_visitors(model, own):
    vocabulary = _vocabulary(model)
    own.compile(*NORMAL, vocabulary, vocabulary.digest)
    with ThreadPoolExecutor() as visitors:
        slow = visitors.submit(own.compile, "regex", "a{1000000}", vocabulary, vocabulary.digest)
        own.compile(*NORMAL, vocabulary, vocabulary.digest)
        assert not slow.done()
        with pytest.raises(Refusal):
            slow.result(LATEST)


def test_a_visitor_is_refused_when_all_places_are_taken(own, monkeypatch):
    monkeypatch.setattr(limits, "SLOT_SECONDS", 0.01)
    for _ in range(limits.SLOTS):
        own._slots.acquire()
    with pytest.raises(Refusal, match="try again"):
        own.compile(*NORMAL)


def test_closing_leaves_no_process_and_no_descriptor(model):
    vocabulary, descriptors = _vocabulary(model), lambda: len(os.listdir("/dev/fd"))
    Compiler().close()
    before = descriptors()
    compiler = Compiler()
    for _ in range(3):
        compiler.compile(*NORMAL, vocabulary, vocabulary.digest)
        with pytest.raises(Refusal):
            compiler.compile("lark", lark_chain(5000), vocabulary, vocabulary.digest)
    pid = compiler.pid
    compiler.close()
    assert descriptors() == before
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_compiler_ends_with_the_process_that_started_it():
    program = (
        "import sys; from playground.engine.grammar_client import Compiler; made = Compiler(); made.compile('syncode',"
        " 'start: /a/');print(made.pid, flush=True); import os; os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    pid, deadline = int(done.stdout), perf_counter() + 10
    while perf_counter() < deadline and _lives(pid):
        Flag().wait(0.02)
    assert not _lives(pid)


def test_the_compiler_needs_neither_torch_nor_transformers():
    program = (
        "import sys, playground.engine.grammar_server; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_a_grammar_whose_parser_takes_long_to_build_is_refused_before_it_is_built_here(model, monkeypatch):
    monkeypatch.setattr(limits, "REPEATED_SECONDS", -1.0)
    tokenizer = LLTokenizer(_vocabulary(model).description, n_vocab=model.vocabulary)
    with pytest.raises(Refusal, match="to build"):
        compile_grammar(tokenizer, *NORMAL)


# --- small parts ---

def test_concurrent_requests_compile_a_grammar_once():
    cache, begun, going, made = ContentCache(4, 100, lambda result: 1), Flag(), Flag(), []

    def make_it() -> object:
        made.append(object())
        begun.set()
        going.wait(10)
        return made[-1]

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.get, "key", make_it)
        begun.wait(10)
        second = threads.submit(cache.get, "key", make_it)
        going.set()
        assert first.result() is second.result() and len(made) == 1


def test_the_cache_evicts_least_recently_used_entries_by_count_and_size():
    cache, made = ContentCache(3, 10, lambda result: result), []
    for key, weight in ((1, 1), (2, 1), (1, 1), (3, 1), (4, 1), (1, 1), (5, 9), (1, 1), (4, 1)):
        cache.get(key, lambda key=key, weight=weight: made.append(key) or weight)
    assert made == [1, 2, 3, 4, 5, 4]


def test_failures_are_not_cached():
    cache = ContentCache(3, 10, lambda result: 1)
    with pytest.raises(Refusal):
        cache.get("key", lambda: _raise(Refusal("no")))
    assert cache.get("key", lambda: 7) == 7


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"multipleOf": 0.25}},
        },
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"multipleOf": 86400},
        {"multipleOf": 1e9},
        {"maxLength": 10_000},
        {"enum": [None] * 5000},
    ],
)
def test_ordinary_schemas_are_within_the_bounds(schema):
    check_size(schema)


@pytest.mark.parametrize(
    "schema, says",
    [
        ({"multipleOf": 10_001}, "multipleOf"),
        ({"enum": [1] * 5001}, "entries in enum"),
        ({"properties": {str(i): {} for i in range(1001)}}, "properties"),
        ({"pattern": "a" * 5001}, "pattern"),
        ({"maxLength": 10_001}, "maxLength"),
        ({"const": [0] * 20_001}, "values in all"),
        ({"minimum": 10**120}, "digits"),
    ],
)
def test_a_schema_beyond_a_bound_is_refused_with_the_bound(schema, says):
    with pytest.raises(Refusal, match=says):
        check_size(schema)


def test_a_parser_from_tables_accepts_what_its_grammar_says():
    parser = Parser(
        table := table_of(compiled_tables('start: "a" part* "b"\npart: "c" | "(" part ")"')), (table.first,)
    )
    for terminal, accepted in (
        ("A", {"B", "C", "LPAR"}),
        ("LPAR", {"C", "LPAR"}),
        ("C", {"RPAR"}),
        ("RPAR", {"B", "C", "LPAR"}),
        ("B", {"$END"}),
    ):
        parser = parser.fed(terminal)
        assert parser.accepts() == accepted
    assert parser.fed("A") is None and parser.fed("$END") is not None


def _raise(error: Exception) -> None:
    raise error


def _vocabulary(model: TableModel) -> Vocabulary:
    return Vocabulary(engine_module._description(model.tokenizer), model.vocabulary, tuple(sorted(model.end_ids)))


def _lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
