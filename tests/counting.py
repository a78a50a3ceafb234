"""Sessions that only count, and a page over them."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from playground.events import Commit, Done, Header, Stamped
from playground.request_limits import Rules
from playground.trace import Trace
from playground.ui.components.theme import theme_options
from playground.ui.server.admission_queue import AdmissionQueue, QueueLimits, Share
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.launched import launched


class Counting:
    """A one-lane session: every request commits one token after a forward of `seconds`, and is noted in `log`."""

    def __init__(self, log: list, name: str = "", length: int = 10**9, forward: float = 0.001):
        self.trace = Trace([Header()])
        self.log, self.name, self.length, self.forward, self.count, self.finished = log, name, length, forward, 0, False
        self.stopped = threading.Event()

    def advance(self):
        self.stopped.wait(self.forward)
        self.log.append(self.name)
        self.count += 1
        self.finished = self.count >= self.length
        return self._recorded(Commit(ids=[self.count], pieces=["x"]))

    step = advance

    def stop(self, lane=None):
        self.finished = True
        self.stopped.set()
        return self._recorded(Done("stopped"))

    @property
    def headers(self):
        return self.trace.headers

    def _recorded(self, event):
        self.trace.append(Stamped(0, len(self.trace.events) + 1, 0.0, event))
        return self.trace.events[-1:]


def committed(frames) -> list[int]:
    return [
        token
        for frame in frames
        if frame
        for event in frame["events"]
        if event["kind"] == "commit"
        for token in event["ids"]
    ]


def counting_site(prepare, seats: int | None = None, rules: Rules | None = None) -> Site:
    """A site whose sessions are made by `prepare`; with so many at a time, where that is said."""
    device = SimpleNamespace(type="cpu")
    target = SimpleNamespace(name="counter", dtype="int", device=device, quantization="none")
    models = SimpleNamespace(target=target, draft=None)
    site = Site(load=lambda *names, **how: models, prepare=prepare, rules=rules or Rules())
    if seats:
        site.admission = AdmissionQueue(QueueLimits(whole=Share(seats, 48, 128)))
    return site


@contextmanager
def open_page(prepare, seats: int | None = None):
    """The page with a `counting_site`; yields its address."""
    with launched(build(counting_site(prepare, seats)), **theme_options()) as address:
        yield address


@pytest.fixture
def counted():
    """The page with sessions that count without end; yields its address and the sessions begun."""
    begun = []

    def prepare(models, settings, memory):
        begun.append(Counting([], settings.prompt, forward=0.01))
        return begun[-1]

    with open_page(prepare) as address:
        yield address, begun
