"""Converts llama.cpp's grammars (GBNF) to Lark grammars of the same language.

GBNF has no lexer: a text belongs to a grammar if its characters do. The Lark dialect has one, whose terminals match
greedily. `greedy_lexing` finds the parts that mean the same to it; everything else becomes rules over them, in
the worst case over single characters.
"""
from __future__ import annotations

from collections.abc import Iterator

from playground.grammar.lark.gbnf_expressions import (
    LAST,
    ROOT,
    Alt,
    Chars,
    Expression,
    Ref,
    Repeat,
    Seq,
    refusal,
    rules_of,
)
from playground.grammar.lark.greedy_lexing import terminals
from playground.grammar.lark.productive_rules import endless

SURROGATES = (0xD800, 0xDFFF)
CLOSED, TAIL, INNER = "a text and its end", "what follows", "a text"  # no names that a grammar can give


def lark_of(source: str, end: str = "") -> str:
    """The same grammar in the Lark dialect; raises Refusal, with the line if there is one.

    With `end` every text of it ends with that string, and stays the same if any other text follows it.
    """
    try:
        rules = rules_of(source)
        if reason := endless(rules, ROOT):
            raise refusal(reason)
        writer = _Writer(followed(rules, end), CLOSED) if end else _Writer(rules)
        return "\n".join(["%llguidance {}", *writer.lines()])
    except RecursionError:
        raise refusal("its brackets are nested too deeply") from None


def followed(rules: dict[str, Expression], end: str) -> dict[str, Expression]:
    """The rules with `end` behind the root, as the rule CLOSED, and any text behind that."""
    any_character = Chars(((0, LAST),))
    inner = {_renamed(name): _with_renamed(rule) for name, rule in rules.items()}
    return {
        ROOT: Seq((Ref(CLOSED), Ref(TAIL))),
        CLOSED: Seq((Ref(INNER), *(Chars(((ord(letter), ord(letter)),)) for letter in end))),
        TAIL: Alt((Seq((any_character, Ref(TAIL))), Seq(()))),  # recursive, so that it is no part of a terminal
        **inner,
    }


def _renamed(name: str) -> str:
    return INNER if name == ROOT else name


def _with_renamed(expression: Expression) -> Expression:
    match expression:
        case Ref(name):
            return Ref(_renamed(name))
        case Seq(parts) | Alt(parts):
            return type(expression)(tuple(map(_with_renamed, parts)))
        case Repeat(part, least, most):
            return Repeat(_with_renamed(part), least, most)
    return expression


class _Writer:
    """Writes rules as lines of Lark, named by numbers, since Lark reserves some names."""

    def __init__(self, rules: dict[str, Expression], start: str = ROOT):
        self.rules, self.start, self.terminals = rules, start, terminals(rules)
        self.names = {start: "start"}  # of the rules that are referred to

    def lines(self) -> Iterator[str]:
        waiting = [self.start]
        while waiting:
            known = len(self.names)
            name = waiting.pop()
            yield f"{self.names[name]}: {self.rule(self.rules[name])}"
            waiting += list(self.names)[known:]

    def rule(self, expression: Expression) -> str:
        """An expression as rules over terminals."""
        if expression in self.terminals or isinstance(expression, Chars):
            return f"/{self.regex(expression)}/" if self.regex(expression) else '""'
        match expression:
            case Ref(name):
                return self.names.setdefault(name, f"r{len(self.names)}")
            case Seq(parts):
                return " ".join(map(self.rule, parts)) or '""'
            case Alt(parts):
                return f"({' | '.join(map(self.rule, parts))})"
            case Repeat(part, least, most):
                return f"({self.rule(part)}){_times(least, most)}"
        raise TypeError(type(expression).__name__)

    def regex(self, expression: Expression) -> str:
        """An expression without recursion as one regular expression."""
        match expression:
            case Chars(ranges):
                return f"[{''.join(map(_range, ranges))}]"
            case Ref(name):
                return f"({self.regex(self.rules[name])})"
            case Seq(parts):
                return "".join(map(self.regex, parts))
            case Alt(parts):
                return f"({'|'.join(map(self.regex, parts))})"
            case Repeat(part, least, most):
                return f"({self.regex(part)}){_times(least, most)}"
        raise TypeError(type(expression).__name__)


def _range(ends: tuple[int, int]) -> str:
    low = SURROGATES[1] + 1 if SURROGATES[0] <= ends[0] <= SURROGATES[1] else ends[0]
    high = SURROGATES[0] - 1 if SURROGATES[0] <= ends[1] <= SURROGATES[1] else ends[1]
    if low >= high:
        return f"\\x{{{low:X}}}" if low == high else ""
    return f"\\x{{{low:X}}}-\\x{{{min(high, LAST):X}}}"


def _times(least: int, most: int | None) -> str:
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
