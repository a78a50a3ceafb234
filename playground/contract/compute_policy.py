"""Compute policies: which layers, neurons or experts run?"""
from playground.contract.base import Strategy


class ComputePolicy(Strategy):
    """Decides which layers, neurons or experts run for a row."""

    kind = "compute_policy"
