"""What programs may ask of the page, each by its name: `run`, `compare`, `strategies`, `examples`, `questions`. They
are its API and its MCP tools.

A frame of `run` travels as JSON text. Gradio sends the difference between one answer and the next, and in 6.31 its
clients break on a list that grows shorter by two or more; a text is replaced as a whole.

Types and docstrings become the description of the endpoints, so annotations stay objects here.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from playground.bench.questions import Question
from playground.bench.questions import gallery as answerable
from playground.contract import discover, find
from playground.contract.metadata import facts
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.request_limits import quoted
from playground.trace import Trace
from playground.trace.comparison import compared
from playground.trace.result import Result
from playground.ui.admission_queue import API
from playground.ui.gallery import examples as gallery
from playground.ui.live_view import to_json
from playground.ui.readers import ends_unread
from playground.ui.settings import CHOICES, DEFAULT, LANES, Settings
from playground.ui.site import Site
from playground.ui.worker import Run
from playground.ui.zero_gpu import RemoteRun

Lane = dict[str, Any]
Turns = list[list[str]] | None
BLANK = {"knobs": {}, "extras": [], "forced": []}  # what a lane has where nothing is said
SHAPE = 'write it as {"strategy": "greedy", "knobs": {}, "extras": [["top_p", {"p": 0.9}]], "seed": 3}, where all but the strategy may be left out'
ASKED = f"""
        Args:
            prompt: text to continue
            lanes: one to {LANES} lanes, such as {{"strategy": "greedy", "knobs": {{}}, "extras": [["top_p", {{"p": 0.9}}]], "seed": 3}}
            seed: of the lanes that have none of their own; lanes with one seed share their draws
            length: most tokens a lane may write
            mode: "raw", or "chat" for the model's chat template
            system: system message of a chat
            stop: strings that end a text, one a line
            context: a passage that every lane reads before the prompt
            model: target model, from the page's list; "default" is the one the page was started with
            draft: draft model; "default" is the target's own, "none" is none
            before: earlier turns of a chat, [[user, assistant], ...]
"""


def publish(site: Site) -> None:
    """Make the endpoints of one site, in the Blocks that are being laid out. Their runs wait in the same admission
    queue as those of the page.
    """
    for ask in (run_endpoint(site), compare_endpoint(site)):
        gr.api(ask, api_name=ask.__name__, concurrency_limit=None)
    for ask in (strategies, examples, questions):
        gr.api(ask, api_name=ask.__name__, queue=False)


def run_endpoint(site: Site) -> Callable[..., Iterator[str]]:
    """`run` over one site."""

    def run(
        prompt: str,
        lanes: list[Lane],
        seed: int = 0,
        length: int = 64,
        mode: str = "raw",
        system: str = "",
        stop: str = "",
        context: str = "",
        model: str = DEFAULT,
        draft: str = DEFAULT,
        before: Turns = None,
    ) -> Iterator[str]:
        asked = {"prompt": prompt, "lanes": lanes, "seed": seed, "length": length, "mode": mode, "system": system, "stop": stop, "context": context,
                 "model": model, "draft": draft, "before": before or []}
        with _told(), _queued(site, asked) as turn:
            yield from (to_json({"state": "waiting", "place": place}) for place in turn.wait())
            running = turn.start()
            yield from (to_json(frame) for frame in running.frames() if frame)
            if running.error:
                raise Refusal(running.error)

    return _described(
        ends_unread(run),
        'Run lanes over a prompt and stream what they do, as frames in JSON: {"run", "n", "events", "state", and first '
        '"headers"}. While others have the machine, a frame is {"state": "waiting", "place"}, with the place in the queue.',
    )


def compare_endpoint(site: Site) -> Callable[..., Iterator[list[dict[str, Any]]]]:
    """`compare` over one site. It answers nothing, again and again, until all is said: between two answers Gradio sees
    that a client has left.
    """

    def compare(
        prompt: str,
        lanes: list[Lane],
        seed: int = 0,
        length: int = 64,
        mode: str = "raw",
        system: str = "",
        stop: str = "",
        context: str = "",
        model: str = DEFAULT,
        draft: str = DEFAULT,
        before: Turns = None,
    ) -> Iterator[list[dict[str, Any]]]:
        asked = {
            "prompt": prompt,
            "lanes": lanes,
            "seed": seed,
            "length": length,
            "mode": mode,
            "system": system,
            "stop": stop,
            "context": context,
            "model": model,
            "draft": draft,
            "before": before or [],
        }
        with _told(), _queued(site, asked) as turn:
            yield from ([] for _ in turn.wait())
            running = turn.start()
            yield from ([] for _ in running.frames())
            if running.error:
                raise Refusal(running.error)
            yield _comparison(running.trace)

    return _described(
        ends_unread(compare),
        "Run lanes over a prompt to their end and tell what each came to: text, token ids, metrics, how right it is "
        "where the answer is known, and where it leaves the first lane's text. A lane that fails says why in its place; while lanes "
        "write, the answer is an empty list.",
    )


def strategies(name: str = "") -> list[dict[str, Any]]:
    """Tell which decoding strategies there are: what each does, its paper, its promises, what it needs, its slots and
    its knobs.

    Those of the kinds decoder, canvas_decoder and preset are a lane's "strategy"; the other kinds go into its "extras".

    Args:
        name: one strategy, such as "top_p"; all where it is left empty
    """
    with _told():
        return [facts(find(name))] if name else [facts(cls) for cls in discover().values()]


def examples() -> list[dict[str, Any]]:
    """Tell which examples come with the page: prompts with lanes that suit them, by the names of the arguments of `run`
    and `compare`.
    """
    return gallery()


def questions(task: str = "") -> list[dict[str, Any]]:
    """Tell which questions have answers the page knows: asked exactly so, as a chat, `compare` judges what each lane
    answers.

    Each has the arguments of `run` and `compare` beside its task, the answer that is expected, and what to look at.

    Args:
        task: one task, such as "arithmetic"; all where it is left empty
    """
    with _told():
        known = {question.task for question in answerable()}
        if task and task not in known:
            raise Refusal(f"There is no task {quoted(task)}: choose one of {', '.join(sorted(known))}.", "task")
        return [_question(question) for question in answerable() if task in ("", question.task)]


# --- how they do it ---

def _question(question: Question) -> dict[str, Any]:
    turns = [[*turn] for turn in question.before]
    asked = {
        "prompt": question.prompt,
        "mode": "chat" if question.chat else "raw",
        "context": question.context,
        "before": turns,
    }
    return {"task": question.task, **asked, **question.settings, "expected": question.expected, "look": question.look}


def _described(ask: Callable[..., Any], does: str) -> Callable[..., Any]:
    ask.__doc__ = f"{does}\n{ASKED}"
    return ask


@contextmanager
def _told() -> Iterator[None]:
    """A refusal reaches the program as its sentence."""
    try:
        yield
    except Refusal as refusal:
        raise gr.Error(str(refusal), print_exception=False) from None


class Turn:
    """A program's request on its way: what it asked for, its place in the queue, and its run once that has begun."""

    def __init__(self, site: Site, settings: Settings):
        self.site, self.settings = site, settings
        self.arrival = site.arrival(settings)
        self.ticket = site.join(API)
        self.run: Run | RemoteRun | None = None

    def wait(self) -> Iterator[int]:
        """The place in the queue until it is this request's turn."""
        return self.ticket.wait()

    def start(self) -> Run | RemoteRun:
        """Begin the run; raises Refusal."""
        self.run = self.site.start(self.arrival, self.settings, Memory())
        return self.run

    def end(self) -> None:
        self.ticket.leave()
        if self.run:
            self.run.stop()


@contextmanager
def _queued(site: Site, asked: dict[str, Any]) -> Iterator[Turn]:
    """A program's request in the queue; its run ends where the program leaves. Raises Refusal."""
    settings = _settings(asked)
    settings.check(site.rules)
    turn = Turn(site, settings)
    try:
        yield turn
    finally:
        turn.end()


def _settings(asked: dict[str, Any]) -> Settings:
    """What a program asked for; raises Refusal for what a page would leave at its default."""
    settings = Settings.read(asked)
    for name, value in asked.items():
        if name != "lanes" and getattr(settings, name) != value:
            raise Refusal(f"{name} must be {_allowed(name)}, not {quoted(value)}.", name)
    _check_lanes(asked["lanes"])
    return settings


def _allowed(name: str) -> str:
    kinds = {int: "a whole number", str: "text", list: "a list of [user, assistant] pairs"}
    return f"one of {', '.join(CHOICES[name])}" if name in CHOICES else kinds[type(getattr(Settings(), name))]


def _check_lanes(lanes: Any) -> None:
    if not isinstance(lanes, list) or len(lanes) > LANES:
        raise Refusal(f"The lanes must be a list of one to {LANES}.", "lanes")
    for number, lane in enumerate(lanes, 1):
        if not _is_understood(lane):
            raise Refusal(f"Lane {number} is not understood: {SHAPE}.", "lanes")


def _is_understood(lane: Any) -> bool:
    """Whether nothing of a lane was left away in reading it."""
    return isinstance(lane, dict) and Settings.read({"lanes": [lane]}).lanes == [BLANK | lane]


def _comparison(trace: Trace) -> list[dict[str, Any]]:
    """The lanes beside the first; raises Refusal where none came through."""
    results = [Result(trace.lane(header.lane)) for header in trace.headers]
    if all(result.reason == "failed" for result in results):
        raise Refusal(results[0].message)
    return compared(results, 0)
