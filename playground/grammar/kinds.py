"""The kinds of constraints, and the parser that follows them: what compiling needs and running, too."""
from __future__ import annotations

from llguidance import LLParserLimits

from playground.grammar import limits

KINDS = {  # as messages call them
    "json_schema": "JSON Schema",
    "regex": "regex",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
    "choice": "list of choices",
    "triggered": "triggered constraint",
    "template": "template",
    "tags": "structural tags",
}


def parser_limits() -> LLParserLimits:
    """The limits of llguidance, the same wherever a grammar is compiled."""
    return LLParserLimits(**limits.PARSER)
