"""Decoding strategies, one file each. `playground.strategy.discover` imports them all."""
