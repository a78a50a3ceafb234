"""A result that plays: a notebook shows it as the page's player, and it can be saved as a standalone page."""
from __future__ import annotations

from html import escape
from pathlib import Path

from playground.errors import Refusal
from playground.trace.result import Result

HEIGHT = 640  # pixels of the player in a notebook


class PlayableResult(Result):
    """One finished lane, computed from its trace alone, with the player of the page."""

    def to_html(self, path: str | Path | None = None) -> str | None:
        """A page that plays the run without a server: returned, or written to `path`. Raises Refusal."""
        page = self._page()
        if path is None:
            return page
        try:
            Path(path).write_text(page, encoding="utf-8", newline="")
            return None
        except (OSError, TypeError, ValueError) as reason:
            raise Refusal(
                f"The page cannot be written to {path} ({getattr(reason, 'strerror', None) or reason}): name a file in "
                "a folder that exists.",
                "path",
            ) from None

    def _page(self) -> str:
        from playground.player.standalone import to_html  # late: the player, which few runs are shown in
        return to_html(self.trace)

    def _repr_html_(self) -> str:
        """The player, in a frame without access to the notebook around it."""
        return (
            f'<iframe srcdoc="{escape(self._page())}" sandbox="allow-scripts allow-downloads" '
            f'title="{escape(repr(self))}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'
        )
