"""The limits of one analysis of a program, which `attributes_work` makes."""
from playground.confined.task_bounds import TaskBounds

WAIT_SECONDS = 30.0  # for one of the places, while other lanes go on
BOUNDS = TaskBounds(
    cpu_seconds=1.5, wall_seconds=6.0, memory_bytes=256 << 20, answer_bytes=1 << 20, at_once=2, niceness=10
)
