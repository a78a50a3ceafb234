"""Start the page: `python app.py`. Without options it runs the bundled models; a Hugging Face Space starts it the same
way.
"""
import argparse
import gc
import os
import sys
from importlib.util import find_spec

from playground.errors import Refusal
from playground.ui.model_loader import ModelRequest
from playground.ui.pages import build
from playground.ui.site import Site
from playground.ui.theme import dress
from playground.ui.zero_gpu import on_zero

LARGEST_UPLOAD = "5mb"  # questions of one's own for the benchmark; nothing else is uploaded
VISITORS = 200  # at once: each one who watches or waits takes a thread that sleeps most of the time


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description="A page that shows how decoding strategies choose tokens.")
    parser.add_argument("--model", default="", help="target model: a folder or a hub id; the bundled one if not given")
    parser.add_argument("--draft", default="", help="draft model with the target's vocabulary")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--draft-device", default="", help="where the draft model goes, if not beside the target")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--quantization", default="none", help="none, int8, nf4 or fp4")
    parser.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
    parser.add_argument(
        "--port",
        type=int,
        default=int(os.environ.get("GRADIO_SERVER_PORT", 0)) or None,
        help="7860 or the next free one if not given",
    )
    parser.add_argument(
        "--mcp",
        action="store_true",
        help="also offer the page's endpoints as tools, to programs that speak the Model Context Protocol",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    given = options(arguments)
    try:
        site = Site.from_environment(
            ModelRequest(given.model, given.draft, given.device, given.dtype, given.quantization, given.draft_device)
        )
        site.check()
        check_mcp(given.mcp)
        page = build(site)
        start(page, given)
    except Refusal as refusal:
        Parser().error(str(refusal))
    # what the imports brought stays: to look through it again takes half a second, in the midst of somebody's run
    gc.freeze()
    site.warm(wait=on_zero())
    page.block_thread()


def check_mcp(wanted: bool) -> None:
    """Refuse what Gradio would only mention in passing. Its own extra, gradio[mcp], asks for an older pydantic than
    this project.
    """
    if wanted and find_spec("mcp") is None:
        raise Refusal('--mcp takes one more package: install it with `pip install "mcp>=1.21,<2"`.', "mcp")


def start(page, given: argparse.Namespace) -> None:
    try:
        page.launch(server_name=given.host, server_port=given.port, prevent_thread_lock=True, run_history=False,
                    mcp_server=given.mcp or None, max_file_size=LARGEST_UPLOAD, max_threads=VISITORS, **dress())
    except OSError as reason:
        raise Refusal(f"The page cannot start on {given.host}: {reason}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
