"""Pages that the tests' own process serves."""
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket
from typing import Any

import gradio as gr


@contextmanager
def launched(page: gr.Blocks, **options: Any) -> Iterator[str]:
    """Address of a page that is closed afterwards. Gradio would take the port of the page before, and a browser that
    still holds a connection to it would be answered by a server that is ending.
    """
    try:
        yield page.launch(
            server_port=free_port(), prevent_thread_lock=True, quiet=True, run_history=False, **options
        )[1]
    finally:
        page.close()


def free_port() -> int:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
