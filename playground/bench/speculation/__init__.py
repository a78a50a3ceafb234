"""Benchmark of speculative decoding: every lossless drafter and preset compared with plain decoding, task by task, and
with the transformers library's own implementations.

All write the same texts, so nothing is scored. Measured are the target forwards of a text, the acceptance rate, the
wall-clock time, and the overhead outside forwards.
"""
