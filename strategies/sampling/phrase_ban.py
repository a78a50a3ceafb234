"""A ban on phrases, with rewinding."""
import math
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from playground.contract import Decoder, Lane, Sampler, Strategy, knob
from playground.engine.sampling import REMOVED
from playground.errors import Refusal
from playground.events import Event, Figure, Note

MOST, LONGEST = 64, 80  # phrases, and characters of one
SHOWN, BEFORE = 12, 4  # phrases in the figure, and tokens before each


class PhraseBan(Decoder):
    """Write freely, and when the text contains a banned phrase go back to where it began and write on differently.

    The token in which the phrase began is forbidden at that place only, so its words keep their probability elsewhere.
    The text is compared, not the tokens: a phrase is found however it was tokenised, in upper and lower case. A list of
    forbidden words, by contrast, bans the last token of a phrase, after its beginning was written. A place that was
    rewritten too often lets its phrase pass, with a note. The text does not follow the model's law given that no phrase
    occurs: each place is renormalised by itself. A factor above 0 makes the token less likely at each try instead of
    forbidding it. Without phrases this is plain decoding. sam-paech 2024 (antislop); the limit of tries is ours.
    """

    name, title, paper, sheet = "phrase_ban", "Phrase ban", "sam-paech 2024", "sampling/phrase-ban"
    guarantee = ("collapses",)
    new_in = "2026"
    # forced tokens leave no choice, and what was evicted or learnt from tokens that are taken back cannot be undone
    refuses = ("constraint", "cache_policy", "mirostat", "adaptive_p")

    phrases: str = knob("", multiline=True, help="banned phrases, one per line, in upper or lower case")
    factor: float = knob(
        0.0, 0.0, 1.0, step=0.01, help="what the probability of the token is multiplied by at each try; 0 forbids it"
    )
    tries: int = knob(20, 0, 100, step=1, help="how often a place is rewritten before its phrase may pass")

    def check(self) -> None:
        lines = self._lines()
        if len(lines) > MOST:
            raise Refusal(f"{len(lines)} phrases are too many: ban at most {MOST}.", "phrases")
        if any(len(line) > LONGEST for line in lines):
            raise Refusal(f"A phrase has more than {LONGEST} characters: ban a part of it.", "phrases")

    def _lines(self) -> list[str]:
        return list(dict.fromkeys(filter(None, map(str.strip, self.phrases.splitlines()))))

    def toggles(self) -> list[Strategy]:
        return [Discouraged()] if self._lines() else []

    def decode(self, lm: Lane) -> Iterator:
        rows = yield lm.prefill()
        branches, given = StruckBranches(), lm.generated  # a fork of a run begins with given tokens
        text = WatchedText(self._lines(), given, [len(lm.text)] * given)
        while True:
            choice = lm.pick(rows)
            phrase = text.phrase_in(lm.text_of([*lm.tokens[lm.prompt_length:], choice.token]))
            if phrase and text.tries[phrase.place] < self.tries:
                yield branches.taken(lm, phrase, choice)
                yield from self._take_back(lm, phrase, choice)
                text.take_back(phrase)
            else:
                if phrase:
                    yield Note(f"{phrase.text!r} passes: its place was rewritten {self.tries} times.")
                    text.passed = phrase.start + 1
                yield lm.keep(choice)
                text.ends.append(len(lm.text))
            rows = yield lm.extend()

    def _take_back(self, lm: Lane, phrase: "Phrase", choice) -> Iterator:
        """Remove the text from the token in which the phrase began, and make that token less likely there."""
        at = lm.prompt_length + phrase.place
        began_with = [*lm.tokens, choice.token][at]
        if lm.remaining > 1 and not lm.stop_strings:  # otherwise the last token of the phrase might end the text
            yield lm.keep(choice)
        yield lm.roll_back(lm.generated - phrase.place)
        sampler = next(sampler for sampler in lm.chain.samplers if isinstance(sampler, Discouraged))
        sampler.discourage(at, began_with, math.log(self.factor) if self.factor else REMOVED)


class Discouraged(Sampler):
    """Lowers the scores of some tokens at some places. It has no registered name: it is a part of the decoder."""

    stage, rank, draws = "penalty", 0, False

    def __post_init__(self):
        self.name, self.title = PhraseBan.name, PhraseBan.title
        self._changes: dict[int, Counter[int]] = {}  # what is added to the score of a token, by tokens before it

    def discourage(self, at: int, token: int, change: float) -> None:
        """Change the score of a token that follows `at` tokens. What was said of later places is forgotten."""
        self._changes = {place: changes.copy() for place, changes in self._changes.items() if place <= at}
        self._changes.setdefault(at, Counter())[token] += change

    def apply(self, scores, histories):
        changed = scores.clone()
        for row, history in zip(changed, histories):
            for token, change in self._changes.get(len(history), {}).items():
                row[token] += change
        return changed.where((changed > REMOVED).any(-1, keepdim=True), scores)


class Phrase(NamedTuple):
    """A banned phrase in the generated text."""

    text: str  # as it is written there
    start: int  # characters before it
    place: int  # index of the token in which it begins, among the generated ones


@dataclass
class WatchedText:
    """Where the tokens of a text end, and where it was rewritten."""

    phrases: list[str]
    border: int  # tokens that were given, which are never taken back
    ends: list[int]  # characters up to each token, itself included
    passed: int = 0  # characters that are not searched again
    tries: Counter[int] = field(default_factory=Counter)  # how often each place was rewritten

    def __post_init__(self):
        self._pattern = re.compile("|".join(map(re.escape, self.phrases)) or "(?!)", re.IGNORECASE)

    def phrase_in(self, text: str) -> Phrase | None:
        """The first banned phrase in a text that has grown by one token. Earlier ones are known."""
        before = self.ends[-1] if self.ends else 0
        found = self._pattern.search(text, max(self.passed, before - LONGEST))
        return found and Phrase(found[0], found.start(), max(self.border, bisect_right(self.ends, found.start())))

    def take_back(self, phrase: Phrase) -> None:
        """Forget the tokens from the place of a phrase on. How often places were tried stays, so the run ends."""
        del self.ends[phrase.place:]
        self.passed = min(self.passed, self.ends[-1] if self.ends else 0)
        self.tries[phrase.place] += 1


class StruckBranches:
    """What was taken back: the latest phrases, each below the words before it."""

    def __init__(self):
        self._branches: deque[tuple[int, list[str]]] = deque(maxlen=SHOWN)  # place, and pieces after the words before

    def taken(self, lm: Lane, phrase: Phrase, choice) -> Event:
        """A tree with one more branch; the values are places in the text, in tokens."""
        pieces = [lm.piece(token) for token in (*lm.tokens[lm.prompt_length:], choice.token)]
        before = "".join(pieces[max(0, phrase.place - BEFORE):phrase.place])
        self._branches.append((phrase.place, [f"{before}…", *pieces[phrase.place:]]))
        labels, parents, values = [], [], []
        for place, branch in self._branches:
            for depth, label in enumerate(branch):
                parents.append(len(labels) - 1 if depth else -1)
                labels.append(label)
                values.append(place + max(0, depth - 1))
        return Figure("tree", "phrases taken back", {"labels": labels, "parents": parents, "values": values})
