"""Grammars as llama.cpp writes them (GBNF), turned into the Lark dialect by llguidance's converter.

What its converter gets wrong is put right before it reads: "." means any character there, a line break too; "\\u00e9"
is a character below 0x1000 like any other; brackets may be escaped in a text; and "&&", "~~" and "--" are nothing
special in a class.
"""
from __future__ import annotations

import re
from collections import Counter

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from playground.engine import grammar_limits as limits
from playground.errors import Refusal

WORDS = re.compile(r"""
      (?P<comment> \#[^\r\n]*)
    | (?P<text> "(?:\\.|[^"\\])*")
    | (?P<class> \[(?:\\.|[^]\\])*\])
    | (?P<any> \.)""", re.VERBOSE)
ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
FORM = 'a GBNF grammar is lines such as  root ::= "yes" | [0-9]+'


def lark_of(source: str) -> str:
    """The same grammar in the Lark dialect; raises Refusal, with the line where one is to blame."""
    _check_size(source)
    plain = WORDS.sub(_plain, source)
    _check_rules(plain)
    try:
        return gbnf_to_lark(plain)
    except GbnfToLarkError as reason:
        raise _refusal(str(reason)) from None
    except RecursionError:
        raise _refusal("its brackets are nested too deeply") from None
    except Exception as reason:  # an unknown name is told as nothing more special
        raise _refusal(str(reason).replace("'", '"')) from None


def _check_size(source: str) -> None:
    """The converter takes time that grows with the square of these."""
    bare = WORDS.sub("", source)
    if (rules := bare.count("::=")) > limits.GBNF_RULES:
        raise _refusal(f"it has {rules:,} rules, and at most {limits.GBNF_RULES:,} are accepted")
    depth = deepest = 0
    for bracket in re.findall(r"[()]", bare):
        depth += 1 if bracket == "(" else -1
        deepest = max(deepest, depth)
    if deepest > limits.GBNF_DEPTH:
        raise _refusal(
            f"its brackets are nested too deeply: {deepest:,} deep, and at most {limits.GBNF_DEPTH} are accepted"
        )
    if any(len(number) > 9 or int(number) > limits.GBNF_REPEATS for number in re.findall(r"[{,]\s*([0-9]+)", bare)):
        raise _refusal(f"something is repeated more than {limits.GBNF_REPEATS:,} times")


def _check_rules(source: str) -> None:
    """The converter would keep the last of several rules with one name, and takes the name "start" for itself."""
    names = RULE.findall(WORDS.sub(lambda word: word[0] if word["any"] else "", source))
    if "root" not in names:
        raise _refusal(f"it has no rule called root; {FORM}")
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise _refusal(f'there are two rules called "{twice}"')
    if "start" in names:
        raise _refusal('a rule is called "start", which the engine keeps for itself: give it another name')


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
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise _refusal(f"{escape[0]} is no character")
    return chr(code) if code > 0x7F else f"\\x{code:02X}"


def _refusal(reason: str) -> Refusal:
    return Refusal(f"The GBNF grammar cannot be used: {reason.rstrip('.')}. Change or remove that part.")
