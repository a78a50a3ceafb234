"""The server around the site: its health route and its orderly stop."""
from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import gradio as gr
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.routing import Route

from playground.ui.classroom.classroom_routes import guard_of, routes_of
from playground.ui.components.script_files import script_route
from playground.ui.components.scripted_component import Fetched
from playground.ui.guard.block_configs import BlockConfigs
from playground.ui.guard.component_guard import ComponentGuard, served_components
from playground.ui.guard.connections import Connections
from playground.ui.guard.framing import Framing, embedders
from playground.ui.guard.request_guard import guarded
from playground.ui.guard.response_cache import cached
from playground.ui.guard.sessions import Retention, Sweeper
from playground.ui.guard.uploads import UploadGuard, Uploads, remove
from playground.ui.guard.visitor_sessions import VisitorSessions
from playground.ui.server.pages import ROUTES
from playground.ui.server.run_streams import stream_route
from playground.ui.server.site import Site

GRACE = 5.0  # seconds from the first signal to the end of the process
CLOSING = 1.0  # of these, for connections to close
FLUSH = 0.3  # of these, for last messages to reach their clients
log = logging.getLogger(__name__)


# --- health ---

def health(site: Site) -> dict[str, Any]:
    """The state of the service: "ok", "stopping", "workers" by device, "models", and the numbers of runs that are
    "seated", "waiting" and "resting".
    """
    workers = site.runs.health()
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


def launch_options(site: Site, page: gr.Blocks, host: str) -> dict[str, Any]:
    """Arguments of `page.launch` for a page bound to `host`, besides address and theme."""
    scripts = script_route(block.script_source for block in page.blocks.values() if isinstance(block, Fetched))
    routes = [health_route(site), stream_route(site.streams), scripts]
    app = {"routes": routes, **guarded(site.rules, host, site.proxies, site.loop_time)}
    if site.classroom:
        app["routes"] += routes_of(site.classroom)
        app["middleware"] += [guard_of(site.classroom)]
    app["middleware"].insert(0, Middleware(Framing, sites=embedders()))
    components = served_components(page.blocks.values())
    app["middleware"] += [Middleware(ComponentGuard, known=components), Middleware(UploadGuard, uploads=Uploads())]
    app["middleware"] += [cached(place.path for place in ROUTES)]  # innermost: the guards decide first
    return {"app_kwargs": app, "state_session_capacity": retention(site).sessions}


def retention(site: Site) -> Retention:
    return Retention.for_visitors() if site.rules.public else Retention()


def protect(page, site: Site) -> None:
    """Bound the connections and sessions of a launched page, and delete the sessions of visitors who have left."""
    near = frozenset(address.strip() for address in str(page.server.config.forwarded_allow_ips).split(","))
    Connections(trusted=None if site.proxies or "*" in near else near).serve(page.server)
    page.default_config = BlockConfigs.of_page(page)
    kept = retention(site)
    sweeper = Sweeper(page.app, kept, Path(page.app.uploaded_file_dir))
    page.app.state_holder = VisitorSessions(site.admission, kept.address, sweeper.drop, sweeper.streaming)
    page.app.state_holder.set_blocks(page)
    sweeper.start()


# --- stopping ---

class Stop:
    """The first SIGINT or SIGTERM requests a graceful shutdown, the second ends the process at once.

    A thread reads the signals from a socket that Python's C handler writes to, so none is lost or has to wait for the
    main thread: Python handlers run between bytecodes of the main thread, and signals that arrive together are merged.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.asked = threading.Event()
        self._reader, self._writer = socket.socketpair()

    def listen(self) -> Stop:
        """Install the signal handlers; in the main thread only."""
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in self.SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def _read(self) -> None:
        self._next()
        self.asked.set()
        os._exit(128 + self._next())

    def _next(self) -> int:
        """Wait for the next signal; the socket also gets those that other handlers serve."""
        while (number := self._reader.recv(1)[0]) not in self.SIGNALS:
            pass
        return number


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
    remove(Path(page.app.uploaded_file_dir))
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
