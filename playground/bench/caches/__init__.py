"""Benchmark of the cache policies: recall, memory actually freed, and time per decode step."""
