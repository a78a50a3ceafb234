"""The API endpoints of the page, which are its MCP tools too: `run`, `compare`, `strategies`, `examples`, `questions`.

A frame of `run` is sent as JSON text. Gradio sends the difference between one answer and the next, and in 6.31 its
clients fail on a list that gets shorter by two or more; a text is replaced as a whole.

The arguments of `run` and `compare` are the fields of a RunRequest: its types and descriptions are those of the
endpoints. Annotations and docstrings of the others describe them likewise, so annotations stay objects here.
"""
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import gradio as gr

from playground.contract import discover, find, lookup
from playground.contract.metadata import facts
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.player.frames import to_json
from playground.questions.questions import Question
from playground.questions.questions import gallery as answerable
from playground.remote.remote_server import RemoteServer
from playground.request_limits import quoted
from playground.run_request import RunRequest, choices, descriptions
from playground.trace import Trace
from playground.trace.comparison import compared
from playground.trace.result import Result
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.settings import Settings
from playground.ui.guard.readers import ends_unread
from playground.ui.play.gallery import examples as gallery
from playground.ui.server.admission_queue import API
from playground.ui.server.site import Site
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun

Endpoint = Callable[..., Iterator[Any]]
REMOTE = {
    "remote": "address of a server with the OpenAI completions interface, which generates one more lane; not on a "
              "public page",
    "remote_model": "the server's name of the model",
    "remote_key": "the server's key, if it needs one",
}
# Clients may give arguments by position: these keep theirs, and those that follow come after them.
POSITIONS = (
    "prompt", "lanes", "seed", "length", "mode", "system", "stop", "context", "model", "draft", "before", *REMOTE,
    "form", "tools",
)
REQUIRED = ("prompt", "lanes")
DEFAULTS = {"length": 64, "before": None}  # where they are not those of the page
TYPES = {"lanes": list[dict[str, Any]], "before": list[list[str]] | None, "tools": str | list[dict[str, Any]]}


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
        known = sorted({question.task for question in answerable()})
        if task and task not in known:
            raise Refusal(f"There is no task {quoted(task)}: choose one of {', '.join(known)}.", "task")
        return [_question(question) for question in answerable() if task in ("", question.task)]


# --- implementation ---

def _question(question: Question) -> dict[str, Any]:
    return {"task": question.task, **question.request(), "expected": question.expected, "look": question.look}


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
        self.loading = site.chosen.load(settings)
        self.ticket = site.join(API)
        self.run: Run | RemoteRun | None = None

    def wait(self) -> Iterator[int]:
        """The place in the queue, until the request has a seat."""
        return self.ticket.wait()

    def start(self) -> Run | RemoteRun:
        """Start the run; raises Refusal."""
        self.run = self.site.runs.start(self.loading, self.settings, Memory(), server=self.server)
        return self.run

    def end(self) -> None:
        self.ticket.leave()
        if self.run:
            self.run.stop()


def signature() -> Signature:
    """The arguments of a run: the fields of a request, and the server of one more lane."""
    kinds, blank = get_type_hints(RunRequest), vars(RunRequest())
    defaults = {name: Parameter.empty if name in REQUIRED else blank[name] for name in RunRequest.names()} | DEFAULTS
    defaults |= dict.fromkeys(REMOTE, "")
    offered = choices(RunRequest)
    return Signature(
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=defaults[name],
            annotation=TYPES.get(name, str if name in offered else kinds.get(name, str)),
        )
        for name in dict.fromkeys((*POSITIONS, *RunRequest.names()))
    )


def _described() -> str:
    """The arguments, for the docstring of an endpoint."""
    said = descriptions(RunRequest) | REMOTE
    return "".join(f"            {name}: {said[name]}\n" for name in signature().parameters)


def _endpoint(name: str, site: Site, answers: Callable[[ApiRequest], Iterator[Any]], summary: str) -> Endpoint:
    """An endpoint with the arguments of a run. Its return type is that of `answers`."""
    own = signature()

    def endpoint(*given: Any, **named: Any):
        with _refusals_as_errors(), _queued(site, _arguments(own, given, named)) as request:
            yield from answers(request)

    endpoint.__name__, endpoint.__doc__ = name, f"{summary}\n\n        Args:\n{_described()}"
    endpoint.__signature__ = own.replace(return_annotation=answers.__annotations__["return"])
    endpoint.__annotations__ = {each.name: each.annotation for each in own.parameters.values()}
    endpoint.__annotations__["return"] = answers.__annotations__["return"]
    return ends_unread(endpoint)


def _arguments(own: Signature, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, those that are left out with their defaults. Raises Refusal."""
    try:
        bound = own.bind(*given, **named)
    except TypeError as error:
        raise Refusal(f"The arguments are not those of a run: {error}.") from None
    bound.apply_defaults()
    return bound.arguments


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
def _queued(site: Site, arguments: dict[str, Any]) -> Iterator[ApiRequest]:
    """A client's request in the queue; its run ends when the client leaves. Raises Refusal."""
    remote = [arguments.pop(name) for name in REMOTE]
    settings = settings_of(arguments)
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


def settings_of(arguments: dict[str, Any]) -> Settings:
    """The settings that the fields of a request ask for; raises Refusal for values that the page would leave out."""
    lanes, tools = arguments["lanes"], arguments.get("tools", "")
    return Settings.given({
        **arguments,
        "lanes": [*map(_with_texts, lanes)] if isinstance(lanes, list) else lanes,
        "before": arguments.get("before") or [],
        "tools": json.dumps(tools) if isinstance(tools, list) else tools,
    })


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
    cls = lookup(name) if isinstance(name, str) else None
    if cls is None or not isinstance(knobs, dict):
        return knobs
    taking = {knob.name for knob in cls.knobs() if knob.json_text}
    return {
        knob: json.dumps(value) if knob in taking and isinstance(value, dict) else value
        for knob, value in knobs.items()
    }


def _comparison(trace: Trace) -> list[dict[str, Any]]:
    """The results of the lanes, compared with the first; raises Refusal if all failed."""
    results = [Result(trace.lane(header.lane)) for header in trace.headers]
    if all(result.reason == "failed" for result in results):
        raise Refusal(results[0].message)
    return compared(results, 0)
