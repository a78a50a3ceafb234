"""Wordings: short patterns that each stand for many sentences, so that a model learns the task and not a template.

`[a|b]` is a choice, `[|a]` something that may be left out, choices nest; `{x}` is a slot and is filled after the
choices are made. In a list of wordings a line that begins with `~` is kept for the evaluation: training never shows it.
"""
import re
from functools import cache

MARKS = re.compile(r"([\[\]|])")


class Wordings:
    """Several patterns for one purpose, one a line: `taught` to everybody, or `kept` for the evaluation."""

    def __init__(self, text):
        lines = [line.strip() for line in text.strip().splitlines()]
        self.taught = [line for line in lines if not line.startswith("~")]
        self.kept = [line.removeprefix("~").strip() for line in lines if line.startswith("~")]

    def __len__(self):
        """How many different wordings the taught patterns stand for, slots not counted."""
        return sum(map(count, self.taught))

    def draw(self, rng, kept=False):
        """One wording with its slots still open; a kept one only where there is any."""
        return expand(rng, rng.choice(self.kept if kept and self.kept else self.taught))

    def any(self, rng):
        """One wording, taught or kept, where no evaluation hangs on it."""
        return expand(rng, rng.choice(self.taught + self.kept))


def expand(rng, pattern):
    """The pattern with every choice made by `rng`."""
    return _pick(rng, tree(pattern))


def count(pattern):
    """How many different ways a pattern can be expanded (two equal options count twice)."""
    return _ways(tree(pattern))


@cache
def tree(pattern):
    """A pattern as a tuple of strings and choices; a choice is a list of such tuples. ValueError: unbalanced brackets.
    """
    parts = MARKS.split(pattern)
    found = _sequence(parts, 0)
    if found[1] != len(parts):
        raise ValueError(f"A bracket is closed that was never opened in: {pattern}")
    return found[0]


def _sequence(parts, at):
    """Read up to the end of an option: (parts of the sequence, where it stopped)."""
    read = []
    while at < len(parts) and parts[at] not in ("|", "]"):
        if parts[at] == "[":
            options, at = _options(parts, at)
            read.append(options)
        else:
            read.append(parts[at])
        at += 1
    return tuple(read), at


def _options(parts, at):
    """Read a choice that opens at `at`: (its options, the place of the closing bracket)."""
    options = []
    while parts[at] != "]":
        option, at = _sequence(parts, at + 1)
        if at == len(parts):
            raise ValueError(f"A bracket is not closed in: {''.join(parts)}")
        options.append(option)
    return options, at


def _pick(rng, sequence):
    return "".join(part if isinstance(part, str) else _pick(rng, rng.choice(part)) for part in sequence)


def _ways(sequence):
    total = 1
    for part in sequence:
        total *= 1 if isinstance(part, str) else sum(map(_ways, part))
    return total
