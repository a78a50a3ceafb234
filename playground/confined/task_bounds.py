"""What a task in a confined child may take."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskBounds:
    """Limits of one kind of task. The kernel enforces time, memory and stack, inside native code too."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int  # beyond what the process has before it forks
    stack_bytes: int = 8 << 20
    answer_bytes: int = 1 << 20
    at_once: int = 2  # tasks that run at a time, each in a fork of its own
    lessons: int = 4  # kept by the process; the oldest one is dropped
    niceness: int = 0  # above 0 it leaves the processor to the page
