"""Ends the runs of a program early: after some seconds, or when another thread says so."""
from __future__ import annotations

import math
from contextvars import ContextVar, Token
from time import monotonic
from types import TracebackType


class stop_after:  # lower case, since it is called as a function
    """Runs within `with playground.stop_after(seconds):` end then, with the text so far and the reason "stopped".

        with playground.stop_after(2.5) as limit:
            result = playground.run("greedy", "Once upon a time", models=models, max_new_tokens=4000)

    `limit.stop()` ends them at once, from any thread; without seconds nothing else does. A limit counts for the thread
    that entered it, and the outer of two limits for the inner one as well. A run ends between two forwards.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._seconds = seconds

    def __enter__(self) -> stop_after:
        self._outer, self._until = _LIMIT.get(), monotonic() + self._seconds
        self._token: Token[stop_after | None] = _LIMIT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LIMIT.reset(self._token)

    def stop(self) -> None:
        """End the runs within now."""
        self._until = -math.inf

    @property
    def reached(self) -> bool:
        """Whether runs within have to end."""
        return monotonic() >= self._until or self._outer is not None and self._outer.reached


_LIMIT: ContextVar[stop_after | None] = ContextVar("limit", default=None)


def limit_reached() -> bool:
    """Whether a limit that this thread is in has been reached."""
    limit = _LIMIT.get()
    return limit is not None and limit.reached
