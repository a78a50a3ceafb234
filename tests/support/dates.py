"""Validators of constrained texts."""
from __future__ import annotations

from datetime import date


def is_day(text: str) -> bool:
    return str(date.fromisoformat(text)) == text
