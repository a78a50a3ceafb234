"""Start the page: check what can be checked, build it, listen, and serve until it is stopped."""
from __future__ import annotations

import gc
import socket
from argparse import Namespace
from importlib.util import find_spec
from threading import Thread

import gradio as gr

from playground.engine.heap_memory import limit_arenas
from playground.errors import Refusal
from playground.request_limits import quoted
from playground.ui.classroom.classroom import Classroom
from playground.ui.components.theme import theme_options
from playground.ui.guard.framing import embedders
from playground.ui.guard.request_guard import EVERY_INTERFACE
from playground.ui.guard.uploads import own_folder
from playground.ui.server.model_loader import ModelLoad, ModelRequest
from playground.ui.server.pages import build
from playground.ui.server.serving import Stop, launch_options, protect, serve_until
from playground.ui.server.site import Site
from playground.ui.server.zero_gpu import on_zero

VISITORS = 200  # at a time: each stream takes a thread, which sleeps most of the time


def open_page(options: Namespace) -> None:
    """Serve the page until a signal ends it. Raises Refusal if it cannot start."""
    limit_arenas()
    site = Site.from_environment(
        ModelRequest(
            options.model, options.draft, options.device, options.dtype, options.quantization, options.draft_device
        )
    )
    site.classroom = opened_class(site) if options.classroom else None
    port = port_of(options.port)
    site.check()
    check_mcp(options.mcp)
    embedders()
    own_folder()
    page = build(site)
    start(page, options, port, site)
    if site.classroom:
        site.classroom.link = class_link(options.host, page.server_port)
        print(invitation(site.classroom, options.host, page.server_port), flush=True)
    stop = Stop().listen()
    protect(page, site)
    gc.freeze()  # imported objects: scanning them takes half a second during a run
    loading = site.warm(wait=on_zero())
    Thread(target=freeze_loaded, args=[loading], name="freeze", daemon=True).start()
    serve_until(stop, page, site)


def freeze_loaded(loading: ModelLoad) -> None:
    """Exclude what was imported for the page's own models from garbage collection, too. Scanning it stops all threads
    for a fifth of a second, every few seconds while many visitors come and go.
    """
    loading.ended.wait()
    gc.collect()
    gc.freeze()


def check_mcp(wanted: bool) -> None:
    """Raise Refusal if MCP is wanted and its package is missing; Gradio would only print a warning."""
    if wanted and find_spec("mcp") is None:
        raise Refusal('--mcp needs another package: install it with `pip install "mcp>=1.21,<2"`.', "mcp")


def opened_class(site: Site) -> Classroom:
    """A new class. Raises Refusal on a public page, whose visitors are strangers."""
    if site.rules.public or site.proxies:
        raise Refusal("A class is for a local network, and this page is public or behind a proxy: run it on your own "
                      "machine without PLAYGROUND_PUBLIC and PLAYGROUND_PROXIES.", "classroom")
    return Classroom()


def invitation(classroom: Classroom, host: str, port: int) -> str:
    """The links of a class and its code."""
    here = "127.0.0.1" if host in EVERY_INTERFACE else host
    return "\n".join([
        f"Presenter (keep this link to yourself): http://{here}:{port}/classroom/present?key={classroom.key}",
        f"Class: {class_link(host, port)}",
        f"Code:  {classroom.code[:3]} {classroom.code[3:]}",
    ])


def class_link(host: str, port: int) -> str:
    """The address of the followers' page, for other machines of the network."""
    return f"http://{network_address() if host in EVERY_INTERFACE else host}:{port}/classroom"


def network_address() -> str:
    """This machine's address on the local network, or of the loopback interface if there is no network. Sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; only the route is looked up
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def port_of(text: str) -> int | None:
    """The port to listen on; None if none is given, or 0. Raises Refusal."""
    if not text.strip():
        return None
    if not (text.strip().isascii() and text.strip().isdigit() and len(text.strip()) < 6 and int(text) < 65_536):
        raise Refusal(f"{quoted(text)} is not a port: choose a whole number from 1 to 65535.", "port")
    return int(text) or None


def check_address(host: str, port: int | None) -> None:
    """Raise Refusal if the page cannot listen on that host and port; Gradio would try other ports for minutes."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except (OSError, UnicodeError, ValueError) as reason:
        place = f"{quoted(host)}, port {port}" if port else quoted(host)
        raise Refusal(f"The page cannot listen on {place} ({getattr(reason, 'strerror', None) or 'no host name'}): "
                      "choose another --host or --port.", "host") from None


def start(page: gr.Blocks, options: Namespace, port: int | None, site: Site) -> None:
    """Launch the page; raises Refusal if it cannot listen on the host or the port."""
    check_address(options.host, port)
    try:
        page.launch(
            server_name=options.host,
            server_port=port,
            prevent_thread_lock=True,
            run_history=False,
            mcp_server=options.mcp or None,
            max_file_size=site.rules.limits.upload_bytes,
            max_threads=VISITORS,
            enable_monitoring=False,
            **launch_options(site, page, options.host),
            **theme_options(),
        )
    except OSError as reason:
        raise Refusal(f"The page cannot start on {options.host}: {' '.join(str(reason).split())}") from None
