"""Calibration of compute policies: a target reads texts while the policy decides what of its layers runs."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from torch import Tensor

from playground.contract import ComputePolicy, LayerChoices
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.layer_choices import ComputePass, NetworkParts
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Figure, Note

WINDOW = 256  # tokens of a calibration text
EACH = 8  # questions per task of the small world, unless the policy has its own number


class CalibrationTexts:
    """A target and the texts it is calibrated on, as token ids of at most `WINDOW` tokens."""

    def __init__(self, model: Model, texts: list[list[int]]):
        self._model, self.texts = model, texts
        self.parts: NetworkParts = model.parts

    def read(self, ids: list[int], choices: LayerChoices) -> Tensor:
        """Logits [n, V] after each token of a text, while `choices` decides what runs."""
        work = ForwardInput(self._model.new_store(), ids, list(range(-1, len(ids) - 1)))
        (logits,), _ = self._model.forward([work], LayerPlan(compute=ComputePass(lambda positions: choices)))
        return logits


def calibrate(cls: type[ComputePolicy], model: Model, texts: list[str], seed: int,
              watch: Callable[[Figure | Note], None]) -> dict[str, Tensor]:
    """What a policy measures on texts, or searches with them, by name; on answers of the small world without texts.

    Raises Refusal if the model's layers always run whole, or if the texts are too short.
    """
    if model.parts is None:
        raise Refusal(
            f"{cls.title} decides inside of layers what runs, which works for llama, mistral, qwen2 and qwen3 models "
            f"that are not quantised: choose another model than {model.name}.",
            "model",
        )
    ids = windows(model, texts) if texts else world_texts(model, seed, getattr(cls, "questions", EACH))
    if not ids:
        raise Refusal("The texts have fewer than two tokens each: name files with longer texts.", "texts")
    events = cls.calibrate(CalibrationTexts(model, ids), seed)
    while True:
        try:
            watch(next(events))
        except StopIteration as end:
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
