"""GBNF grammar against all texts of its language, and wrong variants against the same check."""
from __future__ import annotations

import random
import re
from itertools import product

import pytest
from toys import byte_tokenizer

from playground.contract import Constraint, find, make
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine
from support.byte_grammars import accepts, engine  # noqa: F401 - a fixture
from support.gbnf_texts import DESCRIBED
from support.languages import byte_engine, language, spelled  # noqa: F401 - a fixture
from support.wrong_variants import refused

Gbnf = find("gbnf")
GBNF = {  # each with its language as a regular expression
    'root ::= "a" x? "b"\nx ::= "a" "b" | "b"': "a(ab|b)?b",
    'root ::= [ab]{1,2} "+" y{0,2}\ny ::= "b"': r"[ab]{1,2}\+b{0,2}",
    'root ::= ("a" | "b+"){2} # a remark\n': r"(a|b\+){2}",
    'root ::= "\\x61" [+-]? | "b" "\\\\"': r"a\+?|a-|b\\",
}


def check_gbnf(cls: type[Constraint], engine: GrammarEngine) -> None:
    for source, pattern in GBNF.items():
        assert language(engine, cls(source)) == {text for text in spelled("ab+-\\", 5) if re.fullmatch(pattern, text)}


class ForgetsTheBounds(Gbnf):
    def grammar(self):
        return "gbnf", re.sub(r"\{\d,(\d)\}", r"{0,\1}", self.source)


class TakesOptionalForCertain(Gbnf):
    def grammar(self):
        return "gbnf", self.source.replace("?", "")


class FirstAlternative(Gbnf):
    def grammar(self):
        return "gbnf", re.sub(r' \| "b"', "", self.source)


@pytest.mark.oracle("gbnf")
def test_a_gbnf_grammar_accepts_the_language_it_describes(byte_engine):
    check_gbnf(Gbnf, byte_engine)


@pytest.mark.refuses("gbnf")
@pytest.mark.parametrize("wrong", [ForgetsTheBounds, TakesOptionalForCertain, FirstAlternative])
def test_a_wrong_gbnf_grammar_is_refused(byte_engine, wrong):
    refused(check_gbnf, wrong, byte_engine)


@pytest.mark.oracle("gbnf")
@pytest.mark.parametrize("source, legal, illegal", DESCRIBED.values(), ids=DESCRIBED)
def test_gbnf_accepts_what_llama_cpp_accepts(engine, source, legal, illegal):
    constraint = make("gbnf", source=source)
    assert [text for text in legal if not accepts(engine, constraint, text)] == []
    assert [text for text in illegal if accepts(engine, constraint, text)] == []


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
SOUND = {"gbnf": [({"source": ANIMALS}, lambda text: text[-1] == "." and is_animals(text[:-1]))]}
