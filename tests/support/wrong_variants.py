"""Wrong variants of a strategy that a test file defines."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def variants_of(base: type, module: str) -> list[type]:
    """Subclasses of a strategy defined by one test file so far."""
    return [cls for cls in base.__subclasses__() if cls.__module__ == module]


def refused(check: Callable[..., None], *wrong: Any) -> None:
    """A check fails on a wrong variant, by what this computes."""
    with pytest.raises(AssertionError) as found:
        check(*wrong)
    assert "Failed(" not in str(found.value), "a variant that breaks off proves nothing"
