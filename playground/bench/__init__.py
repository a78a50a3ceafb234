"""Benchmarks: strategies on questions, the effects they are meant to show, and speed compared with the transformers
library on the same weights.

Sessions are those of the page, without a display. Whatever is compared runs in one process, interleaved round by
round, so that other load on the machine affects all of it.
"""
