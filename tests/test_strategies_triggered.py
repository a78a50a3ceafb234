"""A triggered grammar allows exactly the texts that a scan accepts, which shares no code with the grammar engine.

The scan finds the first trigger, then the shortest beginning of the rest that `re` or `jsonschema` accepts together
with the end string, and so on. All texts over a few letters are compared, and at every text the tokens allowed next.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
from toys import byte_tokenizer

from playground.contract import Constraint, find
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine
from support.texts_of_masks import check_texts, engine  # noqa: F401

Triggered = find("triggered")
MERGED = byte_tokenizer(merges=80)  # it has "the" and " the"


@dataclass(frozen=True)
class Case:
    """Knobs, what the constraint accepts, and the letters of the texts that are compared."""

    knobs: dict
    accepts: Callable[[str], bool]
    letters: str
    longest: int = 5

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.knobs.items())


def spells(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def nested(text: str) -> bool:
    depth = len(text) // 2
    return text == "a" * depth + "c" + "b" * depth


def is_json(*values) -> Callable[[str], bool]:
    return lambda text: text in [json.dumps(value) for value in values]


LISTS = json.dumps({"type": "array", "items": {"enum": [1]}, "maxItems": 2})
CASES = [
    Case({"source": "a+b?", "trigger": "#"}, spells("a+b?"), "#ab."),
    Case({"source": "a+b?", "trigger": "#", "must": True}, spells("a+b?"), "#ab."),
    Case({"source": "a+b?", "trigger": "#", "end": "."}, spells("a+b?"), "#ab."),
    Case({"source": "a[.b]*", "trigger": "#", "end": ".", "must": True}, spells("a[.b]*"), "#ab."),
    Case({"source": "a+", "trigger": "#.", "end": ".", "must": True, "most": 2}, spells("a+"), "#a.", 7),
    Case({"source": "a+", "trigger": "#", "most": 1}, spells("a+"), "#ab."),
    Case({"source": "b/?", "trigger": "ab", "end": "b"}, spells("b/?"), "ab/", 6),
    Case({"source": "b+", "trigger": "aba", "end": "a"}, spells("b+"), "ab", 8),
    Case({"source": "(aa)*", "trigger": "aa"}, spells("(aa)*"), "ab", 8),
    Case({"source": "a|ab", "trigger": "a", "end": "b", "format": "choice"}, spells("a|ab"), "ab.", 6),
    Case({"source": LISTS, "trigger": "#", "format": "json_schema"}, is_json([], [1], [1, 1]), "#1[], ", 5),
    Case({"source": LISTS, "trigger": "#", "end": " ", "format": "json_schema"}, is_json([], [1], [1, 1]), "#1[] "),
    Case({"source": '{"enum": [1, 11]}', "trigger": "#", "end": "#", "format": "json_schema"}, is_json(1, 11), "#1"),
    Case({"source": 'start: "a" start "b" | "c"', "trigger": "#", "format": "lark"}, nested, "#abc"),
    Case({"source": 'start: "a" start "b" | "c"', "trigger": "#", "end": "b", "format": "lark"}, nested, "#abc"),
    Case({"source": 'root ::= "a" root "b" | "c"', "trigger": "#", "end": "b", "format": "gbnf"}, nested, "#abc"),
    Case({"source": "root ::= [ab]* [b]", "trigger": "a", "end": "bb", "format": "gbnf"}, spells("[ab]*b"), "ab.", 6),
    Case({"source": "root ::= [ab]+", "trigger": "#", "format": "gbnf"}, spells("[ab]+"), "#ab"),
]
ACROSS_TOKENS = [
    Case({"source": "e+", "trigger": "h", "end": " "}, spells("e+"), "the "),
    Case({"source": "t?he", "trigger": " ", "end": "e"}, spells("t?he"), "the "),
    Case({"source": "e( the)?", "trigger": "th"}, spells("e( the)?"), "the "),
]


WORDS = {"source": "(the|then) [0-2]{1,4}", "trigger": " t", "must": True, "most": 20}
SOUND = {"triggered": [(WORDS, lambda text: spells("(the|then) [0-2]{1,4}")(text.partition(" t")[2]))]}


def scanned(case: Case, text: str) -> bool:
    """Whether a text is valid, found by looking for triggers and ends."""
    trigger, end, most = case.knobs["trigger"], case.knobs.get("end", ""), case.knobs.get("most") or len(text)
    came = not case.knobs.get("must")
    while (place := text.find(trigger)) >= 0:
        if place > most:
            return False
        rest, came = text[place + len(trigger):], True
        if not end:
            return case.accepts(rest)
        stops = [i for i in range(len(rest) + 1) if rest[:i].endswith(end) and case.accepts(rest[:i - len(end)])]
        if not stops:
            return False
        text = rest[stops[0]:]
    return came and len(text) <= most


def check_triggered(cls: type[Constraint], engine: GrammarEngine, case: Case) -> None:
    check_texts(engine, cls(**case.knobs), case.letters, case.longest, lambda text: scanned(case, text))


class ActsOnce(Triggered):
    """After the end string the trigger means nothing any more."""

    def grammar(self):
        free = f"start: go body{' ANY' if self.end else ''} | FREE\nANY: /(?s:.*)/\nHAS: ANY {json.dumps(self.trigger)}"
        go = f" ANY\nFREE: ANY & ~HAS\ngo[lazy]: ANY {json.dumps(self.trigger)}\n"
        body = f"body{'[lazy]' if self.end else ''}: /{self.source}/ {json.dumps(self.end) if self.end else ''}"
        return "lark", f"%llguidance {{}}\n{free}{go}{body}"


class TriggersAtOnce(Triggered):
    """The constraint applies from the beginning."""

    def grammar(self):
        return "regex", f"{re.escape(self.trigger)}({self.source}){re.escape(self.end)}"


class NeverMust(Triggered):
    def grammar(self):
        self.must = False
        return super().grammar()


class EndsWithoutItsEnd(Triggered):
    def grammar(self):
        self.source, self.end = f"({self.source})({re.escape(self.end)})?", ""
        return super().grammar()


class CountsTheTrigger(Triggered):
    """The bound includes the trigger itself."""

    def grammar(self):
        self.most -= 1
        return super().grammar()


WRONG = {
    ActsOnce: CASES[2],
    TriggersAtOnce: CASES[0],
    NeverMust: CASES[1],
    EndsWithoutItsEnd: CASES[2],
    CountsTheTrigger: CASES[4],
}


@pytest.mark.oracle("triggered")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_texts_are_those_that_a_scan_accepts(engine, case):
    check_triggered(Triggered, engine, case)


@pytest.mark.refuses("triggered")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_trigger_is_refused(engine, wrong):
    with pytest.raises(AssertionError):
        check_triggered(wrong, engine, WRONG[wrong])


def viable(case: Case, text: str) -> bool:
    """Whether some text of up to four more letters makes it valid."""
    return any(scanned(case, text + "".join(more)) for n in range(5) for more in product(case.letters, repeat=n))


@pytest.mark.slow
@pytest.mark.oracle("triggered")
@pytest.mark.parametrize("case", ACROSS_TOKENS, ids=str)
def test_a_token_may_hold_the_end_of_the_trigger_and_the_beginning_of_the_constraint(case):
    """With tokens of several letters the allowed ones are those after which some valid text can still follow."""
    tokens, ids = Tokens(MERGED, len(MERGED)), range(len(MERGED))
    spelled = {token: tokens.bytes(token).decode("latin-1") for token in ids if not tokens.is_special(token)}
    mine = {token: text for token, text in spelled.items() if text and set(text) <= set(case.letters)}
    grammar = GrammarEngine(MERGED, len(MERGED), [MERGED.eos_token_id]).compile(*Triggered(**case.knobs).grammar())
    assert max(map(len, mine.values())) == 4
    for n in range(4):
        for beginning in product([token for token, text in mine.items() if len(text) < 3], repeat=n):
            matcher, text = grammar.matcher(), "".join(map(mine.get, beginning))
            if all(map(matcher.advance, beginning)):
                allowed = {token for token in mine if matcher.allows(token)}
                assert allowed == {token for token, more in mine.items() if viable(case, text + more)}


@pytest.mark.strategy("triggered")
@pytest.mark.parametrize(
    "knobs, says, about",
    [
        ({"trigger": ""}, "trigger is empty", "trigger"),
        ({"trigger": "a" * 201}, "at most 200", "trigger"),
        ({"end": "\0"}, "NUL", "end"),
        ({"source": " "}, "is empty", "source"),
        ({"source": "(("}, "regex cannot be used", ""),
        ({"source": '{"not": {}}', "format": "json_schema"}, "not", ""),
        ({"source": '{"type": "integer"}', "format": "json_schema", "end": "5"}, "a number may go on with", "end"),
        ({"source": "start: /[a-z]+/", "format": "lark", "end": "end"}, "read as far as it goes", "end"),
        ({"source": "|".join("ab" * 600), "format": "choice"}, "at most 1,000", ""),
        ({"source": '"a" } start: "b"', "format": "lark"}, "cannot be used", ""),
    ],
)
def test_what_cannot_be_triggered_is_refused_in_one_line(engine, knobs, says, about):
    with pytest.raises(Refusal, match=says) as refused:
        engine.compile(*Triggered(**knobs).grammar())
    assert refused.value.about == about and "\n" not in str(refused.value)
