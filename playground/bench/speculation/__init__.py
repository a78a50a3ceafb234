"""Guessing ahead, measured: every lossless way there is beside plain decoding, task by task, and the transformers
library's own beside ours.

All write the same texts, so there is nothing to score: what counts is how many passes of the target a text takes, how
many guesses stand, how long it takes by the clock, and how much of that time no forward is to blame for.
"""
