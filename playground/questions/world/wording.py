"""Wordings: patterns that expand to many sentences, so that a model learns the task and not a template.

`[a|b]` is a choice, `[|a]` an optional part, choices nest; `{x}` is a slot, filled after the choices are made. In a
list of wordings, a line that begins with `~` is held out for the evaluation and never used in training.
"""
import re
from functools import cache

MARKS = re.compile(r"([\[\]|])")


class Wordings:
    """Patterns for one purpose, one per line: `taught` in training, or `kept` for the evaluation."""

    def __init__(self, text):
        lines = [line.strip() for line in text.strip().splitlines()]
        self.taught = [line for line in lines if not line.startswith("~")]
        self.kept = [line.removeprefix("~").strip() for line in lines if line.startswith("~")]

    def __len__(self):
        """Number of wordings that the training patterns expand to, not counting slots."""
        return sum(map(count, self.taught))

    def draw(self, rng, kept=False):
        """A random wording with unfilled slots; with `kept`, a held-out one if there is any."""
        return expand(rng, rng.choice(self.kept if kept and self.kept else self.taught))

    def any(self, rng):
        """A random wording, held out or not, for text that is not evaluated by wording."""
        return expand(rng, rng.choice(self.taught + self.kept))


def expand(rng, pattern):
    """The pattern with every choice resolved by `rng`."""
    return _pick(rng, tree(pattern))


def count(pattern):
    """Number of expansions of a pattern; equal options are counted separately."""
    return _ways(tree(pattern))


@cache
def tree(pattern):
    """Parse a pattern into a tuple of strings and choices; a choice is a list of such tuples.

    Raises ValueError for unbalanced brackets.
    """
    parts = MARKS.split(pattern)
    found = _sequence(parts, 0)
    if found[1] != len(parts):
        raise ValueError(f"A bracket is closed that was never opened in: {pattern}")
    return found[0]


def _sequence(parts, at):
    """Parse up to the end of an option: (parts of the sequence, index of the end)."""
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
    """Parse a choice that opens at `at`: (its options, index of the closing bracket)."""
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
