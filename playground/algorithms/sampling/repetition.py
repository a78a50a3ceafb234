"""Repetitions in a text: earlier occurrences of its ending, and token counts."""
from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 50  # tokens; longer repeats count as this long


def repeat_lengths(history: list[int], longest: int = LONGEST) -> dict[int, int]:
    """For every token of a text, the length of the longest ending of the text that preceded it, at most `longest`.

    repeat_lengths([1, 2, 3, 7, 1, 2, 3]) is {1: 0, 2: 0, 3: 0, 7: 3}: appending 7 would repeat the three tokens before
    it, any other token none.
    """
    return dict.fromkeys(history, 0) | repeats(history, longest)


def repeats(history: list[int], longest: int = LONGEST) -> dict[int, int]:
    """As `repeat_lengths`, for the tokens that preceded some repeat only: few of a long text."""
    found: dict[int, int] = {}
    place = _next(history, 0) if longest > 0 else -1
    while place >= 0:
        follower = history[place + 1]
        found[follower] = max(found.get(follower, 0), _shared(history, place, longest))
        place = _next(history, place + 1)
    return found


def _next(history: list[int], start: int) -> int:
    """Next index of the last token from `start` on, except the last; -1 if there is none."""
    try:
        return history.index(history[-1], start, len(history) - 1)
    except (ValueError, IndexError):
        return -1


def _shared(history: list[int], place: int, longest: int) -> int:
    """Length of the common suffix of the history and of its part up to index `place`, at most `longest`."""
    count = 0
    while count < min(longest, place + 1) and history[place - count] == history[-1 - count]:
        count += 1
    return count


def last_tokens(history: list[int], start: int, window: int) -> list[int]:
    """The last `window` tokens of the history from index `start` on; 0: all of them."""
    return history[max(start, len(history) - window if window else 0):]


def lowered(scores: Tensor, counts: dict[int, int], penalty: float) -> Tensor:
    """Scores [V], each lowered by the penalty times the count of its token; ids beyond them are ignored."""
    tokens, numbers = in_vocabulary(counts, len(scores))
    places = torch.tensor(tokens, dtype=torch.long, device=scores.device)
    return scores.index_add(0, places, -penalty * scores.new_tensor(numbers))


def in_vocabulary(ids: dict[int, float], size: int) -> tuple[list[int], list[float]]:
    """Ids below `size` and their values, since logits may cover fewer tokens than the tokenizer."""
    known = {token: value for token, value in ids.items() if token < size}
    return list(known), list(known.values())


def parse_marks(text: str) -> tuple[str, ...]:
    r"""Split marks at spaces; \n becomes a line break, \t a tab."""
    return tuple(mark.replace("\\n", "\n").replace("\\t", "\t") for mark in text.split())
