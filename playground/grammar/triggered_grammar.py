"""Grammars that apply after a trigger string only: free text, the trigger, a constrained part, and free text again.

The result is one grammar for llguidance, so a token may hold the end of the trigger together with the beginning of the
constrained part. That part ends at the first place where it is complete and the end string follows it. Regular
expressions and choices are one terminal together with the end string, which stops there. The other kinds have terminals
that match greedily, so an end string that would be read as part of them is refused.
"""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.kinds import KINDS
from playground.grammar.lark.lexed_sentences import unreadable
from playground.grammar.template_grammar import literal

WITHIN_NUMBERS = frozenset("0123456789.eE+-")
HEADER = "%llguidance {}\n"  # of a grammar that is not inside another


@dataclass(frozen=True)
class TriggeredSource:
    """A constraint of another kind and the strings around it. `end` may be empty: nothing follows then. Where
    `required` is false the trigger may never come, and every text is valid until it does. `most` bounds the characters
    of each free part; 0 does not.
    """

    kind: str
    source: str
    trigger: str
    end: str = ""
    required: bool = False
    most: int = 0

    def packed(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, packed: str) -> TriggeredSource:
        return cls(**json.loads(packed))

    def check(self) -> None:
        """Raise Refusal for a missing trigger, and for texts that are too long or cannot be written as UTF-8."""
        if not self.trigger:
            raise Refusal(
                "The trigger is empty: write the text after which the constraint applies, or use the constraint alone.",
                "trigger",
            )
        for name, text in (("trigger", self.trigger), ("end", self.end)):
            try:
                limits.check_text(f"{name} string", text, limits.TRIGGER_CHARACTERS)
            except Refusal as refused:
                raise Refusal(str(refused), name) from None
        if not self.source.strip():
            raise Refusal("The constraint after the trigger is empty: write one, or switch it off.", "source")
        limits.check_text(KINDS["triggered"], self.source)
        if self.kind == "choice":
            limits.check_options(self.source)
        self._check_end()

    def _check_end(self) -> None:
        """Raise Refusal for an end string with which no text, or not every text, could be completed."""
        if self.kind == "json_schema" and self.end[:1] in WITHIN_NUMBERS and self.end:
            raise Refusal(
                f"The end string begins with {self.end[0]!r}, which a number may go on with: begin it with another"
                " character.",
                "end",
            )
        if self.kind == "lark" and self.end and (reason := unreadable(self.source, self.end)):
            raise Refusal(f"The end string cannot follow this grammar: {reason}.", "end")


def lark_around(parts: TriggeredSource, compiled: str) -> str:
    """The whole grammar in the Lark dialect; `compiled` is the constraint alone, as llguidance reads it.

    The end string of a GBNF grammar is part of it already.
    """
    trigger, once_more = literal(parts.trigger), " rest" if parts.end else ""
    return "\n".join([
        HEADER.rstrip(),
        f"start: triggered body{once_more}" + ("" if parts.required else " | FREE"),
        *([f"rest: triggered body{once_more} | FREE"] if parts.end else []),
        *(["FREE: BOUNDED & ~TRIGGERED"] if parts.end or not parts.required else []),
        "ANYTHING: /(?s:.*)/",
        f"BOUNDED: /(?s:.{f'{{0,{parts.most}}}' if parts.most else '*'})/",
        f"TRIGGERED: ANYTHING {trigger} ANYTHING",
        f"triggered[lazy]: BOUNDED {trigger}",
        *body_rules(parts, compiled),
    ])


def body_rules(parts: TriggeredSource, compiled: str, name: str = "body") -> list[str]:
    """The rule with this name, the constrained part with its end string, and what it needs."""
    end, whole = f" {literal(parts.end)}" if parts.end else "", f"WHOLE_{name.upper()}"
    match parts.kind:
        case "json_schema":
            return [f"{name}: %json {json.dumps(json.loads(compiled)['grammars'][0]['json_schema'])}{end}"]
        case "regex" | "choice":
            lark = compiled if parts.kind == "choice" else json.loads(compiled)["grammars"][0]["lark_grammar"]
            return [f"{whole}: {lark.removeprefix('start: ')}", f"{name}{'[lazy]' if end else ''}: {whole}{end}"]
    inner = compiled.removeprefix(HEADER)
    return [f"{name}: %lark {{\n{inner}\n}}{end if parts.kind == 'lark' else ''}"]
