"""Models for a command, with progress on a terminal and nothing else on it."""
from __future__ import annotations

import logging
import sys
import warnings
from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.decoding.session import Models

WIDTH = 60  # letters of a progress line


def load(options: Namespace, draft: bool) -> Models:
    """The models that were named. A draft that nobody named is loaded only where a lane needs one."""
    import playground
    if not options.verbose:
        hush()
    name = options.draft or (None if draft else playground.NO_DRAFT)
    models = playground.load(
        options.model,
        name,
        options.device,
        options.dtype,
        options.quantization,
        tell,
        draft_device=options.draft_device,
    )
    tell(1.0, "")
    return models


def hush() -> None:
    """Libraries keep their warnings and progress bars to themselves, and so does the log of an unexpected error."""
    import transformers
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for log in ("playground", "bitsandbytes"):
        logging.getLogger(log).setLevel(logging.CRITICAL)


def tell(share: float, text: str) -> None:
    """One line on a terminal that writes over itself; an empty text clears it."""
    if sys.stderr.isatty():
        print(
            f"\r{f'{share:4.0%} {text}' if text else '':<{WIDTH}.{WIDTH}}",
            end="" if text else "\r",
            file=sys.stderr,
            flush=True,
        )
