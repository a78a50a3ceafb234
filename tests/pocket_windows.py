"""A tokenizer of 600 tokens and a few training windows, for tests of the pocket models. Fixtures: import them by name.
"""
import random
from functools import partial

import pytest

from playground.pocket import data
from playground.pocket import tokenizer as tokens
from playground.questions.world import TASKS


def some(task, count=40, seed=3, held_out=False):
    rng = random.Random(seed)
    return [task.generate(rng, held_out) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f" {item.prompt} {item.answer}" for task in TASKS.values() for item in some(task)]
    return tokens.train(texts, size=600)


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A folder with a few training windows of every length, all of arithmetic."""
    rng = random.Random(1)
    packer = data.Packer(lambda: data._item(tokenizer, partial(TASKS["arithmetic"].generate, rng), data.ASKED))
    for width in data.STAGES:
        packer.cut(width, 6).save(tmp_path / f"train_{width}.npz")
    return tmp_path
