"""The process that compiles grammars: it is stopped in time, restarted, and leaves nothing behind."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag
from time import perf_counter

import pytest
from llguidance import LLTokenizer
from tables import TableModel

from playground.confined.child import BrokenLimit
from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar import matcher as engine_module
from playground.grammar.client import Compiler, ContentCache, Vocabulary, compiled_tables
from playground.grammar.compiler import compile_grammar
from playground.grammar.lark.lalr import Parser, table_of
from playground.grammar.matcher import GrammarEngine
from playground.grammar.schema.subset import check_size
from support.grammar_compilers import LATEST, NORMAL, lark_chain, model  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def own() -> Compiler:
    made = Compiler()
    yield made
    made.close()


# --- the compiler process ---

def test_the_subprocess_compiles_the_same_grammars_and_each_only_once(model, monkeypatch):
    asked = []
    real = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda self, *order: asked.append(order[0]) or real(self, *order))
    engine = GrammarEngine(model.tokenizer, model.vocabulary, sorted(model.end_ids))
    assert engine.compile(*NORMAL) is engine.compile(*NORMAL)
    assert compiled_tables("start: A\nA: /once/") is compiled_tables("start: A\nA: /once/")
    assert asked == ["lark", "syncode"]


@pytest.mark.slow
def test_a_killed_compiler_is_started_again(model, own):
    vocabulary = _vocabulary(model)
    own.compile(*NORMAL, vocabulary, vocabulary.digest)
    first = own.pid
    os.kill(first, signal.SIGKILL)
    assert "text" in own.compile(*NORMAL, vocabulary, vocabulary.digest)
    assert own.pid != first


@pytest.mark.slow
def test_a_compiler_killed_in_the_middle_of_a_compilation_gives_a_sentence_or_a_grammar(model, own):
    vocabulary = _vocabulary(model)
    own.compile(*NORMAL, vocabulary, vocabulary.digest)
    with ThreadPoolExecutor() as visitors:
        slow = visitors.submit(own.compile, "regex", "a{1000000}", vocabulary, vocabulary.digest)
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(Refusal, match="cannot be used"):
            slow.result(LATEST)
    assert "text" in own.compile(*NORMAL, vocabulary, vocabulary.digest)


def test_a_compiler_that_does_not_start_is_no_fault_of_the_grammar(own, monkeypatch):
    def broken(*order, **options):
        raise BrokenLimit("start")

    monkeypatch.setattr(own.child, "ask", broken)
    with pytest.raises(Refusal, match="^The process that compiles grammars does not start: try again later.$"):
        own.compile("syncode", "start: /a/")


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


@pytest.mark.slow
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
        own.child._places.acquire()
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


@pytest.mark.slow
def test_the_compiler_ends_with_the_process_that_started_it():
    program = (
        "import sys; from playground.grammar.client import Compiler; made = Compiler(); made.compile('syncode',"
        " 'start: /a/');print(made.pid, flush=True); import os; os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    pid, deadline = int(done.stdout), perf_counter() + 10
    while perf_counter() < deadline and _lives(pid):
        Flag().wait(0.02)
    assert not _lives(pid)


def test_the_compiler_needs_neither_torch_nor_transformers():
    program = (
        "import sys, playground.confined.server, playground.grammar.work as work; work.warm();"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
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
