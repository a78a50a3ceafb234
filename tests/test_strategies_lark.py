"""Lark grammar against all texts of its language, and wrong variants against the same check."""
from __future__ import annotations

import ast
import json
import keyword
import sqlite3
from datetime import date

import pytest
from lark import Lark as LarkParser
from lark.exceptions import LarkError
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from playground.algorithms.constrained.bundled_grammars import NAMES
from playground.bench.schemas.random_writer import RandomWriter
from playground.contract import Constraint, find, make
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine
from support.byte_grammars import TOKENIZER, TOKENS, accepts, engine  # noqa: F401 - a fixture
from support.dates import is_day
from support.gbnf_texts import DESCRIBED
from support.languages import byte_engine, language, spelled  # noqa: F401 - a fixture
from support.wrong_variants import refused

Lark = find("lark")
GRAMMARS = [
    'start: "a" inner? "b"\ninner: "a" "b" | "b"',
    'start: item ("+" item)~0..2\nitem: "a" | "b" "a"~1..2',
]


def reads(parser: LarkParser, text: str) -> bool:
    try:
        parser.parse(text)
    except LarkError:
        return False
    return True


def check_lark(cls: type[Constraint], engine: GrammarEngine) -> None:
    """The lark package's own Earley parser accepts exactly what can be written."""
    for source, letters, longest in zip(GRAMMARS, ("ab", "+ab"), (5, 5)):
        found, parser = (
            language(engine, cls(source=source)),
            LarkParser(source, parser="earley", lexer="dynamic_complete"),
        )
        short = {text for text in found if len(text) <= longest}
        assert short == {text for text in spelled(letters, longest) if reads(parser, text)}
        assert all(reads(parser, text) for text in found)


class AsManyAsOneLikes(Lark):
    def grammar(self):
        return "lark", self.source.replace("~0..2", "~0..3").replace("inner?", "inner~0..2")


class AtLeastOne(Lark):
    def grammar(self):
        return "lark", self.source.replace("~0..2", "~1..2").replace("inner?", "inner")


class FirstAlternativeOfEachRule(Lark):
    def grammar(self):
        return "lark", "\n".join(line.split(" | ")[0] for line in self.source.splitlines())


@pytest.mark.oracle("lark")
def test_a_lark_grammar_accepts_what_larks_own_parser_accepts(byte_engine):
    check_lark(Lark, byte_engine)


@pytest.mark.refuses("lark")
@pytest.mark.parametrize("wrong", [AsManyAsOneLikes, AtLeastOne, FirstAlternativeOfEachRule])
def test_a_wrong_lark_grammar_is_refused(byte_engine, wrong):
    refused(check_lark, wrong, byte_engine)


LEAP = ("1904", "2000", "2024", "2096")


# --- bundled grammars ---

def is_sql(text: str) -> None:
    try:
        sqlite3.connect(":memory:").execute(f"EXPLAIN {text}")
    except sqlite3.Error as error:  # missing tables are no fault of the grammar
        assert not any(fault in str(error) for fault in ("syntax", "unrecognized", "incomplete")), error


READERS = {
    "json": json.loads,
    "arithmetic": lambda text: ast.parse(text, mode="eval"),
    "date": date.fromisoformat,
    "sql": is_sql,
    "python": ast.parse,
}


def test_every_bundled_grammar_has_an_independent_parser():
    assert READERS.keys() == set(NAMES) and make("lark").grammar()[1] != make("lark", ready="json").grammar()[1]


@pytest.mark.oracle("lark")
@pytest.mark.parametrize("name", READERS)
def test_text_under_a_bundled_grammar_is_accepted_by_the_real_parser(engine, name):
    grammar, scribbler = engine.compile(*make("lark", ready=name).grammar()), RandomWriter(TOKENS, len(TOKENIZER))
    written = [scribbler.write(grammar.matcher(), seed, 120) for seed in range(30)]
    texts = {TOKENS.decode(ids) for ids in written if ids is not None}
    assert len(texts) >= 12
    for text in texts:
        READERS[name](text)


SENTENCES = {
    "json": (['{"a": [1, -2.5e3, null], "b": "\\u00e9"}', "true"], ["{'a': 1}", "01", '{"a": 1,}', '"\n"']),
    "arithmetic": (["(12 + 7) * -3", "1.5 / 2"], ["12 +", "2 ** 3", "(1", "007"]),
    "date": (
        ["2024-12-31", "1999-04-30", *(f"{year}-02-29" for year in LEAP)],
        ["2024-13-01", "1999-04-31", "1900-02-29", "2023-02-29", "2024-02-30", "99-01-01"],
    ),
    "sql": (
        [
            (
                "SELECT name, COUNT(*) AS n FROM birds WHERE age >= 3 AND (x = 'it''s' OR NOT z < 2) GROUP BY name"
                " ORDER BY n DESC LIMIT 3"
            ),
            "SELECT * FROM a LEFT JOIN b ON a.x = b.y WHERE t IN ('a', 3)",
            "SELECT fromage FROM wherever",
        ],
        [
            "SELECT FROM a",
            "SELECT select FROM a",
            "DROP TABLE a",
            "SELECT * FROM a LIMIT 0; DROP TABLE a",
            "SELECT 'a FROM b",
        ],
    ),
    "python": (
        [
            "def f(x):\n    if x > 3:\n        return x\n    return x + 1\nprint(f(2))\n",
            'x = "a"\nfor i in range(3):\n    x += i\n',
            "iffy = [1, forx]\n",
        ],
        ["return 3\n", "if x:\npass\n", "x = 007\n", "x = \n", "  x = 1\n"],
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_bundled_grammar_accepts_the_expected_sentences_only(engine, name):
    legal, illegal = SENTENCES[name]
    assert [text for text in legal if not accepts(engine, make("lark", ready=name), text)] == []
    assert [text for text in illegal if accepts(engine, make("lark", ready=name), text)] == []


def test_keywords_are_not_accepted_as_names(engine):
    python, sql = make("lark", ready="python"), make("lark", ready="sql")
    assert [word for word in keyword.kwlist if accepts(engine, python, f"{word} = 1\n")] == []
    for word in ("select", "from", "order", "index", "like", "returning", "window", "replace", "key"):
        if accepts(engine, sql, f"SELECT {word} FROM {word}"):
            is_sql(f"SELECT {word} FROM {word}")


# --- GBNF ---

@pytest.mark.parametrize(
    "name, text",
    [
        ("letters by number", "éA日本"),
        ("any character is a line break too", "<a\n>"),
        ("brackets and escapes", "\\[]\n+]"),
        ("nothing special in a class", "&~,!"),
    ],
)
def test_the_converter_alone_would_reject_or_misread_it(engine, name, text):
    try:
        assert not accepts(engine, make("lark", source=gbnf_to_lark(DESCRIBED[name][0])), text)
    except (Refusal, GbnfToLarkError):
        pass


@pytest.mark.parametrize("source", [
    'start: W "end"\nW: /[a-z]+/',
    'start: line+\nline: ID "=" ID "\\n"\nID: /[a-z]+[ \\n]*/',
    'start: "(" start ")" | W "a"\nW: /[ab]+/',
    'start: "x" | W "end"\nW: /[a-z]+/',  # only x can be completed, and every other letter is a trap
    'start: item ("," item)* "."\nitem: W | N "9"\nN: /[0-9]+/\nW: /[a-z]+/',
])
def test_a_lark_grammar_whose_terminals_never_stop_is_refused_before_anything_runs(engine, source):
    with pytest.raises(Refusal, match="read as far as it goes") as refused:
        engine.compile("lark", source)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("source, text", [
    ('start: W " end"\nW: /[a-z]+/', "the end"),
    ('start: W | W "end"\nW: /[a-z]+/', "weekend"),  # the second branch adds nothing, and no text is lost in it
    ('start: "x" | "y" W "end"\nW: /[A-Z]+/', "yUend"),
    ('start: "(" start ")" | W | "0" N\nN: /[0-9]+/\nW: /[a-z]+/', "((012))"),
    ('start: W "end"\nW: /[a-c]+/', "abend"),
    ('start: W+ "end"\nW: /[a-z]+/\nWS: / +/\n%ignore WS', "a b end"),
    ('start: A B\nA: /a*/\nB: /b+/', "b"),
    ('start: W\nW: /[a-z]+/ & /.{3}/', "abc"),
])
def test_a_lark_grammar_with_a_parsable_text_is_accepted(engine, source, text):
    assert accepts(engine, make("lark", source=source), text)


SOUND = {"lark": [({"ready": "date"}, is_day)]}
