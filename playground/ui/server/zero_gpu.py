"""Support for ZeroGPU, where a GPU is allocated for one call at a time and the call runs in its own process.

The page's process loads models on the CPU (`load_on_host`). The forked process moves them to its GPU and sends
back plain data. It keeps no KV cache between calls, so a fork of a lane reads its text again. A run cannot be held or
stepped on the server; the browser's player does that. Elsewhere none of this is used.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import wraps
from importlib.util import find_spec
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import gradio as gr

import playground
from playground.errors import Refusal
from playground.player.frames import CLOCK, Facts, frame, new_name, trace_of, within
from playground.trace import Trace

if TYPE_CHECKING:
    from playground.decoding.models import Models

# Seconds of GPU time: at least (moving weights, building the model), per token of every lane, at most.
LEAST, EACH, MOST = 20, 0.05, 120
ABORTED = "GPU task aborted"  # the message of `spaces` if the process ended by itself
log = logging.getLogger(__name__)
Batch = tuple[Facts, Facts, str, float]  # headers (in the first), events, state, time of the oldest event (Unix)


def on_zero() -> bool:
    return bool(os.environ.get("SPACES_ZERO_GPU")) and find_spec("spaces") is not None


def load_on_host(
    model: str | None,
    draft: str | None,
    *,
    device: str,
    dtype: str,
    quantization: str,
    progress: Callable[[float, str], None],
    draft_device: str = "",
) -> Models:
    """The models of `playground.load`, of HostModels; raises Refusal for quantised weights.

    device, draft_device: not used, as there is one GPU.
    """
    from playground.decoding.host_models import DTYPE, HostModel
    from playground.engine.checkpoint.catalogue import PACKED
    from playground.engine.loading.load import Shelf
    if quantization != "none" or draft in PACKED:
        raise Refusal("Weights are quantised on a GPU, which this page has only during a run: choose no quantization.",
                      "draft" if draft in PACKED else "quantization")
    dtype = DTYPE if dtype == "auto" else dtype
    return playground.load(model, draft, device="cpu", dtype=dtype, progress=progress, shelf=Shelf(HostModel))


def on_gpu(work: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """A generator function that runs on an allocated GPU if ZeroGPU is available; there it raises only Refusal."""
    if not on_zero():
        return work
    import spaces  # in the main thread: it replaces torch's CUDA functions for the thread that imports it
    return _received(spaces.GPU(duration=seconds)(_sent(work)))


def seconds(kind: str, settings, *given: Any) -> int:
    """The GPU time to ask for, by the number of tokens to be generated or, for an attribution, of those before."""
    tokens = {"run": settings.length if any(given) else settings.written(), "survey": settings.written()}
    if kind == "attribution":
        _, before, *_ = given
        tokens[kind] = len(before)
    return int(min(MOST, LEAST + EACH * tokens.get(kind, 0)))


def _sent(work: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """In the forked process: values with None, or None with a refusal, of which `spaces` would send only the class."""
    @wraps(work)
    def sent(*given: Any) -> Iterator:
        try:
            with closing(work(*given)) as values:
                for value in values:
                    yield value, None
        except Refusal as refusal:
            yield None, (str(refusal), refusal.about)
    return sent


def _received(remote: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """In the page's process: the values, with refusals and errors of `spaces` raised as Refusal."""
    def received(*given: Any) -> Iterator:
        try:
            with closing(remote(*given)) as values:
                for value, refused in values:
                    if refused:
                        raise Refusal(*refused)
                    yield value
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(_sentence(error)) from None
    return received


def _sentence(error: Exception) -> str:
    """What an error of `spaces` means. Its messages on quotas and queues are shown as they are."""
    message = str(error.message).strip() if isinstance(error, gr.Error) else ""
    if message == ABORTED:
        return "The time on the GPU was over before the run ended: shorten the text, or use fewer lanes."
    if message and getattr(error, "title", "") != "ZeroGPU worker error":
        return message
    log.error("a call on ZeroGPU failed: %s", message or repr(error), exc_info=error)
    return "The run failed on the GPU with an internal error; see the log. Run it again."


def batches(session) -> Iterator[Batch]:
    """Run a session to its end; yields plain data that can be sent to another process, at most every CLOCK seconds."""
    headers, fresh, begun, due = [asdict(header) for header in session.headers], [], time(), monotonic()
    while not session.finished:
        fresh += [stamped.to_json() for stamped in session.advance()]
        if monotonic() >= due and not session.finished:
            yield headers, fresh, "running", begun
            headers, fresh, begun, due = [], [], time(), monotonic() + CLOCK
    yield headers, fresh, "done", begun


class RemoteRun:
    """A run in another process, with the interface of a worker's Run."""

    def __init__(self, batches_: Iterator[Batch]):
        self.name, self.number = new_name(), -1
        self.headers: Facts = []
        self.events: Facts = []
        self.over, self.error = False, ""
        self._batches, self._beat = batches_, CLOCK

    def hold(self) -> None:
        """Does nothing: the GPU cannot wait. The browser's player holds the view."""

    resume = step = hold

    def hand_over(self) -> None:
        """None: the session is in another process, so its lanes stop when the run is forked."""

    def archive(self) -> None:
        """Does nothing: the events are kept uncompressed."""

    def fail(self, sentence: str) -> None:
        """End the run with a message, at its next batch."""
        self.error, self.over = sentence, True

    def stop(self, lane: int | None = None) -> None:
        """End the whole run at its next batch; a single lane cannot be stopped."""
        self.over = self.over or lane is None

    def pace(self, beat: float) -> None:
        """Set the interval between two frames in seconds; batches in between are merged."""
        self._beat = within(beat)

    @property
    def state(self) -> str:
        return "done" if self.over else "running"

    @property
    def trace(self) -> Trace:
        """All events received so far."""
        return trace_of(self.headers, list(self.events))

    def frames(self) -> Iterator[dict[str, Any] | None]:
        """Frames of the run; raises Refusal if it fails before the first, and ends with `error` set if it does later.
        """
        try:
            with closing(self._batches):
                yield from self._merged()
        except Refusal as refusal:
            if self.number < 0:
                raise
            self.error = str(refusal)
            yield self._next([], "done", None)
        finally:
            self.over = True

    def _merged(self) -> Iterator[dict[str, Any]]:
        waiting, since, due = [], None, 0.0
        for headers, fresh, state, begun in self._batches:
            ends = state == "done" or self.over
            self.headers, self.events = headers or self.headers, self.events + fresh
            waiting, since = waiting + fresh, since or begun
            if ends or monotonic() >= due:
                yield self._next(waiting, "done" if ends else state, since)
                waiting, since, due = [], None, monotonic() + self._beat - CLOCK
            if ends:
                break

    def _next(self, waiting: Facts, state: str, since: float | None) -> dict[str, Any]:
        self.number += 1
        return frame(self.name, self.number, waiting, state, self.headers if self.number == 0 else None, since)
