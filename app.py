"""Start the page: `python app.py`. Without options it runs the bundled models. A Hugging Face Space runs it too."""
import os
import signal
import sys

if __name__ == "__main__":  # now, because the other imports take seconds; `Stop` takes over once the page has started
    def stop_before_start(number: int, frame: object) -> None:
        print("Stopped before the page had started.", flush=True)
        os._exit(0)  # torch may be half loaded

    def say_why(kind: type[BaseException], reason: BaseException, trace: object) -> None:
        if not isinstance(reason, (ImportError, MemoryError, OSError)):
            return sys.__excepthook__(kind, reason, trace)
        cause = " ".join(str(reason).split()) or "no memory is left"
        print(f"error: The page cannot start ({cause}): free memory, disk space or open files, or install the packages"
              " of requirements.txt again.", file=sys.stderr, flush=True)
        os._exit(2)

    sys.excepthook = say_why
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, stop_before_start)

import argparse
import gc
import socket
from importlib.util import find_spec

from playground.engine.heap_memory import limit_arenas
from playground.errors import Refusal
from playground.request_limits import quoted
from playground.ui.classroom.classroom import Classroom
from playground.ui.components.theme import theme_options
from playground.ui.guard.framing import embedders
from playground.ui.guard.request_guard import EVERY_INTERFACE
from playground.ui.guard.uploads import own_folder
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.pages import build
from playground.ui.server.serving import Stop, launch_options, protect, serve_until
from playground.ui.server.site import Site
from playground.ui.server.zero_gpu import on_zero

VISITORS = 200  # at a time: each stream takes a thread, which sleeps most of the time


class OptionParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def options(arguments: list[str]) -> argparse.Namespace:
    parser = OptionParser(description="A page that shows how decoding strategies choose tokens.")
    parser.add_argument("--model", default="", help="target model: a folder or a hub id; the bundled one if not given")
    parser.add_argument(
        "--draft", default="", help="draft model with the target's vocabulary, or a published draft head"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--draft-device", default="", help="device of the draft model; the target's if not given")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--quantization", default="none", help="none, int8, nf4 or fp4")
    parser.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", ""),
                        help="127.0.0.1 if not given, and every interface for a class")
    parser.add_argument(
        "--port", default=os.environ.get("GRADIO_SERVER_PORT", ""), help="7860 or the next free one if not given"
    )
    parser.add_argument(
        "--mcp",
        action="store_true",
        help="also offer the page's endpoints as tools, to programs that speak the Model Context Protocol",
    )
    parser.add_argument("--classroom", action="store_true",
                        help="let a class on the local network follow the runs of this page, with a link and a code")
    given = parser.parse_args(arguments)
    given.host = given.host or ("0.0.0.0" if given.classroom else "127.0.0.1")
    return given


def main(arguments: list[str]) -> None:
    given = options(arguments)
    limit_arenas()
    try:
        site = Site.from_environment(
            ModelRequest(given.model, given.draft, given.device, given.dtype, given.quantization, given.draft_device)
        )
        site.classroom = opened_class(site) if given.classroom else None
        port = port_of(given.port)
        site.check()
        check_mcp(given.mcp)
        embedders()
        own_folder()
        page = build(site)
        start(page, given, port, site)
    except Refusal as refusal:
        OptionParser().error(str(refusal))
    if site.classroom:
        print(invitation(site.classroom, given.host, page.server_port), flush=True)
    stop = Stop().listen()
    protect(page, site)
    # Exclude imported objects from garbage collection: scanning them takes half a second during a run.
    gc.freeze()
    site.warm(wait=on_zero())
    serve_until(stop, page, site)


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
    everywhere = host in EVERY_INTERFACE
    here, there = ("127.0.0.1", network_address()) if everywhere else (host, host)
    return "\n".join([
        f"Presenter (keep this link to yourself): http://{here}:{port}/classroom/present?key={classroom.key}",
        f"Class: http://{there}:{port}/classroom",
        f"Code:  {classroom.code[:3]} {classroom.code[3:]}",
    ])


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


def start(page, given: argparse.Namespace, port: int | None, site: Site) -> None:
    """Launch the page; raises Refusal if it cannot listen on the host or the port."""
    check_address(given.host, port)
    try:
        page.launch(
            server_name=given.host,
            server_port=port,
            prevent_thread_lock=True,
            run_history=False,
            mcp_server=given.mcp or None,
            max_file_size=site.rules.limits.upload_bytes,
            max_threads=VISITORS,
            enable_monitoring=False,
            **launch_options(site, page, given.host),
            **theme_options(),
        )
    except OSError as reason:
        raise Refusal(f"The page cannot start on {given.host}: {' '.join(str(reason).split())}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
