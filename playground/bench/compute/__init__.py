"""Benchmark of compute policies: score against the share of FLOPs and of wall-clock time that is left, task by task."""
