"""One strategy's run over one text, in layers that each know those before: random numbers, the text, the streams that
read it, parallel sequences, commits, and the whole lane with its requests. `playground.contract.lane` describes it.
"""
from playground.decoding.lane.lm import Lane

__all__ = ["Lane"]
