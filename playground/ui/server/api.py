"""The API endpoints of the page, which are its MCP tools too: `run`, `compare`, `strategies`, `examples`, `questions`.

A frame of `run` is sent as JSON text. Gradio sends the difference between one answer and the next, and in 6.31 its
clients fail on a list that gets shorter by two or more; a text is replaced as a whole.

Types and docstrings become the description of the endpoints, so annotations stay objects here.
"""
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from playground.contract import discover, find
from playground.contract.lane_config import LaneConfig
from playground.contract.metadata import facts
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.player.frames import to_json
from playground.questions.questions import Question
from playground.questions.questions import gallery as answerable
from playground.remote.remote_server import RemoteServer
from playground.request_limits import quoted
from playground.trace import Trace
from playground.trace.comparison import compared
from playground.trace.result import Result
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.settings import CHOICES, DEFAULT, LANES, Settings
from playground.ui.guard.readers import ends_unread
from playground.ui.play.gallery import examples as gallery
from playground.ui.server.admission_queue import API
from playground.ui.server.site import Site
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun

Lane = dict[str, Any]
Endpoint = Callable[..., Iterator[Any]]
Turns = list[list[str]] | None
BLANK = {"knobs": {}, "extras": [], "forced": []}  # defaults of a lane
EXAMPLE = '{"strategy": "greedy", "knobs": {}, "extras": [["top_p", {"p": 0.9}]], "seed": 3}'
SHAPE = f"write it as {EXAMPLE}; only the strategy is required"
ARGUMENTS = f"""
        Args:
            prompt: text to continue
            lanes: one to {LANES} lanes, such as {EXAMPLE}
            seed: of the lanes without a seed of their own; lanes with the same seed share their random draws
            length: maximum number of tokens a lane generates
            mode: "raw", or "chat" for the model's chat template
            system: system message of a chat
            stop: strings that end a text, one per line
            context: a passage that every lane reads before the prompt
            model: target model, from the page's list; "default" is the one the page was started with
            draft: draft model; "default" is the target's own, "none" is none
            before: earlier turns of a chat, [[user, assistant], ...]
            remote: address of a server with the OpenAI completions interface, which generates one more lane; not on a
                public page
            remote_model: the server's name of the model
            remote_key: the server's key, if it needs one
            form: how context and prompt become one text, such as "{{context}} Question: {{prompt}}"
            tools: tools of a chat as for a chat API, a list or its JSON, which the model's chat template describes
"""


def publish(site: Site) -> None:
    """Add the endpoints of a site to the current Blocks. Their runs share the admission queue of the page."""
    for endpoint in (run_endpoint(site), compare_endpoint(site)):
        gr.api(endpoint, api_name=endpoint.__name__, concurrency_limit=None)
    for endpoint in (strategies, examples, questions):
        gr.api(endpoint, api_name=endpoint.__name__, queue=False)


def run_endpoint(site: Site) -> Endpoint:
    """The endpoint `run` of a site."""
    return _endpoint(
        "run",
        site,
        _frames,
        "Run lanes over a prompt and stream their events as frames in JSON: "
        '{"run", "n", "events", "state", and in the first "headers"}. '
        'While the run waits for a seat, a frame is {"state": "waiting", "place"}, with the place in the queue.',
    )


def compare_endpoint(site: Site) -> Endpoint:
    """The endpoint `compare` of a site.

    It yields empty answers until the lanes are done: Gradio notices only between two answers that a client has left.
    """
    return _endpoint(
        "compare",
        site,
        _results,
        "Run lanes over a prompt to their end and return the result of each: text, token ids, metrics, its score "
        "if the answer is known, and where its text diverges from the first lane's. A lane that fails has an error "
        "message instead; while the lanes generate, the answer is an empty list.",
    )


def strategies(name: str = "") -> list[dict[str, Any]]:
    """List the decoding strategies: what each does, its paper, guarantees, requirements, slots and knobs.

    Those of the kinds decoder, canvas_decoder and preset are a lane's "strategy"; the other kinds go into its "extras".

    Args:
        name: one strategy, such as "top_p"; all if empty
    """
    with _refusals_as_errors():
        return [facts(find(name))] if name else [facts(cls) for cls in discover().values()]


def examples() -> list[dict[str, Any]]:
    """List the examples of the page: prompts with suitable lanes, under the argument names of `run` and `compare`."""
    return gallery()


def questions(task: str = "") -> list[dict[str, Any]]:
    """List the questions with known answers. If one is asked unchanged, as a chat, `compare` scores each lane's answer.

    Each has the arguments of `run` and `compare`, its task, the expected answer, and what to look at.

    Args:
        task: one task, such as "arithmetic"; all if empty
    """
    with _refusals_as_errors():
        known = {question.task for question in answerable()}
        if task and task not in known:
            raise Refusal(f"There is no task {quoted(task)}: choose one of {', '.join(sorted(known))}.", "task")
        return [_question(question) for question in answerable() if task in ("", question.task)]


# --- implementation ---

def _question(question: Question) -> dict[str, Any]:
    turns = [[*turn] for turn in question.before]
    arguments = {
        "prompt": question.prompt,
        "mode": "chat" if question.chat else "raw",
        "context": question.context,
        "before": turns,
        **question.settings,
    }
    return {"task": question.task, **arguments, "expected": question.expected, "look": question.look}


@contextmanager
def _refusals_as_errors() -> Iterator[None]:
    """Raise a Refusal, or any other error, as gr.Error, whose message reaches the client."""
    try:
        with as_refusals("The request"):
            yield
    except Refusal as refusal:
        raise gr.Error(str(refusal), print_exception=False) from None


class ApiRequest:
    """A client's request: its settings, its place in the queue, and its run once that has begun."""

    def __init__(self, site: Site, settings: Settings, server: RemoteServer | None):
        self.site, self.settings, self.server = site, settings, server
        self.loading = site.model_load(settings)
        self.ticket = site.join(API)
        self.run: Run | RemoteRun | None = None

    def wait(self) -> Iterator[int]:
        """The place in the queue, until the request has a seat."""
        return self.ticket.wait()

    def start(self) -> Run | RemoteRun:
        """Start the run; raises Refusal."""
        self.run = self.site.start(self.loading, self.settings, Memory(), server=self.server)
        return self.run

    def end(self) -> None:
        self.ticket.leave()
        if self.run:
            self.run.stop()


def _endpoint(name: str, site: Site, answers: Callable[[ApiRequest], Iterator[Any]], summary: str) -> Endpoint:
    """An endpoint with the arguments of a run. Its return type is that of `answers`."""

    def endpoint(
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
        remote: str = "",
        remote_model: str = "",
        remote_key: str = "",
        form: str = "",
        tools: str | list[dict[str, Any]] = "",
    ):
        arguments = {
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
            "form": form,
            "tools": json.dumps(tools) if isinstance(tools, list) else tools,
        }
        with _refusals_as_errors(), _queued(site, arguments, (remote, remote_model, remote_key)) as request:
            yield from answers(request)

    endpoint.__name__, endpoint.__doc__ = name, f"{summary}\n{ARGUMENTS}"
    endpoint.__annotations__["return"] = answers.__annotations__["return"]
    return ends_unread(endpoint)


def _frames(request: ApiRequest) -> Iterator[str]:
    yield from (to_json({"state": "waiting", "place": place}) for place in request.wait())
    running = request.start()
    yield from (to_json(frame) for frame in running.frames() if frame)
    _check_completed(running)


def _results(request: ApiRequest) -> Iterator[list[dict[str, Any]]]:
    yield from ([] for _ in request.wait())
    running = request.start()
    yield from ([] for _ in running.frames())
    _check_completed(running)
    yield _comparison(running.trace)


def _check_completed(running: Run | RemoteRun) -> None:
    if running.error:
        raise Refusal(running.error)


@contextmanager
def _queued(site: Site, arguments: dict[str, Any], remote: tuple[str, str, str]) -> Iterator[ApiRequest]:
    """A client's request in the queue; its run ends when the client leaves. Raises Refusal."""
    settings = _settings(arguments)
    settings.check(site.rules)
    request = ApiRequest(site, settings, _server(site, *remote))
    try:
        yield request
    finally:
        request.end()


def _server(site: Site, address: str, model: str, key: str) -> RemoteServer | None:
    """The server of a remote lane. The key of the environment is not for clients to send anywhere. Raises Refusal."""
    if not address:
        return None
    if site.rules.public:
        raise Refusal("This public page does not connect to other servers: run the playground yourself.", "remote")
    server = RemoteServer(address, model, key)
    server.check()
    return server


def _settings(arguments: dict[str, Any]) -> Settings:
    """The settings of a request; raises Refusal for values that the page would replace by their defaults."""
    lanes = arguments["lanes"]
    arguments = {**arguments, "lanes": [*map(_with_texts, lanes)] if isinstance(lanes, list) else lanes}
    settings = Settings.read(arguments)
    for name, value in arguments.items():
        if name != "lanes" and getattr(settings, name) != value:
            raise Refusal(f"{name} must be {_allowed(name)}, not {quoted(value)}.", name)
    _check_lanes(arguments["lanes"])
    return settings


def _with_texts(lane: Any) -> Any:
    """A lane with JSON Schemas as texts, which a client may send as objects; what is malformed stays as it is."""
    if not isinstance(lane, dict):
        return lane
    texts = {"knobs": _knobs_with_texts(lane.get("strategy"), lane["knobs"])} if "knobs" in lane else {}
    if isinstance(lane.get("extras"), list):
        texts["extras"] = [
            [extra[0], _knobs_with_texts(*extra)] if isinstance(extra, list) and len(extra) == 2 else extra
            for extra in lane["extras"]
        ]
    return lane | texts


def _knobs_with_texts(name: Any, knobs: Any) -> Any:
    known = discover().get(name) if isinstance(name, str) else None
    if known is None or not isinstance(knobs, dict):
        return knobs
    taking = {knob.name for knob in known.knobs() if knob.json_text}
    return {
        knob: json.dumps(value) if knob in taking and isinstance(value, dict) else value
        for knob, value in knobs.items()
    }


def _allowed(name: str) -> str:
    kinds = {int: "a whole number", str: "text", list: "a list of [user, assistant] pairs"}
    return f"one of {', '.join(CHOICES[name])}" if name in CHOICES else kinds[type(getattr(Settings(), name))]


def _check_lanes(lanes: Any) -> None:
    if not isinstance(lanes, list) or len(lanes) > LANES:
        raise Refusal(f"The lanes must be a list of one to {LANES}.", "lanes")
    for number, lane in enumerate(lanes, 1):
        try:
            LaneConfig.check_fields(lane if isinstance(lane, dict) else ())
        except Refusal as refusal:
            raise Refusal(f"Lane {number} is malformed. {refusal}", "lanes") from None
        if not _is_well_formed(lane):
            raise Refusal(f"Lane {number} is malformed: {SHAPE}.", "lanes")


def _is_well_formed(lane: Any) -> bool:
    """Whether reading a lane drops nothing of it."""
    return isinstance(lane, dict) and Settings.read({"lanes": [lane]}).lanes == [BLANK | lane]


def _comparison(trace: Trace) -> list[dict[str, Any]]:
    """The results of the lanes, compared with the first; raises Refusal if all failed."""
    results = [Result(trace.lane(header.lane)) for header in trace.headers]
    if all(result.reason == "failed" for result in results):
        raise Refusal(results[0].message)
    return compared(results, 0)
