"""Calibration of policies: a target reads texts, of which a policy measures or learns what it needs.

One that only measures reads text by text. A compute policy that trains what it decides with gets batches, a forward
with gradients, and a checkpoint for each phase of its training.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from playground.algorithms.adaptive_compute.policy_training import TextBatch
from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.fairy_tales import tales
from playground.contract import CachePolicy, ComputePolicy, Decoder, LayerChoices, LayerSteps, Overlay
from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.layer_choices import ComputePass, NetworkParts
from playground.engine.model import Model
from playground.errors import Refusal
from playground.training.checkpoint import Checkpoint, delete_files
from playground.training.fitting import Fitting, finish
from playground.training.frozen_network import untrained
from playground.training.stepped_llama import SteppedLlama

if TYPE_CHECKING:
    from playground.engine.text.tokens import Tokens
    from playground.questions.world import Item

WINDOW = 256  # tokens of a calibration text
BATCH = 256  # tokens of a training step, padding included
TOGETHER = 48  # texts that are written at a time
NEW_ANSWERS = 120  # questions of a task that an adapter is trained on
HELD_OUT = 10  # one text in this many is not trained on


@dataclass
class CalibrationTexts:
    """A target and the texts it is calibrated on, as token ids of at most `WINDOW` tokens."""

    model: Model
    texts: list[list[int]]
    seed: int = 0
    checkpoint: Path | None = None  # of an interrupted training; None if nothing is saved
    progress: Progress = unseen
    about: tuple[str, ...] = ()  # the strategy and the phase of its training
    epochs: int = 0  # each phase has its own number
    given: list[int] = field(default_factory=list)  # tokens of each text that are only read; none if it is empty
    _networks: list[SteppedLlama] = field(default_factory=list)  # at most one, shared by the phases

    @property
    def parts(self) -> NetworkParts:
        return self.model.parts

    def piece(self, token: int) -> str:
        """The text of a token."""
        return self.model.tokens.piece(token)

    def without_training(self, seed: int) -> CalibrationTexts:
        """The same texts, read by layers with random weights above the model's embeddings."""
        return replace(self, model=untrained(self.model, seed), checkpoint=None)

    # --- training ---

    def phase(self, name: str) -> CalibrationTexts:
        """The same texts for one phase of a training, with a checkpoint of its own."""
        place = self.checkpoint and self.checkpoint.with_suffix(f".{name}{self.checkpoint.suffix}")
        return replace(self, checkpoint=place, about=(*self.about, name))

    def in_new_form(self, task: str) -> CalibrationTexts:
        """Questions of one task, whose answers in a new form (`questions.answer_forms`) are what is trained on."""
        asked, texts = zip(*new_answers(self.model, task, NEW_ANSWERS, self.seed))
        return replace(self, texts=list(texts), given=list(asked))

    def forward(self, ids: Tensor, steps: LayerSteps) -> Tensor:
        """Logits [texts, n, V] of padded texts [texts, n], with gradients for what `steps` puts into the network."""
        if not self._networks:
            self._networks.append(SteppedLlama(DifferentiableLlama(self.model.fused, torch.float32)))
        return self._networks[0](ids, steps)

    def batches(self, epoch: int) -> Iterator[TextBatch]:
        """The texts that are trained on, in an order of this epoch."""
        groups = self._groups([number for number in range(len(self.texts)) if number % HELD_OUT or self._few])
        Random(f"{self.seed} {epoch}").shuffle(groups)
        yield from map(self._batch, groups)

    def held_out(self) -> Iterator[TextBatch]:
        yield from map(self._batch, self._groups(list(range(0, len(self.texts), HELD_OUT))))

    @property
    def _few(self) -> bool:
        """Whether the texts are so few that all of them are trained on."""
        return len(self.texts) < 2 * HELD_OUT

    def _groups(self, numbers: list[int]) -> list[list[int]]:
        """Texts of similar length, so many that a batch has `BATCH` tokens with padding."""
        groups: list[list[int]] = [[]]
        for number in sorted(numbers, key=lambda number: len(self.texts[number])):
            if groups[-1] and (len(groups[-1]) + 1) * len(self.texts[number]) > BATCH:
                groups.append([])
            groups[-1].append(number)
        return groups

    def _batch(self, numbers: list[int]) -> TextBatch:
        rows = [torch.tensor(self.texts[number]) for number in numbers]
        given = [self.given[number] if self.given else 0 for number in numbers]
        real = pad_sequence([torch.arange(len(row)) >= first for row, first in zip(rows, given)], batch_first=True)
        return TextBatch(pad_sequence(rows, batch_first=True), real)

    def resumed(self) -> dict | None:
        return self._file.read() if self.checkpoint else None

    def save(self, state: dict) -> None:
        if self.checkpoint:
            self._file.write(state)

    @cached_property
    def _file(self) -> Checkpoint:
        model = self.model
        return Checkpoint(self.checkpoint, (*self.about, model.revision, model.quantization, self.seed, self.texts))

    # --- measuring ---
    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.model.end_ids

    def spell(self, text: str) -> list[int]:
        """A text as token ids, without special tokens."""
        return _plain(self.model.tokens, text)

    def begins(self, ids: list[int]) -> bool:
        """Whether a text begins with a special token, as prompts do for models that have one."""
        return self.model.tokens.is_special(ids[0])

    def last_turn(self, ids: list[int]) -> tuple[list[int], str]:
        """A text up to its last special token, and what is written after it; all of it if there is none."""
        tokens = self.model.tokens
        first = max((at + 1 for at, token in enumerate(ids) if tokens.is_special(token)), default=0)
        return ids[:first], "".join(map(tokens.piece, ids[first:]))

    def read(self, ids: list[int], choices: LayerChoices) -> Tensor:
        """Logits [n, V] after each token of a text, while `choices` decides what runs."""
        work = ForwardInput(self.model.new_store(), ids, list(range(-1, len(ids) - 1)))
        (logits,), _ = self.model.forward([work], LayerPlan(compute=ComputePass(lambda positions: choices)))
        return logits

    def states(self, ids: list[int], layers: Iterable[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [n, V] after each token of a text, and by layer its inputs [n, hidden_size]; the depth: after all."""
        work = ForwardInput(self.model.new_store(), ids, list(range(-1, len(ids) - 1)))
        (logits,), states = self.model.forward([work], LayerPlan(capture=frozenset(layers)))
        return logits, states

    def continued(self, openings: list[list[int]], length: int, pick: Callable[[int, Tensor], int]) -> list[list[int]]:
        """The openings with `length` more tokens each: pick(number, logits [V]) chooses every next token of a text."""
        written = [list(ids) for ids in openings]
        for first in range(0, len(written), TOGETHER):
            self._continue(list(enumerate(written[first:first + TOGETHER], first)), length, pick)
            self.progress(min(1.0, (first + TOGETHER) / len(written)), "The model writes texts")
        return written

    def _continue(self, texts: list[tuple[int, list[int]]], length: int, pick: Callable[[int, Tensor], int]) -> None:
        """Append tokens to texts with these numbers, a token of each per forward."""
        stores, unread = [self.model.new_store() for _ in texts], [list(ids) for _, ids in texts]
        for _ in range(length):
            works = [ForwardInput(store, ids, list(range(-1, len(ids) - 1)), last_only=True)
                     for store, ids in zip(stores, unread)]
            rows = self.model.forward(works)[0]
            for at, ((number, ids), row) in enumerate(zip(texts, rows)):
                stores[at].commit(len(unread[at]) - 1)
                unread[at] = [pick(number, row[-1].cpu())]
                ids += unread[at]


def calibrate(cls: type[ComputePolicy | CachePolicy | Decoder | Overlay], fitting: Fitting) -> dict[str, Tensor]:
    """What a policy or decoder measures, searches or learns on texts, by name; on answers of the small world without
    texts.

    An interrupted training goes on from its checkpoint or files beside it, which are deleted at the end. Raises Refusal
    if the model's weights cannot be read, or if the texts are too short.
    """
    model, seed = fitting.model, fitting.seed
    if model.parts is None:
        raise Refusal(
            f"{cls.title} is calibrated inside of layers, which works for llama, mistral, qwen2 and qwen3 models "
            f"that are not quantised: choose another model than {model.name}.",
            "model",
        )
    texts = fitting.texts or ([tales()] if cls.calibrates_on_tales else [])
    ids = windows(model, texts) if texts else world_texts(model, seed, cls.questions_per_task, cls.calibration_tasks)
    if not ids:
        raise Refusal("The texts have fewer than two tokens each: name files with longer texts.", "texts")
    read = CalibrationTexts(model, ids, seed, fitting.checkpoint, fitting.progress, (cls.name,))
    weights = finish(cls.calibrate(read, seed), fitting.watch)
    delete_files(fitting.checkpoint)
    return weights


def windows(model: Model, texts: Iterable[str]) -> list[list[int]]:
    """The texts as token ids, cut into pieces that a forward reads."""
    read, size = (model.tokens.encode(text) for text in texts), min(WINDOW, model.context)
    pieces = [ids[start:start + size] for ids in read for start in range(0, len(ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


def world_texts(model: Model, seed: int, each: int = 8, tasks: Iterable[str] = (), *, held_out: bool = False
                ) -> list[list[int]]:
    """Training questions of the small world with their answers in random order, as token ids; by default of all tasks.
    With `held_out` in wordings that no training has.
    """
    from playground.questions.world import TASKS
    from playground.questions.world.show import items
    asked = [item for task in tasks or TASKS for item in items(task, each, seed, held_out=held_out)]
    Random(seed).shuffle(asked)
    size = min(WINDOW, model.context)
    return [answered(model.tokens, item)[-size:] for item in asked]


def new_answers(model: Model, task: str, count: int, seed: int) -> Iterator[tuple[int, list[int]]]:
    """Questions of one task with answers in a new form that end: tokens of the question, and all token ids. Those that
    are longer than a calibration text are left out.
    """
    from playground.questions.answer_forms import in_new_form
    from playground.questions.world.show import items
    tokens = model.tokens
    for item in map(in_new_form, items(task, count, seed)):
        ids = answered(tokens, item)
        asked = tokens.encode_chat(item.prompt) if tokens.tokenizer.chat_template else tokens.encode(item.prompt)
        ended = tokens.encode_chat(item.prompt, before=((item.prompt, item.answer),)) if model.end_ids else ids
        ids = [*ids, *ended[len(ids):len(ids) + 1]]
        if len(ids) <= min(WINDOW, model.context):
            yield len(asked), ids


def answered(tokens: Tokens, item: Item) -> list[int]:
    """A question with its answer as token ids, as a chat that the model has written if it has a chat template."""
    if not tokens.tokenizer.chat_template:
        return [*tokens.encode(item.prompt), *_plain(tokens, item.answer)]
    asked = tokens.encode_chat(item.prompt, before=item.before)
    written = tokens.encode_chat(item.prompt, before=(*item.before, (item.prompt, item.answer)))
    if written[:len(asked)] != asked:  # the template writes earlier answers in another form
        return [*asked, *_plain(tokens, item.answer)]
    return [*asked, *takewhile(lambda token: not tokens.is_special(token), written[len(asked):])]


def _plain(tokens: Tokens, text: str) -> list[int]:
    """A text without special tokens."""
    return [token for token in tokens.encode(text) if not tokens.is_special(token)]
