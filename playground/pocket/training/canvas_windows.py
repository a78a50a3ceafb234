"""Training windows of the masked denoiser: questions, and answers that fill a canvas with end tokens.

A denoiser fills a canvas whose length is chosen before the answer is known, so it has to learn the end of an answer
like any other token: every answer is followed by end tokens up to the length of a canvas. Half of the canvases are the
shortest that hold the answer, the others are longer. Only tasks whose answers are determined by the question are
included: a model that is trained for an hour learns those, but not open text.
"""
from functools import partial
from pathlib import Path

from playground.pocket import tokenizer as tokens
from playground.pocket.data import FULL, NOTHING, Mixed, packed
from playground.questions.world import TASKS

SHARES = dict(          # of the training tokens, question included
    records=.24, programs=.20, edit=.20, lists=.12, arithmetic=.14, needle=.06, context_qa=.04,
)
GRADES = dict(arithmetic=(1, 1, 2, 2), needle=(1, 2, 3), programs=(1, 1, 1, 2), edit=(1, 1, 1, 2))
STAGES = {256: .6, 512: .4}     # window lengths, and the share of the training of each
CANVAS, LONGEST = 16, 128       # canvases are multiples of the first; those of short answers have at most the second
TIGHT = 0.5                     # share of the answers in the shortest canvas that holds them


def build(out, tokenizer, count, seed, tight=TIGHT):
    """Write `count` tokens of training windows, and nothing else, into `out`. tight: share of shortest canvases."""
    Path(out).mkdir(parents=True, exist_ok=True)
    mixed = partial(_mixed, tokenizer, tight)
    for width, share in STAGES.items():
        # one less, since a window holds one token more than its width, and here every token is read
        windows = packed(mixed, seed, width - 1, int(count * share / width))
        windows.shuffled(seed).save(Path(out) / f"train_{width}.npz")


def _mixed(tokenizer, tight, rng):
    return Mixed({name: partial(_item, tokenizer, rng, (name, tight)) for name in SHARES}, shares=SHARES)


def _item(tokenizer, rng, kind):
    """Ids and weights of an item with its canvas: weight 0 for the question, 1 for the answer and its end tokens.

    kind: (task, share of shortest canvases).
    """
    task, tight = kind
    grade = rng.choice(GRADES[task]) if task in GRADES else None
    question, answer = tokens.exchange(tokenizer, TASKS[task].generate(rng, False, grade))
    canvas = answer + [tokens.SPECIALS.index(tokens.END)] * (canvas_length(len(answer), rng, tight) - len(answer))
    return question + canvas, [NOTHING] * len(question) + [FULL] * len(canvas)


def canvas_length(answer, rng, tight=TIGHT):
    """Length of a canvas for an answer of `answer` tokens."""
    shortest = -(-answer // CANVAS) * CANVAS
    longer = range(shortest, max(shortest, LONGEST) + 1, CANVAS)
    return shortest if rng.random() < tight else rng.choice(longer[:5] if rng.random() < 0.6 else longer)
