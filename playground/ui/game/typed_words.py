"""The lookup of a word that a team typed: its first token after the text so far, and what the model gives it."""
from __future__ import annotations

import threading
from collections.abc import Callable
from os.path import commonprefix
from typing import Any

from playground.errors import Refusal
from playground.request_limits import MAX_TOKEN_ID, check_text
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.settings import Settings
from playground.ui.server.site import Site

MOST_WORDS = 8  # words being looked up or waiting for it: each takes a thread of the server
LONGEST = 40  # characters of a typed word
MOST_IDS = 200_000  # tokens before a typed word; the model's context length is checked later


def probability_lookup(site: Site) -> Callable[..., dict[str, Any]]:
    """The server function of the board; it looks up one word at a time."""
    lock, waiting = threading.Lock(), threading.BoundedSemaphore(MOST_WORDS)

    def probability(asked: dict[str, Any]) -> dict[str, Any]:
        """The first token of a word after given tokens, and its probability.

        asked: {"ids": the tokens before, "word", "spaced": whether they end with whitespace}. Returns {"id", "piece",
        "p"}, or {"refused": message}.
        """
        try:
            ids, word = _checked(asked)
            if not waiting.acquire(blocking=False):
                raise Refusal(f"{MOST_WORDS} words are being looked up already: try again in a moment.", "word")
            try:
                with lock, as_refusals("The lookup of this word", "word"):
                    return _probability(site, ids, word, bool(asked.get("spaced")))
            finally:
                waiting.release()
        except Refusal as refusal:
            return {"refused": str(refusal)}
    return probability


def _checked(asked: Any) -> tuple[list[int], str]:
    ids, word = (asked.get("ids"), asked.get("word")) if isinstance(asked, dict) else (None, None)
    if not isinstance(word, str) or len(word) > 2 * LONGEST or not 0 < len(word.strip()) <= LONGEST:
        raise Refusal(f"Type one word of at most {LONGEST} characters.", "word")
    if (
        not isinstance(ids, list)
        or len(ids) > MOST_IDS
        or not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids)
    ):
        raise Refusal("The page sent malformed tokens: start the game again.", "word")
    check_text(word, "word", LONGEST, "word")
    return ids, word.strip()


def _probability(site: Site, ids: list[int], word: str, spaced: bool) -> dict[str, Any]:
    settings = Settings()
    target = site.chosen.load(settings).result().target
    token = first_token(target.tokens, word, spaced)
    layers = site.runs.look(settings, target.name, ids, token)["layers"]
    return {"id": token, "piece": target.tokens.piece(token), "p": layers[-1]["chosen"]}


def first_token(tokens: Any, word: str, spaced: bool) -> int:
    """Id of the first token of a word that follows other text.

    The word is preceded by a space, unless it is punctuation or the text ends with whitespace (`spaced`).
    """
    before = "a\n" if spaced else "a " if word[0].isalnum() else "a"
    opening, whole = tokens.encode(before), tokens.encode(before + word)
    return whole[min(len(commonprefix([opening, whole])), len(whole) - 1)]
