"""The progress of loading in a terminal or notebook: one bar, and none of the libraries' own bars and warnings."""
from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[float, str], None]


@contextmanager
def reporting(progress: bool | Report | None) -> Iterator[Report]:
    """What is called with the share that is done, 0 to 1, and a few words, while the libraries show nothing.

    progress: called itself; None or True is a bar where somebody sees it, False is nothing.
    """
    with _quiet_libraries():
        if callable(progress):
            yield progress
        elif progress is False:
            yield lambda share, text: None
        else:
            with _bar() as report:
                yield report


@contextmanager
def _bar() -> Iterator[Report]:
    from tqdm.std import tqdm  # in text, which a notebook shows without widgets
    unseen = None if "ipykernel" not in sys.modules else False  # None: not where standard error is no terminal
    with tqdm(total=100, disable=unseen, leave=False, bar_format="{l_bar}{bar}| {desc}") as bar:
        def report(share: float, text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.n = round(100 * share)
            bar.refresh()

        yield report


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # once, where a notebook has no widgets
        import transformers
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
