"""Templates with holes: fixed text, and between it holes that a model fills in.

`{{name}}` is a hole for one or more characters of one line, `{{name:pattern}}` one for a match of a regular expression.
A brace in a pattern belongs to a repeat or a name, or is escaped. A hole ends at the first place where the fixed text
after it is complete. One without a pattern does not contain the first character of that text, so that the rest of it is
forced. Together with that text a hole is one terminal, and no text of it begins with another one, so reading terminals
greedily loses nothing.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from playground.errors import Refusal
from playground.grammar import limits

HOLE = re.compile(
    r"""\{\{ ([A-Za-z_]\w*) (?: : (
        (?: \\. | \[ \^? \]? (?: \\. | [^]\\] )* \] | \{ [^{}]* \} | [^[{}\\] )*  # escapes, classes, repeats, others
    ) )? \}\}""",
    re.DOTALL | re.VERBOSE,
)
FORM = "a hole is {{name}} or {{name:pattern}}"


@dataclass(frozen=True)
class Hole:
    """`pattern` is empty for one line of text; `after` is the fixed text behind the hole."""

    name: str
    pattern: str
    after: str


@dataclass(frozen=True)
class Template:
    """The fixed text before the first hole, and the holes in order."""

    before: str
    holes: tuple[Hole, ...]

    @classmethod
    def read(cls, source: str) -> Template:
        """Raises Refusal, about the source, where it is not a template."""
        before, *parts = HOLE.split(source)
        holes = tuple(Hole(*hole) for hole in zip(parts[::3], (part or "" for part in parts[1::3]), parts[2::3]))
        template = cls(before, holes)
        template._check()
        return template

    def _check(self) -> None:
        names = [hole.name for hole in self.holes]
        broken = next((text for text in (self.before, *(hole.after for hole in self.holes)) if "{{" in text), None)
        if broken is not None:
            raise _refusal(f"{broken[broken.index('{{'):][:40]!r} is not a hole: {FORM}")
        if not names:
            raise _refusal(f"it has no hole, and {FORM}")
        if len(names) > limits.HOLES:
            raise _refusal(f"it has {len(names):,} holes, and at most {limits.HOLES} are accepted")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise _refusal(f"two holes are called {twice!r}")
        if touching := next((hole.name for hole in self.holes[:-1] if not hole.after), None):
            raise _refusal(f"no fixed text follows the hole {touching!r}, so nothing says where it ends")

    def filled(self, text: str) -> dict[str, str]:
        """The holes that are complete in the beginning of a text, by name. The last one is complete with its text."""
        found, place = {}, len(self.before)
        for hole in self.holes:
            end = text.find(hole.after, place) if hole.after else -1
            if end < 0:
                break
            found[hole.name], place = text[place:end], end + len(hole.after)
        return found


def lark_of_template(template: Template) -> str:
    """The grammar in the Lark dialect."""
    before = [literal(template.before)] if template.before else []
    names = [f"HOLE_{number}" for number in range(len(template.holes))]
    rules = [line for name, hole in zip(names, template.holes) for line in _rules(name, hole)]
    return "\n".join([
        "%llguidance {}",
        f"start: {' '.join(before + names)}",
        "ANY: /(?s:.*)/",
        "SOME: /(?s:.+)/",
        *rules,
    ])


def _rules(name: str, hole: Hole) -> Iterator[str]:
    """The terminal of a hole and the fixed text after it."""
    pattern = hole.pattern or f"[^\\n{_letter(hole.after[0]) if hole.after else ''}]+"
    if not hole.after:
        yield f"{name}: {slashed(pattern)}"
        return
    after = literal(hole.after)
    yield f"{name}_FILLED: {slashed(pattern)}"
    yield f"{name}_WITH_MORE: ANY {after} SOME"
    yield f"{name}_CLOSED: {name}_FILLED {after}"
    yield f"{name}: {name}_CLOSED & ~{name}_WITH_MORE"


def slashed(pattern: str) -> str:
    """A regular expression as Lark writes it."""
    escapes = {"/": "\\/", "\n": "\\n"}
    return "/" + re.sub(r"\\.|/|\n", lambda part: escapes.get(part[0], part[0]), pattern, flags=re.DOTALL) + "/"


def _letter(letter: str) -> str:
    return f"\\x{{{ord(letter):X}}}"


def literal(text: str) -> str:
    """A string as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _refusal(reason: str) -> Refusal:
    return Refusal(f"The template cannot be used: {reason}.", "source")
