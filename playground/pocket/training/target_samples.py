"""Texts sampled from the target, as training data for its drafts.

A draft has to predict the target's tokens, not those of the data, so part of its windows is written by the target:
sampled answers to training questions, and continuations of natural text. They are stored as text, so that a draft with
another tokenizer can use them too. Source: DistillSpec, Zhou et al. 2023, arXiv 2310.08461 (on-policy data of the
student); ours is sampled once, from the target.
"""
import itertools
import json
import random

import torch

from playground.errors import Refusal
from playground.pocket import data
from playground.pocket import tokenizer as tokens
from playground.pocket.generation import continuations
from playground.questions.world import TASKS

SHARE = 0.3                     # of a draft's windows
REPEATS = 4                     # how often a text may be repeated if there are few
NATURAL = 0.15                  # share of the prompts that are natural text
OPENING, ROOM = 48, 192         # tokens of natural text in a prompt, and tokens to generate
TEMPERATURE = 0.8


def drawn(target, tokenizer, openings, seed, rows=64):
    """Infinite stream of pairs (prompt, answer) of strings, with role and end tokens.

    openings: prompts of natural text, lists of token ids. A batch contains a single task, so that its answers end at
    about the same time.
    """
    rng, longest = random.Random(seed), target.config.max_position_embeddings - ROOM
    torch.manual_seed(seed)
    while True:
        prompts = [prompt for prompt in _prompts(tokenizer, openings, rng, rows) if len(prompt) <= longest]
        for prompt, answer in zip(prompts, continuations(target, prompts, ROOM, TEMPERATURE, rows)):
            yield tokenizer.decode(prompt), tokenizer.decode(answer)


def _prompts(tokenizer, openings, rng, count):
    """Questions of one task, chosen by its share of the training, or openings of natural text."""
    if rng.random() < NATURAL:
        return rng.choices(openings, k=count)
    task = TASKS[rng.choices(list(TASKS), [data.SHARES[name] for name in TASKS])[0]]
    return [tokens.exchange(tokenizer, task.generate(rng))[0] for _ in range(count)]


def natural_openings(windows):
    """The first tokens of the windows with natural text: lists of token ids."""
    user = tokens.SPECIALS.index(tokens.USER)
    return windows.ids[~(windows.ids == user).any(1), :OPENING].tolist()


def write(pairs, path):
    """Write pairs as JSON lines."""
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)


def load(path):
    """Read the pairs written by `write`. Raises Refusal if the file does not exist."""
    if not path.exists():
        raise Refusal(
            f"There are no texts of the target in {path.parent}: run `python -m playground.pocket samples` first.",
            "out",
        )
    with path.open(encoding="utf-8") as lines:
        return [tuple(json.loads(line)) for line in lines]


def mix_in(folder, pairs, tokenizer, seed):
    """Replace a share of the training windows in a folder by windows packed from pairs."""
    items = [_item(tokenizer, pair) for pair in pairs]
    random.Random(seed).shuffle(items)
    size = sum(len(ids) for ids, _ in items)
    supply = itertools.cycle(items)
    for width in data.STAGES:
        path = folder / f"train_{width}.npz"
        windows = data.Windows.load(path)
        count = min(round(SHARE * len(windows.ids)), REPEATS * size // width)
        written = data.Packer(lambda: next(supply)).cut(width, count)
        (windows[:len(windows.ids) - count] + written).shuffled(seed).save(path)


def _item(tokenizer, pair):
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in pair)
    return prompt + answer, [data.ASKED] * len(prompt) + [data.FULL] * len(answer)
