"""Constraints against enumeration: the language that a constraint accepts is that of an independent parser.

Every constraint has one `check_...(cls)` over finite languages: all texts that its masks allow, found token by token,
are exactly the texts over an alphabet that an independent parser accepts (re, jsonschema, lark or a plain list). The
constraint passes it, and subclasses that pass another language to the engine fail it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import product

import jsonschema
import pytest
import torch
from lark import Lark as LarkParser
from lark.exceptions import LarkError
from runs import run
from tables import TableModel
from toys import byte_tokenizer

from playground.contract import Constraint, Decoder, find
from playground.contract.lane_config import Assembly
from playground.grammar.matcher import GrammarEngine
from strategies.constrained.static.csr_trie import CsrTrie

Choice, Gbnf, JsonSchema, Lark, Regex, Static = (
    find(name) for name in ("choice", "gbnf", "json_schema", "lark", "regex", "static")
)
TOKENIZER = byte_tokenizer(merges=0)  # a token is a byte, so that a text has one tokenisation only
END = TOKENIZER.eos_token_id
MOST = 400  # texts: the languages here are smaller


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [END])


def language(engine: GrammarEngine, constraint: Constraint) -> set[str]:
    """Every text that can be written under a constraint, by following each token its masks allow."""
    grammar, found, beginnings = engine.compile(*constraint.grammar()), set(), [[]]
    while beginnings:
        beginning = beginnings.pop()
        matcher = grammar.matcher()
        assert all(matcher.advance(token) for token in beginning), "a token of the mask is refused"
        if matcher.accepting:
            found.add(TOKENIZER.decode(beginning))
        assert len(found) <= MOST, "the language is larger than it should be"
        legal = [] if matcher.stopped else matcher.mask().nonzero()[:, 0].tolist()
        beginnings += [[*beginning, token] for token in legal if token != END]
    return found


def spelled(letters: str, longest: int) -> Iterable[str]:
    """All texts of these letters."""
    for length in range(longest + 1):
        yield from map("".join, product(letters, repeat=length))


def refused(check: Callable, wrong: type[Constraint], engine: GrammarEngine) -> None:
    with pytest.raises(AssertionError):
        check(wrong, engine)


# --- regex ---


def check_regex(cls: type[Constraint], engine: GrammarEngine) -> None:
    for pattern in ("(ab|b{1,2})a?", "a|ab|abb", "[ab]{0,2}b", "b(?:a?b){1,2}"):
        expected = {text for text in spelled("ab", 7) if re.fullmatch(pattern, text)}
        assert language(engine, cls(pattern)) == expected


class MatchesTheBeginning(Regex):
    def grammar(self):
        return "regex", f"(?:{self.pattern})[ab]?"


class LeavesOptionalPartsOut(Regex):
    def grammar(self):
        return "regex", self.pattern.replace("?:", "$").replace("?", "{0}").replace("$", "?:")


@pytest.mark.oracle("regex")
def test_a_regex_accepts_exactly_what_re_matches(engine):
    check_regex(Regex, engine)


@pytest.mark.refuses("regex")
@pytest.mark.parametrize("wrong", [MatchesTheBeginning, LeavesOptionalPartsOut])
def test_a_wrong_regex_is_refused(engine, wrong):
    refused(check_regex, wrong, engine)


# --- choice ---


def check_choice(cls: type[Constraint], engine: GrammarEngine) -> None:
    for options in ("red|green|greenish", "a.b|a*|(", "Größe|größe|日本", "x", "yes| yes|no ", " a"):
        assert language(engine, cls(options)) == set(options.split("|"))


class ReadsOptionsAsPatterns(Choice):
    def grammar(self):
        return "regex", self.options.replace("(", r"\(")


class ForgetsTheCase(Choice):
    def grammar(self):
        return "choice", self.options.lower()


class StripsItsOptions(Choice):
    def grammar(self):
        return "choice", "|".join(option.strip() for option in self.options.split("|"))


class LosesTheLastOption(Choice):
    def grammar(self):
        return "choice", self.options.rpartition("|")[0] or self.options


@pytest.mark.oracle("choice")
def test_a_choice_accepts_exactly_its_options(engine):
    check_choice(Choice, engine)


@pytest.mark.refuses("choice")
@pytest.mark.parametrize("wrong", [ReadsOptionsAsPatterns, ForgetsTheCase, StripsItsOptions, LosesTheLastOption])
def test_a_wrong_choice_is_refused(engine, wrong):
    refused(check_choice, wrong, engine)


# --- JSON Schema ---

RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 12}, "b": {"enum": ["x", True, 3]}},
    "required": ["a"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
ABSENT = object()


def records() -> Iterable[dict]:
    """Documents of which some are valid records and others are not, with their keys in its order."""
    for values in product([ABSENT, *range(-5, 20), "1", None], [ABSENT, "x", "y", True, False, 3, 4], [ABSENT, 1]):
        yield {key: value for key, value in zip("abc", values) if value is not ABSENT}


def lists() -> Iterable[list]:
    for length in range(4):
        yield from map(list, product([True, False, 1], repeat=length))


def fits(schema: dict, document) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(document)


def check_json_schema(cls: type[Constraint], engine: GrammarEngine) -> None:
    for schema, documents in ((RECORD, records()), (LIST, lists())):
        expected = {json.dumps(document) for document in documents if fits(schema, document)}
        assert language(engine, cls(json.dumps(schema))) == expected


class Rewritten(JsonSchema):
    """Passes a changed schema to the engine."""

    def rewritten(self, schema: dict) -> dict:
        raise NotImplementedError

    def grammar(self):
        self.source = json.dumps(self.rewritten(json.loads(self.source)))
        return super().grammar()


class NothingIsRequired(Rewritten):
    def rewritten(self, schema):
        return schema | {"required": []}


class ExclusiveMaximum(Rewritten):
    def rewritten(self, schema):
        if "properties" in schema:
            number = schema["properties"]["a"]
            number["exclusiveMaximum"] = number.pop("maximum")
        return schema


class OneItemLess(Rewritten):
    def rewritten(self, schema):
        return schema | {"maxItems": schema["maxItems"] - 1} if "maxItems" in schema else schema


@pytest.mark.oracle("json_schema")
def test_a_schema_accepts_exactly_what_jsonschema_validates(engine):
    check_json_schema(JsonSchema, engine)


@pytest.mark.refuses("json_schema")
@pytest.mark.parametrize("wrong", [NothingIsRequired, ExclusiveMaximum, OneItemLess])
def test_a_wrong_json_schema_is_refused(engine, wrong):
    refused(check_json_schema, wrong, engine)


# --- Lark and GBNF ---

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
def test_a_lark_grammar_accepts_what_larks_own_parser_accepts(engine):
    check_lark(Lark, engine)


@pytest.mark.refuses("lark")
@pytest.mark.parametrize("wrong", [AsManyAsOneLikes, AtLeastOne, FirstAlternativeOfEachRule])
def test_a_wrong_lark_grammar_is_refused(engine, wrong):
    refused(check_lark, wrong, engine)


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
def test_a_gbnf_grammar_accepts_the_language_it_describes(engine):
    check_gbnf(Gbnf, engine)


@pytest.mark.refuses("gbnf")
@pytest.mark.parametrize("wrong", [ForgetsTheBounds, TakesOptionalForCertain, FirstAlternative])
def test_a_wrong_gbnf_grammar_is_refused(engine, wrong):
    refused(check_gbnf, wrong, engine)


# --- STATIC: search among items ---

LETTERS = "abcd!"  # the last ends a text
ITEMS = ["a", "ab", "abc", "bca", "bd", "cab", "dd", "dcba"]


def item_logp(model: TableModel, text: str) -> float:
    ids = [LETTERS.index(letter) for letter in text]
    return sum(float(model.scores((0, 1, *ids[:i])).log_softmax(-1)[token]) for i, token in enumerate(ids))


def best_item(model: TableModel, beams: int) -> str:
    """Beam search over strings: prefixes of items grow, and complete items stay among the candidates."""
    pool = [""]
    while any(not text.endswith("!") for text in pool):
        grown = {f"{item}!"[: len(text) + 1] for text in pool for item in ITEMS if f"{item}!".startswith(text)}
        pool = sorted(grown, key=lambda text: -item_logp(model, text))[:beams]
    return pool[0][:-1]


def check_static(cls: type[Decoder]) -> None:
    for seed, beams in product(range(8), (1, 2, 4)):
        model = TableModel(LETTERS, "!", seed)
        lane, _ = run(Assembly(cls("|".join(ITEMS), beams)), {"target": model}, [0, 1], 12)
        assert lane.text == best_item(model, beams)


class TheShortestItem(Static):
    """Returns the first item that was complete."""

    def _chosen(self, lm, done):
        return super()._chosen(lm, sorted(done, key=lambda beam: beam.leaf.generated))


class OneBeamMore(Static):
    def _trie(self, lm, device):
        self.beams += 1
        return super()._trie(lm, device)


class ForgetsTheBeginning(Static):
    def _candidates(self, trie, rows, live, depth):
        for beam in live:
            beam.score = 0.0
        return super()._candidates(trie, rows, live, depth)


class RenormalisesTheLegal(Static):
    """Renormalises log-probabilities over the allowed tokens, which favours prefixes without alternatives."""

    def _candidates(self, trie: CsrTrie, rows, live, depth):
        sums, tokens, states = super()._candidates(trie, rows, live, depth)
        before = torch.tensor([[beam.score] for beam in live], dtype=sums.dtype)
        return before + (sums - before).log_softmax(-1), tokens, states


@pytest.mark.oracle("static")
def test_static_finds_what_an_exhaustive_search_over_strings_finds():
    check_static(Static)


@pytest.mark.refuses("static")
@pytest.mark.parametrize("wrong", [TheShortestItem, OneBeamMore, ForgetsTheBeginning, RenormalisesTheLegal])
def test_a_wrong_static_is_refused(wrong):
    with pytest.raises(AssertionError):
        check_static(wrong)
