"""Builds training windows from texts and tasks: fixed shares of every source, packed items, per-token loss weights.

A window is `width + 1` token ids, so that it holds `width` predictions. Natural text is cut into consecutive windows;
items are packed whole, best fit first, and the rest of a window is padding of weight 0. Every token has the number of
its document, so that no token attends to another document (`architecture.within_documents`). Answers have weight 1,
questions 0.1: the model should learn to answer questions rather than to ask them.
"""
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from playground.engine.host_copies import moved
from playground.errors import Refusal
from playground.pocket import corpus
from playground.pocket import tokenizer as tokens
from playground.pocket.architecture import within_documents
from playground.questions.world import TASKS, facts, names, recall, revise

SHARES = dict(          # of the training tokens; answers are what counts, so a task with short ones needs more
    tales=.04,          # natural English; a small model learns only fragments of it
    code=.02, problems=.02, notices=.01,
    stories=.12,        # the text that people read first: 320 plots need several hundred versions each
    arithmetic=.12,     # steps and drills, in many wordings; the slowest task to learn
    records=.09,        # lists and nested objects are learned late
    edit=.16,           # one wrong token in fifty makes an answer wrong
    revise=.12,         # skills that edits need: counting sentences, capitals, one small change
    programs=.04,
    recall=.07,         # many questions about one passage: the retrieval that context_qa, needle and chat need
    context_qa=.05, needle=.02,
    chat=.05,
    facts=.02,          # 350 facts, learned early
    lists=.05,          # a third of them sorting and its drills
)
STAGES = {256: .35, 512: .45, 1024: .2}     # context lengths, and the share of the training of each
NATURAL = ("tales", "code")
TEACHERS = (recall, revise)                 # tasks for training only, without an evaluation
FULL, ASKED, NOTHING = 100, 10, 0           # weights in per cent, so that they fit into a byte
VALIDATION = (256, 48)                      # width and number of the validation windows of every source
WAITING = 48                                # items from which the packer chooses the best fit
PIECE = 1_000_000                           # tokens that one process packs at once
HOPELESS = 1000                             # consecutive items longer than a window before the packer gives up


@dataclass
class Windows:
    """Windows of one length, all arrays (n, width + 1).

    ids: uint16; weights: uint8, per cent; documents: uint8, the number of the token's text within its window (0 is
    padding, or natural text that began before the window).
    """
    ids: np.ndarray
    weights: np.ndarray
    documents: np.ndarray

    def save(self, path):
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path):
        stored = np.load(path)
        return cls(**{name: stored[name] for name in ("ids", "weights", "documents")})

    def __add__(self, other):
        return _concatenated([self, other])

    def __getitem__(self, rows):
        return Windows(*(array[rows] for array in vars(self).values()))

    def shuffled(self, seed):
        return self[np.random.RandomState(seed).permutation(len(self.ids))]

    def tensors(self, device="cpu"):
        """The windows as a `Batch` on a device, which is not waited for."""
        ids, weights, documents = (
            moved(torch.from_numpy(array.astype(kind)), device)
            for array, kind in ((self.ids, np.int32), (self.weights, np.float32), (self.documents, np.int32))
        )
        return Batch(ids.long(), weights / 100, documents.long(), self)


@dataclass(frozen=True)
class Batch:
    """Windows on a device, all tensors (rows, width + 1): ids, long; weights, float, 0 to 1; documents, long.

    `windows` are the same on the host, for what is drawn there: reading the tensors would wait for the device.
    """
    ids: torch.Tensor
    weights: torch.Tensor
    documents: torch.Tensor
    windows: Windows

    @property
    def read(self):
        """Inputs of the model: token ids (rows, width) and the attention mask that separates documents."""
        return dict(input_ids=self.ids[:, :-1], attention_mask=within_documents(self.documents[:, :-1]))

    @property
    def predicted(self):
        """Labels and their weights, both (rows, width)."""
        return self.ids[:, 1:], self.weights[:, 1:]


def tokenizer_texts(folder, seed):
    """Training texts of the tokenizer: a sample of each source, and the invented names."""
    rng = random.Random(seed)
    yield from pieces_of(corpus.tales(folder)[0], rng)[:120]
    yield from corpus.code()[0][:60]
    for item in corpus.problems(folder)[0][:2000]:
        yield f" {item.prompt} {item.answer}"
    for task in TASKS.values():
        for item in (task.generate(rng) for _ in range(2500)):
            yield f" {item.prompt} {item.answer}"
    for word in names.PEOPLE + names.TOWNS + names.THINGS + names.FOODS + names.PETS + names.COLOURS + names.TRADES:
        yield f'"{word}"' * 150       # a single token inside quotes too, since JSON answers copy words of the text


def pieces_of(texts, rng, size=60_000):
    """Long texts split into pieces and shuffled, so that no part of the training consists of a single book."""
    pieces = [text[i:i + size] for text in texts for i in range(0, len(text), size)]
    rng.shuffle(pieces)
    return pieces


def build(folders, tokenizer, count, seed):
    """Write `count` tokens of training windows, and the validation windows. folders: (corpus, output)."""
    folder, out = map(Path, folders)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    streams, items = _streams(folder, tokenizer, rng, 0), partial(_mixed, folder, tokenizer)
    validation = _streams(folder, tokenizer, rng, 1) | _packers(_encoders(folder, tokenizer, rng, 1))
    for width, share in STAGES.items():
        mixed = _mixture(streams, partial(packed, items, seed), width, int(count * share / width))
        mixed.shuffled(seed).save(out / f"train_{width}.npz")
    for name, reader in validation.items():
        reader.cut(*VALIDATION).save(out / f"valid_{name}.npz")


def _mixture(streams, pack, width, count):
    """`count` windows: natural text and packed items, each source by its share."""
    parts = [stream.cut(width, round(count * SHARES[name])) for name, stream in streams.items()]
    return sum(parts, start=pack(width, count - sum(len(part.ids) for part in parts)))


def packed(mixed, seed, width, count):
    """`count` windows of packed items, in pieces that all cores share; the same for any number of cores.

    mixed: the `Mixed` items for a random generator; it goes to other processes, so it has to be picklable.
    """
    size = max(1, PIECE // width)
    sizes = [min(size, count - at) for at in range(0, count, size)] or [0]
    pieces = [(mixed, f"{seed} {width} {number}", width, size) for number, size in enumerate(sizes)]
    if (processes := min(len(pieces), os.cpu_count() or 1)) == 1:
        return _concatenated(starmap(_piece, pieces))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        made = pool.map(_piece, *zip(*pieces))
        return _concatenated(tqdm(made, desc=f"packing {width}", total=len(pieces), mininterval=5, leave=False))


def _concatenated(parts):
    return Windows(*map(np.concatenate, zip(*(vars(windows).values() for windows in parts))))


def _piece(mixed, seed, width, count):
    return Packer(mixed(random.Random(seed))).cut(width, count)


def _mixed(folder, tokenizer, rng):
    """All sources that are packed, for training."""
    return Mixed(_encoders(folder, tokenizer, rng, 0) | dict(notices=partial(_notice, tokenizer, rng)))


def _packers(encoders):
    return {name: Packer(encode) for name, encode in encoders.items()}


def _streams(folder, tokenizer, rng, side):
    """The natural texts of training (side 0) or validation (side 1): {source: TokenStream}."""
    texts = dict(tales=corpus.tales(folder)[side], code=corpus.code()[side])
    return {name: TokenStream(tokenizer, pieces_of(texts[name], rng)) for name in NATURAL}


def _encoders(folder, tokenizer, rng, side):
    """Item generators of all other sources: {source: function without arguments -> (ids, weights)}."""
    problems, ask = corpus.problems(folder)[side], NOTHING if side else ASKED
    makers = dict(problems=partial(rng.choice, problems))
    makers |= {name: partial(task.generate, rng, bool(side)) for name, task in TASKS.items()}
    makers |= {} if side else {teacher.TASK: partial(teacher.generate, rng) for teacher in TEACHERS}
    return {name: partial(_item, tokenizer, make, ask) for name, make in makers.items()}


def _item(tokenizer, make, ask):
    return _weighted(tokens.turns(tokenizer, make()), ask)


def _weighted(turns, ask):
    """Token ids and weights of a whole conversation. Every answer has full weight, not only the last."""
    ids = [token for question, answer in turns for token in question + answer]
    weights = [weight for question, answer in turns for weight in [ask] * len(question) + [FULL] * len(answer)]
    return ids, weights


def _notice(tokenizer, rng):
    text = facts.notice(rng)
    ids = tokenizer.encode(tokens.END_OF_TEXT + text + tokens.END_OF_TEXT, add_special_tokens=False)
    return ids, [FULL] * len(ids)


class TokenStream:
    """Concatenated texts, each preceded by the end-of-text token, read sequentially by `cut`."""

    def __init__(self, tokenizer, texts):
        marked = [tokens.END_OF_TEXT + text for text in texts]
        batches = tokenizer(marked, add_special_tokens=False, verbose=False)["input_ids"]
        self.ids, self.at = np.concatenate([np.array(ids, np.uint16) for ids in batches]), 0

    def cut(self, width, count):
        """The next `count` windows; starts over at the end of the text."""
        rows = (np.arange(count)[:, None] * width + np.arange(width + 1) + self.at) % len(self.ids)
        self.at = (self.at + count * width) % len(self.ids)
        ids = self.ids[rows]
        texts = np.cumsum(ids == tokens.SPECIALS.index(tokens.END_OF_TEXT), 1, dtype=np.uint8)
        return Windows(ids, np.full(ids.shape, FULL, np.uint8), texts)


class Mixed:
    """Samples items of several sources so that each source gets its share of the *tokens*."""

    def __init__(self, encoders, sample=60, shares=SHARES):
        self.encoders = encoders
        self.names = sorted(encoders)
        lengths = {name: np.mean([len(encoders[name]()[0]) for _ in range(sample)]) for name in self.names}
        self.rates = [shares[name] / lengths[name] for name in self.names]
        self.rng = random.Random(len(self.names))

    def __call__(self):
        return self.encoders[self.rng.choices(self.names, self.rates)[0]]()


class Packer:
    """Packs whole items into windows, always the longest waiting item that still fits."""

    def __init__(self, encode):
        self.encode, self.waiting = encode, []

    def cut(self, width, count):
        """`count` windows of whole items; items longer than a window are skipped."""
        size = (count, width + 1)
        empty = np.full(size, tokens.SPECIALS.index(tokens.PAD), np.uint16)
        windows = Windows(empty, np.zeros(size, np.uint8), np.zeros(size, np.uint8))
        beside_others = parent_process() is not None    # that would all draw their bars into one line
        for row in tqdm(range(count), desc=f"packing {width}", mininterval=5, leave=False, disable=beside_others):
            self._fill(windows[row])
        return windows

    def _fill(self, window):
        """Fill one empty window until no waiting item fits."""
        at, number = 0, 1
        while (chosen := self._best(len(window.ids), at)) is not None:
            ids, weights = self.waiting.pop(chosen)
            place = slice(at, at + len(ids))
            window.ids[place], window.weights[place], window.documents[place] = ids, weights, number
            at, number = place.stop, number + 1

    def _best(self, size, at):
        """Index of the longest waiting item that fits after `at`; the oldest if all fit; None if none does."""
        skipped = 0
        while len(self.waiting) < WAITING:
            entry = self.encode()
            skipped = 0 if len(entry[0]) <= size else skipped + 1
            if not skipped:
                self.waiting.append(entry)
            elif skipped == HOPELESS:
                raise Refusal(
                    f"{HOPELESS} items in a row are longer than a window of {size} tokens: use longer windows or a "
                    "larger vocabulary.",
                    "data",
                )
        fitting = [(len(ids), i) for i, (ids, _) in enumerate(self.waiting) if len(ids) <= size - at]
        return 0 if len(fitting) == WAITING else max(fitting)[1] if fitting else None
