"""Extraction of the final answer of a text, normalised so that equal answers are equal strings and others are not."""
from __future__ import annotations

import re
from itertools import pairwise

from playground.algorithms.search.answer_value import NUMBER, NotANumber, plain, value, written

# a number for lists, where a comma separates; parenthesised arithmetic; products, quotients and powers of these
ITEM = r"(?:\d++(?:\.\d++)?|\.\d++)"
GROUP = r"\([-+*/^%\d\s.]+\)"
POWER = rf"(?:sqrt\s*{GROUP}|{GROUP}|{NUMBER})(?:\s*\^\s*(?:{GROUP}|-?\d+))?"
SIGN = r"(?:±\s*|(?<![\w)%.])[-+])?"
EXPRESSION = rf"(?<![_^\d.±]){SIGN}{POWER}(?:\s*[*/]\s*{POWER})*(?::\d+)*%?"
ENTRY = rf"\s*[-+]?(?:{GROUP}|{ITEM})(?:[/^]-?\d+)?%?\s*"
LIST = rf"(?<![A-Za-z])[(\[⟦]{ENTRY}(?:,{ENTRY})+[)\]⟧]"
FOUND = re.compile(rf"{LIST}|{EXPRESSION}")
STATED_FIRST = re.compile(rf"{LIST}|(?<![_^\d.±]){ENTRY}(?:,\s{ENTRY})+|{EXPRESSION}")  # "1, 2" is a list, too

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
STATED = re.compile(r"(?:\banswer is|\banswer:|####)([^\n]*)", re.IGNORECASE)
SENTENCE_END = re.compile(r"\.(?:\s|$)")
NAMED = re.compile(r"\s*[A-Za-z]\w?(?:\([a-z]\))?\s*=(?!=)")
FUNCTIONS = r"(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp)\b)"
# possessive: a text that is no unit is given up at once, not in all the ways that it can be divided
UNIT = re.compile(rf"(.*?[\d)%])\s*{FUNCTIONS}(?:[A-Za-z]{{2,}}+|[mgshlLJNWVK])(?:[ /^*-]*+[A-Za-z\d²³()]++)*+\.?")
BLANKS = re.compile(r"[^\S\n]+|\n\s*")  # runs of them cost the patterns above their square
DEEPEST = 8  # lists inside each other that are normalised
BRACES = str.maketrans("⟦⟧", "{}")
BRACKETS = {"(": ")]", "[": ")]", "⟦": "⟧"}


def final_answer(text: str) -> str | None:
    """The answer that a text states, as in "\\boxed{1/2}", "the answer is 1/2" or "#### 1/2"; else its last number.

    Numbers are exact: a decimal if it terminates, else a fraction in lowest terms; powers, roots and percentages are
    computed, units and currencies dropped. Tuples, intervals and sets are normalised entry by entry, other expressions
    only in their spelling. None if the text has no number and no box.
    """
    text = BLANKS.sub(lambda run: "\n" if run[0][0] == "\n" else " ", text)
    boxes = list(_boxes(text))
    stated = [(at, normal(content)) for at, content in boxes if content.strip()]
    for found in STATED.finditer(text):
        if not any(found.start() < at < found.end() for at, _ in boxes) and (answer := _stated(found[1])):
            stated.append((found.start(), answer))
    if stated:
        return max(stated)[1]  # by position
    numbers = FOUND.findall(plain(BOXED.sub(" ", text)))
    return normal(numbers[-1]) if numbers else None


def last_words(text: str, count: int) -> str | None:
    """The last `count` words, without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold())[-count:]) or None


def whole_text(text: str) -> str | None:
    """The whole text with whitespace normalised."""
    return " ".join(text.split()) or None


def normal(answer: str, depth: int = 0) -> str:
    """One answer in its normal form; `depth` is the number of lists around it."""
    answer = NAMED.sub("", plain(answer).strip().rstrip("."), count=1).strip()
    try:
        return written(value(answer))
    except NotANumber:
        pass
    if depth < DEEPEST and (entries := _entries(answer, depth)) is not None:
        return entries
    if unit := UNIT.fullmatch(answer):
        return normal(unit[1], depth + 1)
    spelling = re.sub(r"[\s\\]+", "", answer).translate(BRACES).casefold()
    return re.sub(r"\^\((\w+)\)", r"^\1", spelling)


def _boxes(text: str):
    """Position and content of each closed box; braces inside it are balanced."""
    boxes, opened = {box.end() - 1: box.start() for box in BOXED.finditer(text)}, []
    for brace in re.finditer(r"(?<!\\)[{}]", text) if boxes else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) in boxes:
            yield boxes[start], text[start + 1:brace.start()]


def _stated(rest: str) -> str | None:
    """The answer at the beginning of the rest of a line, on the right of an equals sign if there is one."""
    sentence = SENTENCE_END.split(plain(rest), maxsplit=1)[0]
    found = STATED_FIRST.search(sentence.rpartition("=")[2]) or STATED_FIRST.search(sentence)
    return normal(found[0]) if found else None


def _entries(answer: str, depth: int) -> str | None:
    """A list of several entries in its normal form, a set sorted; None if it is no list."""
    first, last = answer[:1], answer[-1:]
    bracketed = first in BRACKETS and last in BRACKETS[first]
    parts = _split(answer[1:-1] if bracketed else answer)
    if len(parts) < 2 or not all(part.strip() for part in parts):
        return None
    entries = [normal(part, depth + 1) for part in parts]
    if first == "⟦" and bracketed:
        return "{" + ",".join(sorted(entries)) + "}"
    return (first if bracketed else "") + ",".join(entries) + (last if bracketed else "")


def _split(text: str) -> list[str]:
    """The parts between commas that are in no bracket."""
    ends, depth = [-1], 0
    for at, character in enumerate(text):
        depth += (character in "([⟦") - (character in ")]⟧")
        if character == "," and depth == 0:
            ends.append(at)
    return [text[start + 1:end] for start, end in pairwise([*ends, len(text)])]
