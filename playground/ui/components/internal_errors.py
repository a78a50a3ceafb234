"""Errors that no one expected, as messages of the page, which a handler that raises them would leave busy for ever."""
from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import gradio as gr

from playground.errors import Refusal

log = logging.getLogger(__name__)


@contextmanager
def as_refusals(what: str, about: str = "") -> Iterator[None]:
    """Raise every error as a Refusal: one that is neither a Refusal nor meant for the page (`gr.Error`) is logged.

    what: the subject of the sentence, such as "This run".
    """
    try:
        yield
    except (Refusal, gr.Error):
        raise
    except Exception as error:
        log.exception("%s failed", what)
        raise Refusal(
            f"{what} failed with an internal error ({type(error).__name__}; see the log): change the prompt, the "
            "lanes or the model, and try again.",
            about,
        ) from error
