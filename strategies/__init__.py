"""Decoding strategies, one file each. `playground.contract.discover` imports them all."""
