"""Any grammar is compiled or refused with a sentence, and its process lives."""
from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from playground.contract import make
from playground.errors import Refusal
from support.fuzzing import changed, damaged, fuzz, texts

ROOT = Path(__file__).parents[1]
LONGEST_GRAMMAR = 4000  # characters
COMPILED = 20.0  # seconds in which such a grammar is compiled or refused


def _compile_in_turn(pipe: Any) -> None:
    """Compile what comes through a pipe and report the outcome; runs in a child process."""
    from transformers import AutoTokenizer

    from playground.grammar.matcher import GrammarEngine
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "models" / "pocket")
    engine = GrammarEngine(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    while True:
        kind, source = pipe.recv()
        try:
            if kind == "syncode":
                make(kind, source=source).begin(0, lambda token: tokenizer.decode([token]).encode())
            matcher = engine.compile("lark" if kind == "syncode" else kind, source).matcher()
            matcher.mask(), matcher.forced()
            pipe.send("compiled")
        except Refusal:
            pipe.send("refused")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


class Compiler:
    """A child process that compiles grammars; one that dies or takes too long is replaced."""

    def __init__(self) -> None:
        self.process: multiprocessing.Process | None = None

    def compile(self, kind: str, source: str) -> str:
        """The outcome: compiled, refused, died, too slow, or an error."""
        if self.process is None or not self.process.is_alive():
            self._start()
        self.pipe.send((kind, source))
        if not self.pipe.poll(COMPILED):
            self.stop()
            return "too slow"
        try:
            return self.pipe.recv()
        except EOFError:
            self.stop()
            return "died"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_compile_in_turn, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.send(("regex", "a"))
        assert self.pipe.poll(120) and self.pipe.recv() == "compiled"


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.stop()


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 5},
        "b": {"$ref": "#/$defs/n"},
        "c": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3},
    },
    "$defs": {"n": {"type": "integer", "minimum": 1, "multipleOf": 3}},
    "required": ["a"],
    "anyOf": [{"minProperties": 1}],
    "additionalProperties": False,
}
LARK = 'start: item ("," item)*\nitem: WORD | NUMBER | "(" start ")"\nWORD: /[a-z]{1,5}/\nNUMBER: /[0-9]+/\n%ignore / /'
GBNF = 'root ::= item ("," item)*\nitem ::= word | [0-9]+ | "(" root ")"\nword ::= [a-z] [a-z]*\n'
PATTERNS = [
    "[0-9]{1,3}",
    "(a|b)*c",
    "\\d+(\\.\\d+)?",
    "(?i)x",
    "[^\\W]",
    "a{2,}",
    "(?=a)b",
    "\\p{L}+",
    "^$",
    "(a*)*b",
    "\\1",
    ".{0,20}",
]
sources = st.one_of(
    st.tuples(st.just("json_schema"), changed(SCHEMA).map(json.dumps)),
    st.tuples(
        st.sampled_from(["lark", "syncode"]), damaged(LARK).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
    ),
    st.tuples(st.just("gbnf"), damaged(GBNF).map(lambda raw: raw.decode("utf-8", "surrogateescape"))),
    st.tuples(st.just("regex"), st.lists(st.sampled_from(PATTERNS) | texts, max_size=4).map("".join)),
    st.tuples(st.just("choice"), st.lists(texts, max_size=4).map("|".join)),
).map(lambda source: (source[0], source[1][:LONGEST_GRAMMAR]))


@pytest.mark.slow
@fuzz
@given(source=sources)
# llguidance panics, which is a BaseException
@example(source=("json_schema", json.dumps({"required": {"a" * 97 + "é": 1}})))
@example(source=("regex", "\ud800"))
def test_any_grammar_is_compiled_or_refused_and_the_process_lives(compiler: Compiler, source: tuple[str, str]):
    assert compiler.compile(*source) in ("compiled", "refused")
