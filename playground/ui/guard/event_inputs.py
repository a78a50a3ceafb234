"""Events that the page cannot read: one sentence to the client, no traceback in the log.

Whoever sends requests chooses what they hold: too few values, text where a number belongs, the number of a listener
that runs in the browser only. Gradio 6.31 logs a traceback for each, so that one client fills the log and hides the
tracebacks that mean a fault of the page.
"""
from __future__ import annotations

import logging
from typing import Any

import gradio as gr

UNREADABLE = "The page cannot read these values: send what GET /gradio_api/info describes, or reload the page."
BROWSERS = "This function runs in the browser only: GET /gradio_api/info describes those of the server."
log = logging.getLogger(__name__)


def guard_inputs(blocks: gr.Blocks) -> None:
    """Make Gradio answer such an event with a sentence. Errors of the page and of the machine stay as they are."""
    preprocess, process = blocks.preprocess_data, blocks.process_api

    async def read(*given: Any, **named: Any) -> Any:
        try:
            return await preprocess(*given, **named)
        except gr.Error:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as reason:
            log.info("unreadable values of an event: %s", reason)
            raise gr.Error(UNREADABLE, print_exception=False) from reason

    async def answer(block_fn: Any, inputs: list[Any], *, event_data: gr.EventData | None = None, **named: Any) -> Any:
        if getattr(block_fn, "fn", True) is None:
            raise gr.Error(BROWSERS, print_exception=False)
        if event_data is not None and not isinstance(event_data._data, dict):
            event_data._data = {}  # its fields are looked up as if it were an object
        try:
            return await process(block_fn, inputs, event_data=event_data, **named)
        except gr.Error as refused:  # a sentence already, such as of a menu that does not have this choice
            refused.print_exception = False
            raise

    blocks.preprocess_data, blocks.process_api = read, answer
