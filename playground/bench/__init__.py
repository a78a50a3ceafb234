"""Measured: strategies on questions, the effects they are meant to show, and speed beside the transformers library on
the same weights.

The sessions are those of the page, without a screen. Everyone who is compared runs in one process, in turn, round by
round, so that whatever else the machine does hits all.
"""
