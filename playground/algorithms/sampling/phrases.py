"""Words and phrases as token sequences, and the tokens that would complete one of them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from playground.algorithms.sampling.repetition import in_vocabulary
from playground.errors import Refusal
from playground.request_limits import quoted

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract import Lane

Phrase = tuple[int, ...]


def spellings(lm: Lane, text: str, about: str) -> list[Phrase]:
    """A text as token ids, at the start of a line and after a space, without repeats.

    The name of a special token is that token, which no space precedes. A text has further tokenizations, such as one
    token per letter; they are not listed. Raises Refusal, about a setting, for a text that the model has no tokens for.
    """
    if not lm.can_spell(text):
        raise Refusal(f"This model has no tokens for {quoted(text)}: write it otherwise, or remove it.", about)
    plain = tuple(lm.spell(text))
    spaced = () if lm.special(plain[0]) else tuple(lm.spell(f" {text}"))
    return list(filter(None, dict.fromkeys((plain, spaced))))


def completing(history: list[int], phrases: Mapping[Phrase, float]) -> dict[int, float]:
    """The sum of the values of all phrases that a token would complete after a history, by token.

    A phrase of one token is completed by that token anywhere.
    """
    found: dict[int, float] = {}
    for phrase, value in phrases.items():
        before = len(phrase) - 1
        if before <= len(history) and tuple(history[len(history) - before:]) == phrase[:-1]:
            found[phrase[-1]] = found.get(phrase[-1], 0.0) + value
    return found


def biased(scores: Tensor, histories: Iterable[list[int]], phrases: Mapping[Phrase, float]) -> Tensor:
    """Scores [n, V] with the value of each phrase added to the token that would complete it."""
    changed = scores.clone()
    for row, history in zip(changed, histories):
        tokens, values = in_vocabulary(completing(history, phrases), len(row))
        row[tokens] += row.new_tensor(values)
    return changed
