"""Items of the small world: a question, its known answer, and what is needed to score another answer.

A generator is a function of a `random.Random`, so the same seed gives the same items on every machine. Training and
held-out items are separated by a hash of the item's `key`: nothing has to be stored, and a held-out question never
occurs in training, in any wording. Half of the held-out items also use a wording that never occurs in training
(`wording.py`).
"""
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from playground.questions.world.wording import Wordings

HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Item:
    """One question with its answer. `meta` holds what the task's `score` needs, and `kind` for the evaluation table.

    grade: difficulty, from 1. key: content that the held-out split hashes, by default the prompt. before: the earlier
    (prompt, answer) turns of a chat. kept_words: the question uses a held-out wording.
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
    """Randomness of one item, and whether it uses the held-out wordings (`kept`)."""
    rng: random.Random
    kept: bool = False

    def say(self, wordings: Wordings, **slots):
        """A random wording with its slots filled."""
        return wordings.draw(self.rng, self.kept).format(**slots)


def is_held_out(key):
    """Whether the item with this key is held out for the evaluation, as one in sixteen is."""
    return int(hashlib.md5(key.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


def on_side(make: Callable[[Voice], Item], rng, held_out):
    """Call `make` until it returns an item on the requested side of the split."""
    while True:
        voice = Voice(rng, kept=held_out and rng.random() < 0.5)
        item = make(voice)
        if is_held_out(f"{item.task}:{item.key or item.prompt}") == held_out:
            return replace(item, kept_words=voice.kept)


def exact(item, text):
    """1.0 if the text equals the known answer up to surrounding whitespace."""
    return float(text.strip() == item.answer.strip())
