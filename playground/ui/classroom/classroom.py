"""A class: one presenter, whose runs many followers see live on pages of their own.

All followers read one log of frames (playground.ui.server.frame_log). Imports neither torch nor gradio.
"""
from __future__ import annotations

import secrets
import threading
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from playground.errors import Refusal
from playground.player.frames import recording
from playground.request_limits import in_range, quoted
from playground.trace import Trace
from playground.ui.classroom.join_attempts import JoinAttempts
from playground.ui.play.lessons import LessonQuestion, lessons
from playground.ui.server.frame_log import COMMENT, FrameLog, Pulse, message, silent
from playground.ui.server.worker import Run

FOLLOWERS = 60
AWAY = 120.0  # seconds after which a follower without a stream gives up the place
NAME, CODE, SAID = 40, 40, 300  # characters
MARKS = 3  # accents and the like on one letter of a line
BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # letters of which nothing is seen
STREAMS = 4  # tabs of one follower
BARS = 12  # different numbers whose votes are counted separately


@dataclass(eq=False)
class Follower:
    number: int
    name: str
    seen: float = field(default_factory=monotonic)
    streams: int = 0
    vote: int | float | None = None

    @property
    def away(self) -> bool:
        return not self.streams and monotonic() - self.seen > AWAY


@dataclass(frozen=True)
class RunAnswer:
    """What the presenter's run answers: the choice that holds (None if none does), or a number (None if the run has no
    such number), and the readings behind it in words.
    """

    choice: int | None
    value: float | None
    said: str


def shown_line(given: str, longest: int) -> str:
    """A line as others see it: short, without line breaks and characters that turn, hide or cover the text."""
    seen = "".join(one if one.isprintable() and one not in BLANK else " " for one in given[:1000])
    return _unstacked(" ".join(seen.split()))[:longest].strip()


def _unstacked(text: str) -> str:
    """A text without marks that have no letter, and without more of them on one letter than a script has."""
    kept, marks = [], MARKS
    for one in text:
        is_mark = unicodedata.category(one).startswith("M")
        marks = marks + 1 if is_mark else MARKS if one == " " else 0
        if not is_mark or marks <= MARKS:
            kept.append(one)
    return "".join(kept)


class Classroom:
    """One class. The presenter is whoever has `key`; `control` is the follower who may use the page as well.

    link: the address of the followers' page, once the page is served.
    """

    def __init__(self, link: str = ""):
        self.link = link
        self.code, self.key = f"{secrets.randbelow(10**6):06}", secrets.token_urlsafe(24)
        self.followers: dict[str, Follower] = {}  # by token
        self.control = ""  # token of the follower with the controls
        self.question: tuple[str, int, LessonQuestion] | None = None  # lesson, step and its question
        self.answer: RunAnswer | None = None  # of the presenter's run to this question
        self.log = FrameLog()
        self._joined = self._version = 0
        self._counted: list[dict[str, Any]] = []  # the votes as followers have them
        self.attempts, self._pulse, self._lock = JoinAttempts(), Pulse(), threading.Lock()

    # Joining

    def join(self, code: str, name: str, address: str) -> str:
        """The token of a new follower. Raises Refusal for a wrong code and for a full class."""
        with self._lock:
            if not secrets.compare_digest("".join(code[:CODE].split()).encode(errors="replace"), self.code.encode()):
                self.attempts.add_wrong(address)
                raise Refusal("This is not the code of the class, which has six digits: check it.", "code")
            self._dismiss_absent()
            if len(self.followers) >= FOLLOWERS:
                raise Refusal(f"The class is full: at most {FOLLOWERS} can follow.", "code")
            self._joined += 1
            token = secrets.token_urlsafe(24)
            shown = shown_line(name, NAME) or f"Follower {self._joined}"
            self.followers[token] = Follower(self._joined, shown)
            return token

    def _dismiss_absent(self) -> None:
        for token in [token for token, one in self.followers.items() if one.away and token != self.control]:
            del self.followers[token]

    def may_run(self, presenter: str, follower: str) -> bool:
        """Whether the cookies of a request allow the use of the page itself."""
        return self.is_presenter(presenter) or bool(self.control) and secrets.compare_digest(
            follower.encode(), self.control.encode()
        )

    def is_presenter(self, key: str) -> bool:
        return secrets.compare_digest(key.encode(), self.key.encode())

    # What followers see

    def show(self, run: Run) -> None:
        """Send a run to all followers from now on, in a thread of its own."""
        log = self.log = FrameLog()
        threading.Thread(target=self._send, args=(run, log), name="classroom", daemon=True).start()

    def show_trace(self, trace: Trace) -> None:
        """Send a trace file that the presenter has opened. Raises Refusal if it is too long to follow."""
        log = FrameLog()
        headers, events = [asdict(header) for header in trace.headers], [stamped.to_json() for stamped in trace.events]
        if not log.add({**recording(headers, events), "fromFile": True}):
            raise Refusal("This trace is too long to be sent to the class: open a shorter one.", "trace")
        self.log = log
        self._pulse.beat()

    def _send(self, run: Run, log: FrameLog) -> None:
        for frame in run.follow():
            if log is not self.log or not log.add(frame):
                return
            self._pulse.beat()

    async def stream(self, token: str) -> AsyncIterator[bytes]:
        """Server-sent events for one follower: the frames of the shown run from its beginning, and the class's state.
        """
        follower = self.followers[token]
        follower.streams += 1
        try:
            async for part in self._parts(token):
                yield part
        finally:
            follower.streams -= 1
            follower.seen = monotonic()

    async def _parts(self, token: str) -> AsyncIterator[bytes]:
        log, sent, version = self.log, 0, -1
        while token in self.followers:
            news = self._pulse.listen()
            if log is not self.log and sent == len(log.frames):
                log, sent = self.log, 0
            fresh = log.piece(sent)
            sent += len(fresh)
            if version != self._version:
                version = self._version
                fresh.append(message("state", self._seen_by(token)))
            if fresh:
                yield b"".join(fresh)
            elif await silent(news):
                yield COMMENT

    def _seen_by(self, token: str) -> dict[str, Any]:
        """The state of the class for a follower, who sees the votes after an own one, or with the answer."""
        vote = self.followers[token].vote
        return {
            "question": self._open_question(),
            "vote": vote,
            "votes": self.votes() if self.answer or vote is not None else [],
            "answer": self._given_answer(),
            "control": token == self.control,
            "name": self.followers[token].name,
        }

    def _open_question(self) -> dict[str, Any] | None:
        """The question without its answer."""
        if self.question is None:
            return None
        lesson, step, question = self.question
        choices = [text for text, *_ in question.choices]
        return {"id": f"{lesson} {step}", "text": question.text, "choices": choices, "number": question.guess}

    def _given_answer(self) -> dict[str, Any] | None:
        """The answer, with the lesson's explanation of it."""
        if self.question is None or self.answer is None:
            return None
        return {**asdict(self.answer), "because": self.question[2].because}

    # Predictions

    def ask(self, lesson: str, step: int) -> None:
        """Ask the question of a lesson's step, if it has one. Raises Refusal for an unknown step."""
        known = lessons().get(lesson)
        if known is None or type(step) is not int or not 0 <= step < len(known.steps):
            raise Refusal(f"There is no such step of a lesson {quoted(lesson)}.", "lessons")
        question = known.steps[step].question
        asked = (lesson, step, question) if question else None
        with self._lock:
            if asked == self.question:
                return
            self.question, self.answer, self._counted = asked, None, []
            for follower in self.followers.values():
                follower.vote = None
        self._change()

    def vote(self, token: str, asked: str, value: Any) -> None:
        """Take or replace a follower's prediction. Raises Refusal for a question that is over, and for no answer."""
        with self._lock:
            now = self._open_question()
            if now is None or now["id"] != asked:
                raise Refusal("This question is over.", "vote")
            choices = now["choices"]
            is_choice = type(value) is int and 0 <= value < len(choices)
            if not (is_choice if choices else in_range(value, -1e9, 1e9)):
                raise Refusal("This is not an answer to the question: choose one, or enter a number.", "vote")
            self.followers[token].vote = value

    def reveal(self, asked: str, choice: Any, value: Any, said: str) -> None:
        """Take what the presenter's run answers. Raises Refusal for a question that is over, and for no answer to it.
        """
        with self._lock:
            now = self._open_question()
            if now is None or now["id"] != asked:
                raise Refusal("This question is over.", "answer")
            known = range(len(now["choices"]))
            if not (choice is None or type(choice) is int and choice in known):
                raise Refusal("This is not one of the choices of the question.", "answer")
            if not (value is None or in_range(value, -1e9, 1e9)):
                raise Refusal("This is not an answer to the question: it is no number.", "answer")
            answer = RunAnswer(choice, value, shown_line(said, SAID))
            if answer == self.answer:
                return
            self.answer = answer
        self._change()

    def votes(self) -> list[dict[str, Any]]:
        """The bars of the chart: a label and a count each; of many different numbers, the most frequent ones."""
        given = Counter(one.vote for one in self.followers.values() if one.vote is not None)
        asked = self._open_question()
        if asked is None:
            return []
        if asked["choices"]:
            return [{"label": text, "count": given[i]} for i, text in enumerate(asked["choices"])]
        return [{"label": f"{value:g}", "count": count} for value, count in sorted(given.most_common(BARS))]

    # For the presenter

    def hand_over(self, number: int | None) -> None:
        """Give the controls to a follower as well, or with None take them back. Raises Refusal."""
        with self._lock:
            found = [token for token, one in self.followers.items() if one.number == number]
            if number is not None and not found:
                raise Refusal("This follower has left.", "control")
            self.control = found[0] if found else ""
        self._change()

    def state(self) -> dict[str, Any]:
        """What the presenter sees of the class. The presenter's page asks for it once a second, and new votes reach the
        followers with it: so their bars grow with those on the screen, and nobody's votes send more than that.
        """
        with self._lock:
            votes = self.votes()
            if votes != self._counted:
                self._counted = votes
                self._change()
            present = [one for one in self.followers.values() if one.streams]
            control = self.followers.get(self.control)
            return {
                "code": self.code,
                "link": self.link,
                "followers": [{"number": one.number, "name": one.name} for one in present],
                "question": self._open_question(),
                "votes": votes,
                "control": control.number if control else None,
            }

    def _change(self) -> None:
        self._version += 1
        self._pulse.beat()
