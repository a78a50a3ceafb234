"""Loads the models of a command, with a progress line on the terminal and no library output."""
from __future__ import annotations

import logging
import sys
import warnings
from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.decoding.models import Models

WIDTH = 60  # characters of a progress line


def load(options: Namespace, draft: bool) -> Models:
    """Load the named models. Without --draft, a draft model is loaded only if a lane needs one."""
    import playground
    if not options.verbose:
        silence_libraries()
    name = options.draft or (None if draft else playground.NO_DRAFT)
    models = playground.load(
        options.model,
        name,
        options.device,
        options.dtype,
        options.quantization,
        show_progress,
        draft_device=options.draft_device,
    )
    show_progress(1.0, "")
    return models


def set_up(options: Namespace) -> None:
    """Set the number of threads, and silence the libraries unless --verbose is given."""
    import torch
    if not options.verbose:
        silence_libraries()
    if options.threads:
        torch.set_num_threads(options.threads)


def silence_libraries() -> None:
    """Silence the libraries' warnings and progress bars, and the log of unexpected errors."""
    import transformers
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for log in ("playground", "bitsandbytes"):
        logging.getLogger(log).setLevel(logging.CRITICAL)


def show_progress(share: float, text: str) -> None:
    """Show one progress line on a terminal, overwriting the previous one; an empty text clears it."""
    if sys.stderr.isatty():
        line = f"{share:4.0%} {text}" if text else ""
        print(f"\r{line:<{WIDTH}.{WIDTH}}", end="" if text else "\r", file=sys.stderr, flush=True)
