"""Bundled grammars and GBNF allow the texts that they describe."""
from __future__ import annotations

import ast
import json
import keyword
import random
import re
import sqlite3
from datetime import date
from itertools import product

import pytest
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from toys import byte_tokenizer

from playground.algorithms.constrained.bundled_grammars import NAMES
from playground.bench.schemas.random_writer import RandomWriter
from playground.contract import make
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine
from support.byte_grammars import TOKENIZER, TOKENS, accepts, engine  # noqa: F401
from support.dates import is_day

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

LLAMA_JSON = r'''# as llama.cpp ships it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}'''
GBNF = {
    "as it comes": (LLAMA_JSON, ['{"a": [1, true], "é": "x"}', "{}"], ["[1]", '{"a": }']),
    "rules within rules": ('root ::= "a" x "b"\nx ::= "c" x | ""', ["ab", "accb"], ["a", "acc"]),
    "names with hyphens and capitals": (
        'root ::= my-rule\nmy-rule ::= "a" my-rule | theEnd\ntheEnd ::= "b" my-rule | "c"',
        ["abac"],
        ["ab"],
    ),
    "letters by number": ('root ::= "\\u00e9\\x41" [\\u4e00-\\u9fff]+', ["éA日本"], ["eA日", "éA"]),
    "any character is a line break too": ('root ::= "<" .{2,3} ">"', ["<a\n>", "<abc>"], ["<a>"]),
    "dots and hashes that are letters": (
        'root ::= "a.b#" x # a . in a remark\nx ::= "+" x | [.#]',
        ["a.b#+.", "a.b##"],
        ["axb#.", "a.b#"],
    ),
    "brackets and escapes": ('root ::= "\\\\[\\]\\n" x\nx ::= "+" x | [\\x5d\\]a]', ["\\[]\n+]"], ["\\[]\nb"]),
    "nothing special in a class": (
        'root ::= [&&] [a~~b] [+--] x\nx ::= "!" | "?" x',
        ["&~,!", "&b-?!"],
        ["&c,!", "&a.!"],
    ),
    "repeats": ('root ::= [0-9]{2,3} "-" ("ab"){2} x?\nx ::= "!" x?', ["12-abab", "123-abab!!"], ["1-abab", "12-ab"]),
    "a rule that begins with itself": ('root ::= root "a" | "b"', ["b", "baa"], ["a", "bb"]),
}


@pytest.mark.oracle("gbnf")
@pytest.mark.parametrize("source, legal, illegal", GBNF.values(), ids=GBNF)
def test_gbnf_accepts_what_llama_cpp_accepts(engine, source, legal, illegal):
    constraint = make("gbnf", source=source)
    assert [text for text in legal if not accepts(engine, constraint, text)] == []
    assert [text for text in illegal if accepts(engine, constraint, text)] == []


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
        assert not accepts(engine, make("lark", source=gbnf_to_lark(GBNF[name][0])), text)
    except (Refusal, GbnfToLarkError):
        pass


# as llama.cpp ships it, and the sentence of its documentation
ARITHMETIC = r'''root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*'''


@pytest.mark.oracle("gbnf")
def test_a_terminal_does_not_consume_what_must_follow_it(engine):
    """Greedily, `ws` would read the line break that ends a line, and `name` the word "end"."""
    arithmetic, name = make("gbnf", source=ARITHMETIC), make("gbnf", source='root ::= n "end" n?\nn ::= [a-z] n?')
    for text, legal in (("x=1\n", True), ("(a+b_2 )*3 = 14 \n\n", True), ("x=1", False), ("x=\n", False)):
        assert accepts(engine, arithmetic, text) == legal, text
    for text in ("end", "foo", "fooend", "endend", "enendd", "fooendbar", "fooen"):
        assert accepts(engine, name, text) == (re.fullmatch("[a-z]+end[a-z]*", text) is not None), text


Rule = str | tuple  # a letter, or ("seq" | "alt", parts), ("any", part), ("ref", number)


def random_rule(chance: random.Random, rules: int, depth: int = 3) -> Rule:
    kind = chance.choice(["seq", "seq", "alt", "any", "ref", "letter"]) if depth else "letter"
    if kind == "letter":
        return chance.choice("ab")
    if kind == "ref":
        return "seq", (chance.choice("ab"), ("ref", chance.randrange(rules)))  # no left recursion
    if kind == "any":
        return "any", random_rule(chance, rules, 0)
    return kind, tuple(random_rule(chance, rules, depth - 1) for _ in range(chance.randint(1, 3)))


def gbnf_of(rule: Rule) -> str:
    match rule:
        case ("seq", parts):
            return f"({' '.join(map(gbnf_of, parts))})"
        case ("alt", parts):
            return f"({' | '.join(map(gbnf_of, parts))})"
        case ("any", part):
            return f"{gbnf_of(part)}*"
        case ("ref", number):
            return f"r{number}" if number else "root"
    return f'"{rule}"'


def ends(rules: list[Rule], rule: Rule, text: str, at: int) -> set[int]:
    """Where a rule may stop that begins at a place of a text, read character by character."""
    match rule:
        case ("seq", parts):
            found = {at}
            for part in parts:
                found = {end for place in found for end in ends(rules, part, text, place)}
            return found
        case ("alt", parts):
            return {end for part in parts for end in ends(rules, part, text, at)}
        case ("any", part):
            found, new = {at}, {at}
            while new := {end for place in new for end in ends(rules, part, text, place)} - found:
                found |= new
            return found
        case ("ref", number):
            return ends(rules, rules[number], text, at)
    return {at + 1} if text[at:at + 1] == rule else set()


@pytest.mark.slow
@pytest.mark.oracle("gbnf")
def test_random_grammars_accept_the_same_texts_with_and_without_a_lexer():
    tokenizer = byte_tokenizer(merges=0)
    engine, tokens = GrammarEngine(tokenizer, len(tokenizer), [0]), Tokens(tokenizer, len(tokenizer))
    texts, compared = ["".join(letters) for size in range(6) for letters in product("ab", repeat=size)], 0
    for seed in range(40):
        chance = random.Random(seed)
        rules = [random_rule(chance, 3) for _ in range(3)]
        source = "\n".join(f"{f'r{i}' if i else 'root'} ::= {gbnf_of(rule)}" for i, rule in enumerate(rules))
        expected = {text for text in texts if len(text) in ends(rules, rules[0], text, 0)}
        try:
            grammar = engine.compile("gbnf", source)
        except Refusal:
            assert not expected, source
            continue
        found = set()
        for text in texts:
            matcher = grammar.matcher()
            if all(matcher.advance(token) for token in tokens.encode(text)) and matcher.accepting:
                found.add(text)
        assert found == expected, source
        compared += 0 < len(found) < len(texts)
    assert compared > 20


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


@pytest.mark.parametrize(
    "source, says",
    [
        ('top ::= "a"', "no rule called root"),
        ('root = "a"', "no rule called root"),
        ("root ::= foo", 'Rule "foo" not found'),
        ('root ::= "a"\nroot ::= "b"', 'two rules called "root"'),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\n"b"', "line 2"),
        ('root ::= <think> "a"', "Expected name at line 1"),
        ('root ::= "\\q"', "Invalid escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a" root', "no finite text"),
        ("root ::= []", "unclosed character class"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
        ("", "is empty"),
    ],
)
def test_gbnf_that_cannot_be_used_is_refused_in_one_line(engine, source, says):
    with pytest.raises(Refusal) as refused:
        engine.compile("gbnf", source)
    assert says in str(refused.value) and "GBNF grammar" in str(refused.value) and "\n" not in str(refused.value)


def is_animals(text: str) -> bool:
    return all(part.startswith("a ") and 3 <= len(part) - 2 <= 6 and part[2:].isalpha() for part in text.split(" and "))


ANIMALS = 'root ::= animal (" and " animal){0,3} "."\nanimal ::= "a " [a-z]{3,6}'
SOUND = {"gbnf": [({"source": ANIMALS}, lambda text: text[-1] == "." and is_animals(text[:-1]))],
         "lark": [({"ready": "date"}, is_day)]}
