"""What a text repeats: where its end stood before and what followed there, and how often each token occurs."""
from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 50  # tokens of a repeated stretch that are counted; longer ones count as this long


def echoes(history: list[int], longest: int = LONGEST) -> dict[int, int]:
    """For every token of a text, how many tokens before one of its places equal the end of the text, at most `longest`.

    echoes([1, 2, 3, 7, 1, 2, 3]) is {1: 0, 2: 0, 3: 0, 7: 3}: a 7 would repeat the three tokens before it, any other
    none.
    """
    found = dict.fromkeys(history, 0)
    place = _next(history, 0) if longest > 0 else -1
    while place >= 0:
        follower = history[place + 1]
        found[follower] = max(found[follower], _shared(history, place, longest))
        place = _next(history, place + 1)
    return found


def _next(history: list[int], start: int) -> int:
    """Next place that holds the last token and is not the last, -1 where there is none."""
    try:
        return history.index(history[-1], start, len(history) - 1)
    except (ValueError, IndexError):
        return -1


def _shared(history: list[int], place: int, longest: int) -> int:
    """How many tokens up to and with `place` equal as many at the end."""
    count = 0
    while count < min(longest, place + 1) and history[place - count] == history[-1 - count]:
        count += 1
    return count


def stretch(history: list[int], start: int, window: int) -> list[int]:
    """The last `window` tokens from `start` on; 0 takes all of them."""
    return history[max(start, len(history) - window if window else 0):]


def occurrences(tokens: list[int], size: int) -> Tensor:
    """How often each token of a vocabulary of `size` occurs, [size]; ids beyond it are passed over."""
    return torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=size)[:size]


def among(ids: dict[int, float], size: int) -> tuple[list[int], list[float]]:
    """Ids below `size` and what they hold, for rows that may have been made for fewer tokens than the text."""
    known = {token: value for token, value in ids.items() if token < size}
    return list(known), list(known.values())


def marks(text: str) -> tuple[str, ...]:
    r"""Marks a person wrote with spaces between them; \n stands for a line break, \t for a tab."""
    return tuple(mark.replace("\\n", "\n").replace("\\t", "\t") for mark in text.split())
