"""Speed, measured: the sessions of the page without a screen, beside the transformers library on the same weights.

Everyone who is compared writes in one process, in turn, round by round, so that whatever else the machine does hits all.
"""
