"""EMS with a small budget."""
from __future__ import annotations

EMS_TIGHT = {"size": 9, "window": 3, "kernel": 3, "likeness": 0.2}
