"""The canvas: one strategy's run over positions that are filled in any order. Canvas decoders receive it as `lm`.

    rows = yield lm.read()                             one forward: a row for every position of the answer
    rows = yield lm.read(wanted, computed, states)     the same for some positions; the others as they were before
    token = lm.pick(rows, position)                    choose a token: sampled if a sampler draws, argmax otherwise
    yield lm.fill(positions, tokens, confidences)      fill these positions, which is final
    yield lm.revise(tokens, confidences, remasked)     fill, replace and mask again, as one step
    yield lm.complete()                                commit a text that was revised

It takes the place of Lane and has the same interface towards the session. The text is committed when no position is
masked, up to its first end token or stop string; one that is revised only then when it is declared complete.
"""
from playground.decoding.canvas.lm import Canvas, check_fit

__all__ = ["Canvas", "check_fit"]
