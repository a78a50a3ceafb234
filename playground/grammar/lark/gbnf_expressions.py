"""Expressions of a GBNF grammar, read by the parser of llguidance into five kinds of nodes.

Differences of that parser from llama.cpp are corrected first: "." means any character there, a line break too;
"\\u00e9" is a character below 0x1000 like any other; brackets may be escaped in a text; and "&&", "~~" and "--" are
nothing special in a class.
"""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from llguidance import gbnf_to_lark as gbnf

from playground.errors import Refusal
from playground.grammar import limits

LAST = 0x10FFFF
ROOT = "root"
WORDS = re.compile(r"""
      (?P<comment> \#[^\r\n]*)
    | (?P<text> "(?:\\.|[^"\\])*")
    | (?P<class> \[(?:\\.|[^]\\])*\])
    | (?P<any> \.)""", re.VERBOSE)
ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\(.)|(.)", re.DOTALL)
NAMED = {"n": "\n", "r": "\r", "t": "\t"}
RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
FORM = 'a GBNF grammar is lines such as  root ::= "yes" | [0-9]+'


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of these ranges, both ends included."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Seq:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Alt:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """`most` is None for any number."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Ref:
    name: str


Expression = Chars | Seq | Alt | Repeat | Ref


def parts_of(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case Seq(parts) | Alt(parts):
            return parts
        case Repeat(part):
            return (part,)
    return ()


def rules_of(source: str) -> dict[str, Expression]:
    """The rules by name, including ROOT; raises Refusal, with the line if there is one."""
    _check_size(source)
    plain = WORDS.sub(_plain, source)
    _check_rules(plain)
    try:
        rules = gbnf.GrammarParser().parse(plain)
    except gbnf.GbnfToLarkError as reason:
        raise refusal(str(reason)) from None
    return {name: _expression(rule.alternatives, set(rules)) for name, rule in rules.items()}


def refusal(reason: str) -> Refusal:
    return Refusal(f"The GBNF grammar cannot be used: {reason.rstrip('.')}. Change or remove that part.")


def _check_size(source: str) -> None:
    """The parser takes time that grows with the square of these."""
    bare = WORDS.sub("", source)
    if (rules := bare.count("::=")) > limits.GBNF_RULES:
        raise refusal(f"it has {rules:,} rules, and at most {limits.GBNF_RULES:,} are accepted")
    depth = deepest = 0
    for bracket in re.findall(r"[()]", bare):
        depth += 1 if bracket == "(" else -1
        deepest = max(deepest, depth)
    if deepest > limits.GBNF_DEPTH:
        raise refusal(
            f"its brackets are nested too deeply: {deepest:,} deep, and at most {limits.GBNF_DEPTH} are accepted"
        )
    if any(len(number) > 9 or int(number) > limits.GBNF_REPEATS for number in re.findall(r"[{,]\s*([0-9]+)", bare)):
        raise refusal(f"something is repeated more than {limits.GBNF_REPEATS:,} times")


def _check_rules(source: str) -> None:
    """The parser would keep the last of several rules with one name."""
    names = RULE.findall(WORDS.sub(lambda word: word[0] if word["any"] else "", source))
    if ROOT not in names:
        raise refusal(f"it has no rule called root; {FORM}")
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise refusal(f'there are two rules called "{twice}"')


def _plain(word: re.Match) -> str:
    if word["any"]:
        return r'(. | "\n")'
    if word["comment"]:
        return word[0]
    if word["text"]:
        return ESCAPE.sub(lambda escape: escape[0][1] if escape[0][1] in "[]" else _character(escape), word[0])
    return re.sub(r"[&~]|(?<=-)-", _escaped, ESCAPE.sub(_character, word[0]))


def _escaped(character: re.Match) -> str:
    return f"\\x{ord(character[0]):02X}"


def _character(escape: re.Match) -> str:
    r"""Unescape characters above ASCII; those below stay escaped, as "\x5D", since they may be syntax there."""
    digits = escape[1] or escape[2]
    if not digits:
        return escape[0]
    code = int(digits, 16)
    if code > LAST or 0xD800 <= code < 0xE000:
        raise refusal(f"{escape[0]} is no character")
    return chr(code) if code > 0x7F else f"\\x{code:02X}"


def _expression(node: gbnf.ASTNode, names: set[str]) -> Expression:
    match node:
        case gbnf.LiteralNode(value=text):
            return _single([Chars(((code, code),)) for code, _ in _codes(text)], Seq)
        case gbnf.RegexNode(rx="."):
            return Chars(others(((10, 10),)))
        case gbnf.RegexNode(rx=text):
            return Chars(_class(text))
        case gbnf.RuleRefNode(name=name):
            if name not in names:
                raise refusal(f'Rule "{name}" not found')
            return Ref(name)
        case gbnf.RepetitionNode(node=inner, min_times=least, max_times=most):
            return Repeat(_expression(inner, names), least, most)
        case gbnf.SequenceNode(nodes=nodes):
            return _single([_expression(inner, names) for inner in nodes], Seq)
        case gbnf.AlternativeNode(alternatives=nodes):
            return _single([_expression(inner, names) for inner in nodes], Alt)
    raise TypeError(type(node).__name__)


def _single(parts: list[Expression], kind: type[Seq | Alt]) -> Expression:
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _codes(text: str) -> list[tuple[int, bool]]:
    """Characters of a text or class as numbers, and whether each is written without an escape."""
    return [
        (int(number, 16) if number else ord(NAMED.get(escaped, escaped) or plain), bool(plain))
        for number, escaped, plain in CHARACTER.findall(text)
    ]


def _class(text: str) -> tuple[tuple[int, int], ...]:
    """The ranges of a class as it is written, brackets included."""
    codes = _codes(text[1:-1])
    negated = codes[:1] == [(ord("^"), True)]
    codes, ranges = codes[negated:], []
    while codes:
        first = last = codes[0][0]
        if len(codes) > 2 and codes[1] == (ord("-"), True):
            last, codes = codes[2][0], codes[2:]
        if last < first:
            raise refusal(f"the range from {chr(first)!r} to {chr(last)!r} is empty")
        ranges.append((first, last))
        codes = codes[1:]
    return others(tuple(ranges)) if negated else tuple(ranges)


def others(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All characters in none of the ranges."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return tuple(found + ([(at, LAST)] if at <= LAST else []))
