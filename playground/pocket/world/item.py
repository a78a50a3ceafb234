"""What every task of the small world hands out: a question, its known answer, and enough to judge another answer.

A generator is a function of a `random.Random`, so the same seed gives the same items on every machine. Training and
held-out items are kept apart by a hash of what makes an item new (its `key`): nothing has to be stored, and a held-out
question can never turn up in training, in whatever words. Half of the held-out items are also put in a wording that
training never shows (`wording.py`).
"""
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from playground.pocket.world.wording import Wordings

HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Item:
    """One exchange. `meta` holds what the task's own `score` needs, and `kind` for the evaluation table.

    grade: how hard it is, from 1 on. key: what makes it new (the prompt where nothing else is said). before: the
    earlier (prompt, answer) turns of a chat. kept_words: the question is put in a wording that training never shows.
    """
    prompt: str
    answer: str
    task: str
    meta: dict = field(default_factory=dict)
    grade: int = 1
    key: str = ""
    before: tuple[tuple[str, str], ...] = ()
    kept_words: bool = False


@dataclass(frozen=True)
class Voice:
    """Who asks: all the chances of one item, and whether it may only use the kept wordings."""
    rng: random.Random
    kept: bool = False

    def say(self, wordings: Wordings, **slots):
        """One of the wordings with its slots filled."""
        return wordings.draw(self.rng, self.kept).format(**slots)


def is_held_out(key):
    """Whether the question that `key` identifies is kept for the evaluation (one in sixteen is)."""
    return int(hashlib.md5(key.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


def on_side(make: Callable[[Voice], Item], rng, held_out):
    """Call `make` until an item falls on the wanted side of the split."""
    while True:
        voice = Voice(rng, kept=held_out and rng.random() < 0.5)
        item = make(voice)
        if is_held_out(f"{item.task}:{item.key or item.prompt}") == held_out:
            return replace(item, kept_words=voice.kept)


def exact(item, text):
    """1.0 if the text is the known answer, spaces around it aside."""
    return float(text.strip() == item.answer.strip())
