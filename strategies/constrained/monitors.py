"""Monitor-guided decoding, for Python."""
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from threading import Lock, Thread
from time import monotonic
from typing import ClassVar

import torch
from torch import Tensor

from playground.contract import Sampler, knob
from playground.engine.grammar_limits import CODE_CHARACTERS, check_text
from playground.engine.sampling import REMOVED, first_largest
from playground.errors import Refusal
from playground.events import Event, Figure, Note

SHOWN = 8  # names
PART = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") | frozenset(range(0x80, 0x100))
AFTER_A_DOT = re.compile(rb"\.([A-Za-z0-9_\x80-\xff]*)\Z")
MEMBERS = ("function", "property", "statement", "instance", "class", "module")
FENCE = "```"
# held during a jedi analysis: all of them share one subprocess, where two at a time would read each other's
# answers
ASKED = Lock()


class Spelling:
    """Tokens by the bytes they add to a text. It does not change, so sequences that fork share it."""

    def __init__(self, spelled: list[bytes], ends: frozenset[int]):
        self.spelled = spelled
        self._ordered = sorted((text, token) for token, text in enumerate(spelled) if text)
        self._whole: dict[bytes, list[int]] = {}
        for text, token in self._ordered:
            self._whole.setdefault(text, []).append(token)
        self._breaking = [token for text, token in self._ordered if text[0] not in PART] + sorted(ends)

    def __deepcopy__(self, memo: dict) -> "Spelling":
        return self

    def tail(self, history: list[int]) -> bytes:
        """The end of a text, back to a token with a byte outside names, or to one without text."""
        tail = b""
        for token in reversed(history):
            tail = self.spelled[token] + tail
            if not PART.issuperset(self.spelled[token]) or not self.spelled[token]:
                break
        return tail

    def legal(self, rest: bytes) -> list[int]:
        """Tokens that are a prefix of the rest of a name, or all of it followed by a byte outside names; after a
        whole name the end too.
        """
        if not rest:
            return self._breaking
        shorter = [token for end in range(1, len(rest)) for token in self._whole.get(rest[:end], ())]
        longer = [token for text, token in self._beginning(rest) if text == rest or text[len(rest)] not in PART]
        return shorter + longer

    def _beginning(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        for i in range(bisect_left(self._ordered, (prefix,)), len(self._ordered)):
            if not self._ordered[i][0].startswith(prefix):
                return
            yield self._ordered[i]


class Monitors(Sampler):
    """After "name." in a Python program only attributes of the value before the dot are allowed, as an editor would
    list them.

    A static analysis reads the program up to the dot and lists the attributes; until one of them is complete, tokens
    that begin none are removed: a token may hold a piece of the name, or its end and later text. Everywhere else, and
    if the analysis finds nothing, scores are unchanged. Attributes set at run time are missing from the list, so a hard
    mask can remove the right name: a soft one subtracts `nats`, and 0 changes nothing. A name in one token with its dot
    is checked only after that token. The program is the text after the last special token, or in the last open fence of
    ```; only the standard library and the program itself are known. Analysis: jedi. Agrawal et al. 2023, arXiv
    2306.10763, for Java; Python and the soft mask are ours.
    """

    name, title, paper, sheet = "monitors", "Monitor-guided (Python)", "2306.10763", "constrained/monitors"
    stage, rank, draws = "penalty", 60, False
    guarantee = ("collapses",)
    reconstruction = True

    mask: str = knob(
        "hard",
        choices=("hard", "soft"),
        help="hard: tokens that begin no listed name are removed; soft: they become less likely",
    )
    nats: float = knob(
        5.0, 0.0, 20.0, step=0.5, help="soft: subtracted from the logits of such tokens; 0 changes nothing"
    )
    underscores: str = knob(
        "own",
        choices=("none", "own", "all"),
        help="names that begin with _: none of them, those the program itself writes, or all",
    )
    above: str = knob("", multiline=True, file=True, help="code before the text, for the analysis")
    below: str = knob("", multiline=True, file=True, help="code after the text")
    seconds: float = knob(
        1.5,
        0.1,
        1.5,
        step=0.1,
        help="time limit of one analysis; beyond it nothing is masked, and another run may differ",
    )

    spelling: ClassVar[Spelling]  # these three come from the lane
    special: ClassVar[Callable[[int], bool]]
    text_of: ClassVar[Callable[[list[int]], str]]
    known: ClassVar[dict[str, list[str]]]  # names by the program up to the dot

    def check(self):
        check_text("code above the text", self.above, CODE_CHARACTERS)
        check_text("code below the text", self.below, CODE_CHARACTERS)

    def prepare(self, lm):
        check_installed()
        self.spelling = Spelling([lm.bytes(token) for token in range(lm.vocabulary)], lm.end_ids)
        # not copied when sequences fork
        self.special, self.text_of = lambda token: lm.special(token), lambda tokens: lm.text_of(tokens, after=[])
        self.known = {}
        yield lm.background(analysis)  # loading it takes seconds

    def apply(self, scores, histories):
        found = [
            (row, rests) for row, history in enumerate(histories) if (rests := list(self._rests(history).values()))
        ]
        if not found or self.mask == "soft" and not self.nats:
            return scores
        scores = scores.clone()
        for row, rests in found:
            scores[row] = self._masked(scores[row], self._legal(rests, scores.shape[-1]).to(scores.device))
        return scores

    def _masked(self, row: Tensor, legal: Tensor) -> Tensor:
        if self.mask == "soft":
            return torch.where(legal, row, row - self.nats)
        masked = row.masked_fill(~legal, REMOVED)
        # a grammar removed them all, and a row must never be empty
        return masked if bool((masked > REMOVED).any()) else row

    def _legal(self, rests: list[bytes], vocabulary: int) -> Tensor:
        """Tokens that continue one of the names, bool [V]."""
        legal = torch.zeros(vocabulary, dtype=torch.bool)
        legal[[token for rest in rests for token in self.spelling.legal(rest) if token < vocabulary]] = True
        return legal

    def _rests(self, history: list[int]) -> dict[str, bytes]:
        """The remaining bytes of each allowed name; empty if anything is allowed."""
        begun = AFTER_A_DOT.search(self.spelling.tail(history))
        if not begun:
            return {}
        spelled = {name: name.encode() for name in self._names(self._program(history))}
        return {name: whole[len(begun[1]):] for name, whole in spelled.items() if whole.startswith(begun[1])}

    def _program(self, history: list[int]) -> str:
        """The program up to the last dot; if there are fences, only the text inside them."""
        start = next((place for place in range(len(history), 0, -1) if self.special(history[place - 1])), 0)
        parts = self.text_of(history[start:]).rpartition(".")[:2]
        outside, *fenced = "".join(parts).split(FENCE)
        if len(fenced) % 2 == 0 and fenced:
            return ""
        return self.above + (fenced[-1].partition("\n")[2] if fenced else outside)

    def _names(self, program: str) -> list[str]:
        if program not in self.known:
            self.known[program] = in_time(self.seconds, lambda: members(program, self.below)) or []
        return [name for name in self.known[program] if self._shown(name, program)]

    def _shown(self, name: str, program: str) -> bool:
        if not name.startswith("_") or self.underscores == "all":
            return True
        return self.underscores == "own" and re.search(rf"\b{re.escape(name)}\b", program + self.below) is not None

    def explain(self, scores, history, token) -> Iterator[Event]:
        begun = AFTER_A_DOT.search(self.spelling.tail(history))
        rests = self._rests(history)
        if rests:
            yield from self._told(scores, rests, begun[1].decode("utf-8", "replace"), token)
        elif begun and not begun[1]:
            yield Note("The type of the value before this dot is unknown, so nothing is masked.")

    def _told(self, scores: Tensor, rests: dict[str, bytes], begun: str, token: int) -> Iterator[Event]:
        p = scores.softmax(-1).cpu()
        odds = {name: float(p[self._legal([rest], len(p))].sum()) for name, rest in rests.items()}
        likeliest = sorted(odds, key=odds.get, reverse=True)[:SHOWN]
        yield Figure("bars", "names that can follow, probability of their first tokens",
                     {"labels": likeliest, "values": [odds[name] for name in likeliest]})
        legal, best = self._legal(list(rests.values()), len(p)), int(first_largest(p))
        wanted = (
            ""
            if legal[best]
            else (
                f" The model wanted {self.piece(best)!r} ({float(p[best]):.0%}), which begins none of them"
                f"{'; it got ' + repr(self.piece(token)) if token != best else ''}."
            )
        )
        place, names = f" and {begun!r}" if begun else "", f"{len(rests)} name{'s' * (len(rests) > 1)}"
        yield Note(
            f"After the dot{place} {names} may stand, by {int(legal.sum())} of {len(p)} tokens; the others had"
            f" {float(p[~legal].sum()):.0%}.{wanted}"
        )


def check_installed() -> None:
    if find_spec("jedi") is None:
        raise Refusal(
            'monitors asks the library jedi for the names: install it with `pip install "jedi>=0.20,<0.21"`.',
            "monitors",
        )


@cache
def analysis() -> None:
    """Load jedi and its data on the standard library, which takes seconds; raises Refusal if it is not installed."""
    check_installed()
    with ASKED:
        members("''.", "")


def members(program: str, below: str) -> list[str]:
    """Attributes of the value before the dot that ends a program, by static analysis; empty if it is unknown.

    Nothing is run or imported, and no file is read except the library's own description of the standard library.
    """
    import jedi
    import parso
    end = parso.parse(program).get_last_leaf()
    dot = end.get_previous_leaf()
    if end.prefix or dot is None or dot.value != ".":  # the dot belongs to a comment, a string or a number
        return []
    lines = parso.split_lines(program)
    nowhere = jedi.Project(os.devnull, sys_path=[], smart_sys_path=False)
    found = jedi.Script(f"{program}\n{below}", project=nowhere).complete(len(lines), len(lines[-1]))
    return sorted({entry.name for entry in found if entry.type in MEMBERS})


def in_time(seconds: float, ask: Callable[[], list[str]]) -> list[str] | None:
    """The result of a call; None if it fails or times out. An abandoned call runs to its end, and the next one waits
    for it.
    """
    heard: list[list[str]] = []
    end = monotonic() + seconds
    if not ASKED.acquire(timeout=seconds):
        return None

    def work() -> None:
        with suppress(Exception):  # an incomplete program can raise anything
            heard.append(ask())
        ASKED.release()

    worker = Thread(target=work, daemon=True)
    worker.start()
    worker.join(max(0.0, end - monotonic()))
    return heard[0] if heard else None
