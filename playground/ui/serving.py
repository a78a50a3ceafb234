"""The server around the site: its health, and how it stops."""
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
    """How the service is: {"ok", "stopping", "workers" by device, "models", and how many runs are "seated", "waiting"
    and "resting"}.
    """
    workers = site.health()
    return {
        "ok": all(worker.ok for worker in workers.values()) and not site.stopping,
        "stopping": site.stopping,
        "workers": {device: asdict(worker) for device, worker in workers.items()},
        "models": site.arrivals.names(),
        **site.admission.counts(),
    }


def health_route(site: Site) -> Route:
    """GET /health: 200 where the workers serve, 503 where one is dead or stuck, or the server stops."""

    async def answer(request) -> JSONResponse:
        told = health(site)
        return JSONResponse(told, 200 if told["ok"] else 503)

    return Route("/health", answer)


def launch_options(site: Site, host: str) -> dict[str, Any]:
    """Arguments of `Blocks.launch` for a page bound to `host`, besides address and theme."""
    app = {"routes": [health_route(site)], **guarded(site.rules, host)}
    return {"app_kwargs": app, "state_session_capacity": retention(site).sessions}


def retention(site: Site) -> Retention:
    return Retention.for_visitors() if site.rules.public else Retention()


def keep_house(page, site: Site) -> None:
    """Drop what visitors leave behind, for as long as a launched page is up."""
    Sweeper(page.app, retention(site)).start()


# --- stopping ---

class Stop:
    """The first SIGINT or SIGTERM asks for an orderly end, the second ends the process at once."""

    def __init__(self):
        self.asked = threading.Event()

    def listen(self) -> Stop:
        """Take the signals over; in the main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, _: Any) -> None:
        if self.asked.is_set():
            os._exit(128 + number)
        self.asked.set()


def serve_until(stop: Stop, page, site: Site) -> None:
    """Serve until the process is asked to stop; then let runs end with a sentence, close the page, and exit with 0.

    Threads of torch may be in the middle of a forward, which interpreter shutdown does not survive, so the process ends
    without it.
    """
    stop.asked.wait()
    print("Stopping: runs end now; press Ctrl-C again to end at once.", flush=True)
    deadline = monotonic() + GRACE
    drain(page, site, deadline - CLOSING)
    closing = threading.Thread(target=page.close, kwargs={"verbose": False}, daemon=True)
    closing.start()
    closing.join(max(0.0, deadline - monotonic() - 0.2))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def drain(page, site: Site, deadline: float) -> None:
    """End all runs with a sentence, and wait until their clients have it."""
    while True:
        site.drain()
        if not page._queue.event_ids_to_events or monotonic() > deadline:
            break
        sleep(0.05)
    sleep(FLUSH)
