"""Whether every rule of a grammar has a finite text, by a fixpoint over the rules, before any token is looked at.

In `root ::= "a" root` no text ever ends. A rule has a finite text if one of its alternatives needs only rules that have
one; the other rules lead back to themselves for ever, and a text that enters one of them is never completed. Whether a
terminal matches anything, and where the lexer stops, is not looked at here (`lexed_sentences`).
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

from playground.grammar.lark.gbnf_expressions import Alt, Chars, Expression, Ref, Repeat, Seq, parts_of

ANY = Chars(((0, 0x10FFFF),))  # for a terminal
SHOWN = 6  # rules of a circle that a message names
WORD = re.compile(
    r"""(?P<head> ^[ \t]*[?!]*(?:[A-Za-z_]\w*)(?:\.-?[0-9]+)?(?:\[[^]\n]*\])?[ \t]*:)
    | (?P<statement> ^[ \t]*%[a-z]+)
    | (?P<inline> %[a-z]+[ \t\n]*(?=\{))
    | (?P<skipped> //[^\n]* | ->[ \t]*\w+ | \.\. | \n | [^\S\n]+)
    | (?P<terminal> "(?:\\.|[^"\\\n])*"i? | /(?:\\.|\[(?:\\.|[^]\\\n])*\]|[^/\\\n\[])+/[a-z]* | <[^>\n]*> | _*[A-Z]\w*)
    | (?P<times> [?*+] | \{[0-9]*,?[0-9]*\} | ~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)?)
    | (?P<name> [a-z_]\w*)
    | (?P<sign> [][()|])""",
    re.VERBOSE | re.MULTILINE,
)


def endless(rules: Mapping[str, Expression], start: str) -> str | None:
    """Why a text may never end: the rules that lead back to themselves, in a sentence's part; None if all end."""
    if start not in rules:
        return None  # which the parser says
    finite = _finite(rules)
    name = next((name for name in _entered(rules, start) if name not in finite), None)
    if name is None:
        return None
    path = [name]
    while path.count(path[-1]) < 2:
        path.append(_blocking(rules[path[-1]], rules, finite))
    circle = path[path.index(path[-1]):]
    shown = circle if len(circle) <= SHOWN else [*circle[:SHOWN - 1], "...", circle[-1]]
    what = "no finite text satisfies it" if start not in finite else f"a text that enters {name} can never be completed"
    return f"{what}: {', which needs '.join(shown).replace(', which needs ', ' needs ', 1)}, and so on for ever"


def _finite(rules: Mapping[str, Expression]) -> set[str]:
    found: set[str] = set()
    names, grown = list(rules), True
    while grown:
        before = len(found)
        names.reverse()  # so that long chains take few rounds, whichever way they are written
        for name in names:
            if name not in found and _ends(rules[name], rules, found):
                found.add(name)
        grown = len(found) > before
    return found


def _ends(expression: Expression, rules: Mapping[str, Expression], finite: set[str]) -> bool:
    match expression:
        case Ref(name):
            return name in finite or name not in rules  # an imported rule
        case Seq(parts):
            return all(_ends(part, rules, finite) for part in parts)
        case Alt(parts):
            return any(_ends(part, rules, finite) for part in parts)
        case Repeat(part, least, _):
            return least == 0 or _ends(part, rules, finite)
    return True


def _blocking(expression: Expression, rules: Mapping[str, Expression], finite: set[str]) -> str:
    """A rule that an expression without a finite text needs."""
    while not isinstance(expression, Ref):
        expression = next(part for part in parts_of(expression) if not _ends(part, rules, finite))
    return expression.name


def _entered(rules: Mapping[str, Expression], start: str) -> Iterator[str]:
    """The rules that a text may enter, the nearest ones first."""
    seen, waiting = {start}, [start]
    while waiting:
        yield (name := waiting.pop(0))
        new = [each for each in dict.fromkeys(_named(rules[name])) if each in rules and each not in seen]
        seen.update(new)
        waiting += new


def _named(expression: Expression) -> Iterator[str]:
    waiting = [expression]
    while waiting:
        match part := waiting.pop():
            case Ref(name):
                yield name
            case Repeat(most=0):
                continue
        waiting += reversed(parts_of(part))


# --- rules of Lark, as far as they refer to each other ---


def rules_of_lark(source: str) -> dict[str, Expression]:
    """The rules of a Lark grammar by name, terminals as any character. A rule that is not understood counts as one."""
    found: dict[str, Expression] = {}
    for name, words in _bodies(source):
        try:
            found[name] = _alternatives(words := [*words, ("sign", ")")])
        except (ValueError, IndexError):
            found[name] = ANY
            continue
        if words:  # more after its last bracket
            found[name] = ANY
    return found


def _bodies(source: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each rule with its words; statements, such as %ignore, are left out."""
    name = ""
    words: list[tuple[str, str]] = []
    for kind, text in _words(source):
        if kind in ("head", "statement"):
            if name:
                yield name, words
            named = re.search(r"[A-Za-z_]\w*", text) if kind == "head" else None
            name, words = named[0] if named else "", []
        elif kind != "skipped":
            words.append(("terminal" if kind == "inline" else kind, text))
    if name:
        yield name, words


def _words(source: str) -> Iterator[tuple[str, str]]:
    """The words of a grammar: the kind and the text. %json and %lark with their braces are one."""
    place = 0
    while place < len(source):
        found = WORD.match(source, place)
        end = found.end() if found else place + 1
        if found and found.lastgroup == "inline":
            end = _after_braces(source, end)
        yield found and found.lastgroup or "strange", source[place:end]
        place = end


def with_schemas(source: str, read: Callable[[str], str]) -> str:
    """A Lark grammar with every schema after %json replaced by what `read` makes of it."""
    parts = [
        f"%json {read(text[text.index('{'):])}" if kind == "inline" and text.startswith("%json") else text
        for kind, text in _words(source)
    ]
    return "".join(parts)


def _after_braces(source: str, place: int) -> int:
    """The place after the braces of %json or %lark."""
    try:
        return json.JSONDecoder().raw_decode(source, place)[1]
    except (ValueError, RecursionError):
        return place + 1 + source[place:].find("\n}") if "\n}" in source[place:] else len(source)


def _alternatives(words: list[tuple[str, str]]) -> Expression:
    """Alternatives up to a closing bracket, which is taken away with them."""
    options: list[list[Expression]] = [[]]
    while (word := words.pop(0))[1] not in (")", "]"):
        match word:
            case ("sign", "|"):
                options.append([])
            case ("sign", bracket):
                inner = _alternatives(words)
                options[-1].append(Repeat(inner, 0, 1) if bracket == "[" else inner)
            case ("times", times):
                options[-1].append(_repeated(options[-1].pop(), times))
            case ("name", name):
                options[-1].append(Ref(name))
            case ("terminal", _):
                options[-1].append(ANY)
            case _:
                raise ValueError(word[1])
    return Alt(tuple(Seq(tuple(parts)) for parts in options))


def _repeated(part: Expression, times: str) -> Repeat:
    if times in ("?", "*"):
        return Repeat(part, 0, None)
    numbers = re.findall(r"[0-9]+", times)
    least = 1 if times == "+" else 0 if times.startswith("{,") or not numbers else int(numbers[0])
    return Repeat(part, least, int(numbers[-1]) if numbers and not times.endswith(",}") else None)
