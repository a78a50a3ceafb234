"""Calibration of policies: a target reads texts, of which a policy measures or learns what it needs."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from torch import Tensor

from playground.contract import CachePolicy, ComputePolicy, LayerChoices
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.layer_choices import ComputePass, NetworkParts
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Figure, Note
from playground.training.checkpoints import Checkpoint

WINDOW = 256  # tokens of a calibration text
EACH = 8  # questions per task of the small world


class CalibrationTexts:
    """A target and the texts it is calibrated on, as token ids of at most `WINDOW` tokens."""

    def __init__(self, model: Model, texts: list[list[int]], checkpoint: Checkpoint | None = None):
        self._model, self.texts = model, texts
        self.parts: NetworkParts = model.parts
        self._checkpoint = checkpoint or Checkpoint(None, None)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self._model.end_ids

    def spell(self, text: str) -> list[int]:
        """A text as token ids, without special tokens."""
        tokens = self._model.tokens
        return [token for token in tokens.encode(text) if not tokens.is_special(token)]

    def resumed(self) -> dict | None:
        """What an interrupted training saved; None if there is nothing."""
        return self._checkpoint.load()

    def save(self, state: dict) -> None:
        """Save what a training needs to go on after an interruption."""
        self._checkpoint.save(state)

    def read(self, ids: list[int], choices: LayerChoices) -> Tensor:
        """Logits [n, V] after each token of a text, while `choices` decides what runs."""
        work = ForwardInput(self._model.new_store(), ids, list(range(-1, len(ids) - 1)))
        (logits,), _ = self._model.forward([work], LayerPlan(compute=ComputePass(lambda positions: choices)))
        return logits


def calibrate(cls: type[ComputePolicy | CachePolicy], model: Model, texts: list[str], seed: int,
              watch: Callable[[Figure | Note], None], checkpoint: Path | None = None) -> dict[str, Tensor]:
    """What a policy measures on texts, or learns from them, by name; on answers of the small world without texts.

    A training that is interrupted goes on from the file `checkpoint`. Raises Refusal if the model's weights cannot be
    read, or if the texts are too short.
    """
    if model.parts is None:
        raise Refusal(
            f"{cls.title} is calibrated inside of layers, which works for llama, mistral, qwen2 and qwen3 models "
            f"that are not quantised: choose another model than {model.name}.",
            "model",
        )
    ids = windows(model, texts) if texts else world_texts(model, seed, getattr(cls, "questions_per_task", EACH))
    if not ids:
        raise Refusal("The texts have fewer than two tokens each: name files with longer texts.", "texts")
    file = Checkpoint(checkpoint, (cls.name, model.revision, model.quantization, seed, ids))
    events = cls.calibrate(CalibrationTexts(model, ids, file), seed)
    while True:
        try:
            watch(next(events))
        except StopIteration as end:
            file.delete()
            return end.value


def windows(model: Model, texts: Iterable[str]) -> list[list[int]]:
    """The texts as token ids, cut into pieces that a forward reads."""
    read, size = (model.tokens.encode(text) for text in texts), min(WINDOW, model.context)
    pieces = [ids[start:start + size] for ids in read for start in range(0, len(ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


def world_texts(model: Model, seed: int, each: int = EACH) -> list[list[int]]:
    """Training questions of the small world with their answers in random order, as token ids."""
    from playground.pocket.world import TASKS
    from playground.pocket.world.show import items
    asked = [item for task in TASKS for item in items(task, each, seed)]
    Random(seed).shuffle(asked)
    tokens, size = model.tokens, min(WINDOW, model.context)
    chats = bool(tokens.tokenizer.chat_template)
    questions = (tokens.encode_chat(item.prompt, before=item.before) if chats else tokens.encode(item.prompt)
                 for item in asked)
    answers = ([token for token in tokens.encode(item.answer) if not tokens.is_special(token)] for item in asked)
    return [(question + answer)[-size:] for question, answer in zip(questions, answers)]
