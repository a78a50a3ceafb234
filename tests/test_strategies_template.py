"""A template allows exactly the texts of which a scan by hand finds fixed text and holes in order."""
from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from pairs import pair

from playground.contract import Constraint, find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Commit, Done, Figure, Forward
from playground.grammar.matcher import GrammarEngine
from playground.grammar.template_grammar import Template
from support.texts_of_masks import check_texts, engine  # noqa: F401

FilledTemplate = find("template")


@dataclass(frozen=True)
class Filling:
    """A template, the same in parts (fixed text and patterns in turn), and the letters of the texts to compare.

    A pattern of None is a hole without one.
    """

    source: str
    parts: tuple[str | None, ...]
    letters: str
    longest: int = 6

    def __str__(self) -> str:
        return self.source


FILLINGS = [
    Filling("a{{x:b+}}a", ("a", "b+", "a"), "ab."),
    Filling("{{x:[ab]*}}ab{{y:b?}}", ("", "[ab]*", "ab", "b?", ""), "ab"),
    Filling("{{x:[ab]+}}aa{{y:[ab]+}}b", ("", "[ab]+", "aa", "[ab]+", "b"), "ab", 8),
    Filling("{{x}}ab.", ("", None, "ab.", ), "ab.\n", 5),
    Filling("a{{x}}b{{y}}", ("a", None, "b", None, ""), "ab\n"),
    Filling("{{{x:a}}}", ("{", "a", "}"), "{a}"),
    Filling("{{x:a{1,2}}}}{{y:[/b]}}", ("", "a{1,2}", "}", "[/b]", ""), "ab/}"),
]


def fits(parts: tuple[str | None, ...], text: str) -> bool:
    """Cut a text at the first places where the fixed texts are complete, and compare each hole with its pattern."""
    if not text.startswith(parts[0]):
        return False
    text = text[len(parts[0]):]
    for pattern, after in zip(parts[1::2], parts[2::2]):
        if after and after not in text:
            return False
        hole, text = text.split(after, 1) if after else (text, "")
        if pattern is None and (not hole or "\n" in hole or after[:1] and after[0] in hole):
            return False
        if pattern is not None and not re.fullmatch(pattern, hole):
            return False
    return text == ""


def check_template(cls: type[Constraint], engine: GrammarEngine, case: Filling) -> None:
    check_texts(engine, cls(case.source), case.letters, case.longest, lambda text: fits(case.parts, text))


class GoesPastTheFixedText(FilledTemplate):
    """One regular expression of everything: a hole may contain the fixed text after it."""

    def grammar(self):
        return "regex", re.sub(r"\{\{\w+:?(.*?)\}\}(?!\})", lambda hole: f"({hole[1] or '.+'})", self.source)


class ForgetsTheLastText(FilledTemplate):
    def grammar(self):
        return "template", self.source.rstrip("ab.")


class OneCharacterForEachHole(FilledTemplate):
    def grammar(self):
        return "template", re.sub(r"[+*?]\}\}", "}}", self.source)


WRONG = {GoesPastTheFixedText: FILLINGS[2], ForgetsTheLastText: FILLINGS[0], OneCharacterForEachHole: FILLINGS[1]}


@pytest.mark.oracle("template")
@pytest.mark.parametrize("case", FILLINGS, ids=str)
def test_the_texts_are_those_a_scan_can_cut_into_fixed_text_and_holes(engine, case):
    check_template(FilledTemplate, engine, case)


@pytest.mark.refuses("template")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_template_is_refused(engine, wrong):
    with pytest.raises(AssertionError):
        check_template(wrong, engine, WRONG[wrong])


SENTENCE = "The {{adjective:red|green}} bird has {{eyes:[2-9]}} eyes."
SOUND = {"template": [({"source": SENTENCE}, lambda text: re.fullmatch("The (red|green) bird has [2-9] eyes.", text))]}


@pytest.mark.strategy("template")
def test_fixed_text_is_forced_and_shown_as_such_while_holes_are_chosen():
    session = prepare(
        pair(), [LaneConfig("greedy", {}, [("template", {"source": SENTENCE})])], Prompt("The bird is"), Limits()
    )
    recorded = [stamped.event for stamped in session]
    commits = [event for event in recorded if isinstance(event, Commit)]
    text = "".join(commit.text for commit in commits)
    origins = [origin for commit in commits for origin in commit.origins]
    chosen = [position for position, origin in enumerate(origins) if origin != "forced"]
    spans = [event.data["spans"][0] for event in recorded if isinstance(event, Figure) and event.shape == "spans"]
    assert re.fullmatch("The (red|green) bird has [2-9] eyes.", text) and recorded[-1] == Done("grammar")
    assert [start for start, *_ in spans] == chosen and {name for _, _, name, _ in spans} == {"adjective", "eyes"}
    assert len(chosen) < len(origins) / 2 and origins[0] == "forced"
    assert sum(isinstance(event, Forward) for event in recorded) <= len(chosen) + 1


@pytest.mark.strategy("template")
def test_holes_are_read_back_from_a_text():
    template = Template.read("Name: {{name}}, {{age:[0-9]+}} years")
    assert template.filled("Name: Mia") == {}
    assert template.filled("Name: Mia, 1") == {"name": "Mia"}
    assert template.filled("Name: Mia, 12 years") == {"name": "Mia", "age": "12"}


@pytest.mark.strategy("template")
@pytest.mark.parametrize(
    "source, says",
    [
        ("no holes", "has no hole"),
        ("{{a}}{{b}}.", "no fixed text follows the hole 'a'"),
        ("{{a}} and {{a}}.", "two holes are called 'a'"),
        ("{{1st}}.", "is not a hole"),
        ("{{a}} {{", "is not a hole"),
        ("{{a:(}}.", "The hole 'a': The regex cannot be used: "),
        ("{{a:}+}}.", "is not a hole"),
        ("{{a:[^\\s\\S]}}.", "no finite text"),
        ("{{a:b}}b{{c:(?=a)}}", "look-around"),
        ("{{a:bb}}b", "no finite text"),
        ("".join(f"{{{{h{i}}}}}." for i in range(101)), "at most 100"),
        (" ", "is empty"),
    ],
)
def test_what_is_no_template_is_refused_in_one_line(engine, source, says):
    with pytest.raises(Refusal, match=re.escape(says)) as refused:
        engine.compile("template", source)
    assert "\n" not in str(refused.value)
