"""The server around the site: its health route and its orderly stop."""
from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import asdict
from time import monotonic, sleep
from typing import Any

from fastapi.responses import JSONResponse
from starlette.routing import Route

from playground.ui.request_guard import guarded
from playground.ui.sessions import Retention, Sweeper
from playground.ui.site import Site

GRACE = 5.0  # seconds from the first signal to the end of the process
CLOSING = 1.0  # of these, for connections to close
FLUSH = 0.3  # of these, for last messages to reach their clients
log = logging.getLogger(__name__)


# --- health ---

def health(site: Site) -> dict[str, Any]:
    """The state of the service: "ok", "stopping", "workers" by device, "models", and the numbers of runs that are
    "seated", "waiting" and "resting".
    """
    workers = site.health()
    return {
        "ok": all(worker.ok for worker in workers.values()) and not site.stopping,
        "stopping": site.stopping,
        "workers": {device: asdict(worker) for device, worker in workers.items()},
        "models": site.model_loader.names(),
        **site.admission.counts(),
    }


def health_route(site: Site) -> Route:
    """GET /health: 200 if all workers serve, 503 if one is dead or stuck or the server is stopping."""

    async def answer(request) -> JSONResponse:
        state = health(site)
        return JSONResponse(state, 200 if state["ok"] else 503)

    return Route("/health", answer)


def launch_options(site: Site, host: str) -> dict[str, Any]:
    """Arguments of `Blocks.launch` for a page bound to `host`, besides address and theme."""
    app = {"routes": [health_route(site)], **guarded(site.rules, host)}
    return {"app_kwargs": app, "state_session_capacity": retention(site).sessions}


def retention(site: Site) -> Retention:
    return Retention.for_visitors() if site.rules.public else Retention()


def start_sweeper(page, site: Site) -> None:
    """Delete sessions of visitors who have left, for as long as a launched page is up."""
    Sweeper(page.app, retention(site)).start()


# --- stopping ---

class Stop:
    """The first SIGINT or SIGTERM asks for an orderly end, the second ends the process at once."""

    def __init__(self):
        self.asked = threading.Event()
        self._signals = 0

    def listen(self) -> Stop:
        """Install the signal handlers; in the main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, _: Any) -> None:
        self._signals += 1  # counted apart: a second signal may interrupt `set`, whose lock is not re-entrant
        if self._signals > 1:
            os._exit(128 + number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # the kernel ends the process, even if this thread is busy
        self.asked.set()


def serve_until(stop: Stop, page, site: Site) -> None:
    """Serve until the process is asked to stop; then end all runs with a message, close the page, and exit with 0.

    The process skips interpreter shutdown, which would crash if a torch thread is in the middle of a forward.
    """
    stop.asked.wait()
    print("Stopping: ending all runs; press Ctrl-C again to exit at once.", flush=True)
    deadline = monotonic() + GRACE
    drain(page, site, deadline - CLOSING)
    closing = threading.Thread(target=page.close, kwargs={"verbose": False}, daemon=True)
    closing.start()
    closing.join(max(0.0, deadline - monotonic() - 0.2))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def drain(page, site: Site, deadline: float) -> None:
    """End all runs with a message, and wait until their clients have received it."""
    while True:
        site.drain()
        if not page._queue.event_ids_to_events or monotonic() > deadline:
            break
        sleep(0.05)
    sleep(FLUSH)
