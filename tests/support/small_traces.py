"""Traces written by hand."""
from __future__ import annotations

from playground.events import Done
from support.traces import commit

ONE = commit(0, [1])
END = Done("length")
