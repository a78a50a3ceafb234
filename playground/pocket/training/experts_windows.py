"""Training windows of the mixture of experts: the tasks of the small world, without natural text.

The mixture learns the distributions of a model that knows everything else already, in a short training.
"""
from functools import partial
from pathlib import Path

from playground.pocket import tokenizer as tokens
from playground.pocket.data import ASKED, FULL, SHARES, Mixed, packed
from playground.questions.world import TASKS

STAGES = {256: .75, 512: .25}       # window lengths, and the share of the training of each


def build(out, tokenizer, count, seed):
    """Write `count` tokens of training windows, and nothing else, into `out`."""
    Path(out).mkdir(parents=True, exist_ok=True)
    for width, share in STAGES.items():
        windows = packed(partial(_mixed, tokenizer), seed, width, int(count * share / width))
        windows.shuffled(seed).save(Path(out) / f"train_{width}.npz")


def _mixed(tokenizer, rng):
    encoders = {name: partial(_item, tokenizer, partial(task.generate, rng)) for name, task in TASKS.items()}
    return Mixed(encoders, sample=20, shares=SHARES)


def _item(tokenizer, make):
    """Ids and weights of a conversation, as for the target."""
    turns = tokens.turns(tokenizer, make())
    ids = [token for question, answer in turns for token in question + answer]
    return ids, [weight for question, answer in turns for weight in [ASKED] * len(question) + [FULL] * len(answer)]


def shares():
    """Share of the training tokens of each task, in per cent, in words."""
    total = sum(SHARES[name] for name in TASKS)
    return ", ".join(f"{name} {100 * SHARES[name] / total:.0f}" for name in TASKS)
