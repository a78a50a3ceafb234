"""Structural tags allow exactly the texts that a scan accepts, which shares no code with the grammar engine.

The scan finds the first place where a trigger is complete, the tag that begins there, and the shortest text before its
end that `re` or `json` accepts, and so on. All texts over a few letters are compared.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from playground.contract import Constraint, find
from playground.errors import Refusal
from playground.grammar.tagged_grammar import open_tag
from support.texts_of_masks import check_texts, engine  # noqa: F401

Tags = find("structural_tags")


@dataclass(frozen=True)
class Case:
    """Tags as (begin, format, source, end), the triggers, and the letters of the texts that are compared."""

    tags: tuple[tuple[str, str, object, str], ...]
    triggers: tuple[str, ...]
    letters: str
    longest: int = 6
    must: bool = False
    once: bool = False
    most: int = 0

    @property
    def knobs(self) -> dict:
        structures = [{"begin": begin, kind: source, "end": end} for begin, kind, source, end in self.tags]
        source = json.dumps({"structures": structures, "triggers": self.triggers})
        return {"source": source, "must": self.must, "once": self.once, "most": self.most}

    def __str__(self) -> str:
        return " ".join(begin for begin, *_ in self.tags)


TWO = (("<a>", "regex", "x+", ">"), ("<b>", "regex", "y", "<"))
SHORT = (("ab", "regex", "x+", "."), ("ac", "regex", "y", "."))
CASES = [
    Case(TWO, ("<",), "<>abxy", 5),
    Case(SHORT, ("ab", "ac"), "abcxy.", 5),
    Case(SHORT, ("a",), "abcxy.", 5, must=True),
    Case(SHORT, ("a",), "abcxy.", 5, once=True),
    Case(SHORT, ("a",), "abcxy.", 5, most=2),
    Case((("<a", "regex", "b?", "b"), ("bc", "regex", "c", "c")), ("<", "b"), "<abc", 7),
    Case(TWO, ("<",), "<>abxy", 5, once=True),
    Case(TWO, ("<",), "<>abxy", 5, must=True, most=1),
    Case((("a", "regex", "[ab]", "b"), ("bb", "regex", "a?", "a")), ("a", "bb"), "abc", 7),
    Case((("a.", "choice", "x|xy", "y"), ("aa", "schema", {"enum": [1, 11]}, "y")), ("a",), "a.xy1", 6),
    Case((("ab", "lark", 'start: "x" start | "y"', "."), ("b", "regex", "x", ".")), ("ab", "b"), "abxy.", 6),
]


def accepts(kind: str, source: object) -> Callable[[str], bool]:
    if kind == "regex":
        return lambda text: re.fullmatch(source, text) is not None
    if kind == "lark":
        return lambda text: re.fullmatch("x*y", text) is not None
    return (source.split("|") if kind == "choice" else [json.dumps(value) for value in source["enum"]]).__contains__


def scanned(case: Case, text: str, came: bool = False) -> bool:
    """Whether a text is valid, found by looking for triggers and ends."""
    ends = [at for at in range(len(text) + 1) if text[:at].endswith(case.triggers)]
    if not ends:
        return (came or not case.must) and len(text) <= (case.most or len(text))
    starts = {ends[0] - len(trigger) for trigger in case.triggers if text[: ends[0]].endswith(trigger)}
    starts = {start for start in starts if start <= (case.most or start)}
    return any(_from_tag(case, text[start:], tag) for start in starts for tag in case.tags)


def _from_tag(case: Case, text: str, tag: tuple) -> bool:
    """Whether a text is valid that begins with a tag."""
    begin, kind, source, end = tag
    rest, valid = text[len(begin):], accepts(kind, source)
    stops = [at for at in range(len(rest)) if rest.startswith(end, at) and valid(rest[:at])]
    if not text.startswith(begin) or not stops:
        return False
    after = rest[stops[0] + len(end):]
    return not after if case.once else scanned(case, after, True)


def check_tags(cls: type[Constraint], engine, case: Case) -> None:  # noqa: F811
    check_texts(engine, cls(**case.knobs), case.letters, case.longest, lambda text: scanned(case, text))


class OneTagForAll(Tags):
    """Wrong: between any begin and its end stands what the first tag allows."""

    def _tag(self, structure):
        first = json.loads(self.source)["structures"][0]
        return super()._tag({**first, "begin": structure["begin"], "end": structure["end"]})


class BeginsAreTheTriggers(Tags):
    """Wrong: a trigger alone is free text."""

    def _read(self):
        self.source, self.must = json.dumps(json.loads(self.source)["structures"]), False
        return super()._read()


class NeverMust(Tags):
    def _read(self):
        self.must = False
        return super()._read()


class GoesOn(Tags):
    def _read(self):
        self.once = False
        return super()._read()


class CountsTheTrigger(Tags):
    """The bound includes the first character of the trigger."""

    def _read(self):
        self.most -= 1
        return super()._read()


CASE_BY_WRONG = [(OneTagForAll, 0), (BeginsAreTheTriggers, 2), (NeverMust, 2), (GoesOn, 3), (CountsTheTrigger, 4)]


@pytest.mark.oracle("structural_tags")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_texts_are_those_that_a_scan_accepts(engine, case):  # noqa: F811
    check_tags(Tags, engine, case)


@pytest.mark.refuses("structural_tags")
@pytest.mark.parametrize("wrong, place", CASE_BY_WRONG)
def test_wrong_tags_are_refused(engine, wrong, place):  # noqa: F811
    with pytest.raises(AssertionError):
        check_tags(wrong, engine, CASES[place])


BOUNDED = Case((("<a>", "regex", "x{1,2}", ">"), ("<b>", "regex", "y", "<")), ("<",), "", must=True, once=True, most=4)
SOUND = {"structural_tags": [(BOUNDED.knobs, lambda text: scanned(BOUNDED, text))]}


@pytest.mark.strategy("structural_tags")
def test_the_figure_names_the_tag_of_every_token():
    case = Case((("<j>", "schema", {"type": "string"}, "</j>"), ("<n>", "regex", "[0-9]", "</n>")), ("<",), "")
    tags, text = Tags(**case.knobs), 'a<j>"</j>"</j>b<n>1</n>c'
    tags.begin(0, lambda token: bytes([token]))
    shown = [list(tags.explain(list(text[:end].encode()), 0)) for end in range(len(text))]
    named = [events[0].data["spans"][0][2:] if events else None for events in shown]
    inside = [None] * 4 + [["<j>", 0]] * 10 + [None] * 4 + [["<n>", 1]] * 5 + [None]
    assert named == inside and open_tag(tags._read(), text) is None
    assert SimpleNamespace(**shown[4][0].data).spans == [[4, 5, "<j>", 0]]


@pytest.mark.strategy("structural_tags")
@pytest.mark.parametrize("source, said", [
    ("{", "not valid JSON"),
    ("{}", "no list"),
    ("[]", "0 tags"),
    ([{"begin": "<a>", "end": ">"}], "one of schema"),
    ([{"begin": "<a>", "end": ">", "regex": "(("}], "<a>.*regex cannot be used"),
    ([{"begin": "<a>", "end": "", "regex": "x"}], "has no end"),
    ([{"begin": "", "end": "x", "regex": "x"}], "has no begin"),
    ([{"begin": "<a>", "end": "5", "schema": {"type": "integer"}}], "number may go on"),
    ([{"begin": "<a", "end": ">", "regex": "x"}, {"begin": "<ab", "end": ">", "regex": "x"}], "more than one"),
    ({"structures": [{"begin": "<a", "end": ">", "regex": "x"}], "triggers": ["("]}, "no trigger begins"),
    ({"structures": [{"begin": "<a", "end": ">", "regex": "x"}], "triggers": ["<", "<<"]}, "no tag begins"),
    ({"structures": [{"begin": "aba", "end": ">", "regex": "x"}, {"begin": "b", "end": ">", "regex": "x"}]}, "never"),
])
def test_unusable_tags_are_refused(engine, source, said):  # noqa: F811
    with pytest.raises(Refusal, match=said) as refused:
        engine.compile(*Tags(source=source if isinstance(source, str) else json.dumps(source)).grammar())
    assert "\n" not in str(refused.value)
