"""Reads, validates, measures, compares and exports runs. Imports neither torch nor gradio."""
from playground.trace.lane_metrics import diff, metrics
from playground.trace.recorded_trace import FORMAT, Trace, replay, schema
from playground.trace.validate import check

__all__ = ["FORMAT", "Trace", "check", "diff", "metrics", "replay", "schema"]
