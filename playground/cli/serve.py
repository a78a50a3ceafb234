"""`serve`: open the page."""
from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

from playground.cli.shared_options import CommandParser

STORAGE = Path("/data")  # where a Space has what survives its restarts: https://huggingface.co/docs/hub/spaces-storage
KEPT = {"HF_HOME": "huggingface", "PLAYGROUND_HOME": "playground"}  # as the Dockerfile has them in /models


def serve_options(command: CommandParser) -> None:
    command.add_argument("--model", default="", help="target model: a folder or a hub id; the bundled one if not given")
    command.add_argument(
        "--draft", default="", help="draft model with the target's vocabulary, or a published draft head"
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    command.add_argument("--draft-device", default="", help="device of the draft model; the target's if not given")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    command.add_argument("--quantization", default="none", help="none, int8, nf4 or fp4")
    command.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", ""),
                         help="127.0.0.1 if not given, and every interface for a class")
    command.add_argument(
        "--port", default=os.environ.get("GRADIO_SERVER_PORT", ""), help="7860 or the next free one if not given"
    )
    command.add_argument(
        "--mcp",
        action="store_true",
        help="also offer the page's endpoints as tools, to programs that speak the Model Context Protocol",
    )
    command.add_argument("--classroom", action="store_true",
                         help="let a class on the local network follow the runs of this page, with a link and a code")


def serve(options: Namespace) -> bool:
    """Serve the page until a signal ends it. Raises Refusal if it cannot start."""
    options.host = options.host or ("0.0.0.0" if options.classroom else "127.0.0.1")
    for stopping in (signal.SIGINT, signal.SIGTERM):  # now, because the import takes seconds; `Stop` takes over then
        signal.signal(stopping, _stop_before_start)
    use_storage(STORAGE)
    try:
        from playground.ui.start import open_page
        open_page(options)
    except (ImportError, MemoryError, OSError) as reason:
        _give_up(reason)
    return False


def use_storage(storage: Path) -> None:
    """In a Space that has storage, keep models there: those of the hub, and those made on the page. Variables that say
    another place count. It must be called before the hub's library is imported, which reads its variable then.
    """
    if "SPACE_ID" in os.environ and storage.is_dir() and os.access(storage, os.W_OK | os.X_OK):
        for name, folder in KEPT.items():
            os.environ.setdefault(name, str(storage / folder))
        print(f"Models are kept in {os.environ['HF_HOME']} and {os.environ['PLAYGROUND_HOME']}.", flush=True)


def _stop_before_start(number: int, frame: object) -> None:
    print("Stopped before the page had started.", flush=True)
    os._exit(0)  # torch may be half loaded


def _give_up(reason: Exception) -> None:
    cause = " ".join(str(reason).split()) or "no memory is left"
    print(f"error: The page cannot start ({cause}): free memory, disk space or open files, or install the packages"
          " of requirements.txt again.", file=sys.stderr, flush=True)
    os._exit(2)
