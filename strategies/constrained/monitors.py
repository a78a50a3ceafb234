"""Monitor-guided decoding, for Python."""
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from playground.algorithms.programs.program_attributes import attributes, check_available
from playground.confined.child import ConfinedTask
from playground.contract import Lane, Sampler, knob
from playground.contract.sampler import Consultation
from playground.engine.sampling import REMOVED, first_largest
from playground.events import Event, Figure, Note
from playground.grammar.limits import CODE_CHARACTERS, check_text

SHOWN = 8  # names
PART = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") | frozenset(range(0x80, 0x100))
AFTER_A_DOT = re.compile(rb"\.([A-Za-z0-9_\x80-\xff]*)\Z")
FENCE = "```"


class Analyses(dict[str, list[str] | None]):
    """Names by the program up to the dot; None if its analysis failed. Sequences that fork share it."""

    def __deepcopy__(self, memo: dict) -> "Analyses":
        return self


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
        help="processor time of one analysis; beyond it nothing is masked, and another run may differ",
    )

    spelling: ClassVar[Spelling]  # these three come from the lane
    special: ClassVar[Callable[[int], bool]]
    text_of: ClassVar[Callable[[list[int]], str]]
    known: ClassVar[Analyses]

    def check(self):
        check_text("code above the text", self.above, CODE_CHARACTERS)
        check_text("code below the text", self.below, CODE_CHARACTERS)

    def prepare(self, lm: Lane):
        check_available()
        self.spelling = Spelling([lm.bytes(token) for token in range(lm.vocabulary)], lm.end_ids)
        # not copied when sequences fork
        self.special, self.text_of = lambda token: lm.special(token), lambda tokens: lm.text_of(tokens, after=[])
        self.known = Analyses()
        yield lm.background(lambda: attributes("", "", self.seconds))  # starts the process, which takes seconds

    def consult(self, histories: Sequence[list[int]]) -> Consultation | None:
        if self.mask == "soft" and not self.nats:
            return None
        found = (self._program(history) for history in histories if self._begun(history))
        programs = [program for program in dict.fromkeys(found) if program not in self.known]
        if not programs:
            return None
        task = ConfinedTask()
        return Consultation(lambda: self._analyse(programs, task), task.cancel)

    def _analyse(self, programs: list[str], task: ConfinedTask) -> None:
        for program in programs:
            self.known[program] = attributes(program, self.below, self.seconds, task)

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
        begun = self._begun(history)
        if not begun:
            return {}
        spelled = {name: name.encode() for name in self._names(self._program(history))}
        return {name: whole[len(begun[1]):] for name, whole in spelled.items() if whole.startswith(begun[1])}

    def _begun(self, history: list[int]) -> re.Match[bytes] | None:
        """The dot at the end of a text, with what has been written of the name after it."""
        return AFTER_A_DOT.search(self.spelling.tail(history))

    def _program(self, history: list[int]) -> str:
        """The program up to the last dot; if there are fences, only the text inside them."""
        start = next((place for place in range(len(history), 0, -1) if self.special(history[place - 1])), 0)
        parts = self.text_of(history[start:]).rpartition(".")[:2]
        outside, *fenced = "".join(parts).split(FENCE)
        if len(fenced) % 2 == 0 and fenced:
            return ""
        return self.above + (fenced[-1].partition("\n")[2] if fenced else outside)

    def _names(self, program: str) -> list[str]:
        return [name for name in self.known.get(program) or [] if self._shown(name, program)]

    def _shown(self, name: str, program: str) -> bool:
        if not name.startswith("_") or self.underscores == "all":
            return True
        return self.underscores == "own" and re.search(rf"\b{re.escape(name)}\b", program + self.below) is not None

    def explain(self, scores, history, token) -> Iterator[Event]:
        begun, rests = self._begun(history), self._rests(history)
        if rests:
            yield from self._told(scores, rests, begun[1].decode("utf-8", "replace"), token)
        elif begun and not begun[1]:
            failed = self.known.get(self._program(history), []) is None
            cause = "The analysis of the program took too long" if failed else "The type of the value is unknown"
            yield Note(f"{cause} at this dot, so nothing is masked.")

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
