"""What every task of the small world hands out: a question, its known answer, and enough to judge another answer.

A generator is a function of a `random.Random`, so the same seed gives the same items on every machine. Training
and held-out items are kept apart by a hash of what makes an item new: nothing has to be stored, and a held-out
question can never turn up in training.
"""
import hashlib
from dataclasses import dataclass, field

HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Item:
    """One exchange. `meta` holds what the task's own `score` needs, and `kind` for the evaluation table."""
    prompt: str
    answer: str
    task: str
    meta: dict = field(default_factory=dict)


def is_held_out(key):
    """Whether the question that `key` identifies is kept for the evaluation (one in sixteen is)."""
    return int(hashlib.md5(key.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


def on_side(make, rng, held_out, key=lambda item: item.prompt):
    """Call `make(rng)` until an item falls on the wanted side of the split."""
    while True:
        item = make(rng)
        if is_held_out(f"{item.task}:{key(item)}") == held_out:
            return item


def exact(item, text):
    """1.0 if the text is the known answer, spaces around it aside."""
    return float(text.strip() == item.answer.strip())
