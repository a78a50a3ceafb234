"""Training data of canvas decoders: a denoiser answers prompts one position per forward, and each block is filled again
by one who knows the answer. Finished prompts are stored, so that an interrupted run goes on.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from playground.algorithms.diffusion.position_filter import Round, oracle_rounds
from playground.contract import CanvasDecoder
from playground.engine.canvas.denoiser import MaskedDenoiser
from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.errors import Refusal
from playground.training.draft_rollouts import openings, world_prompts
from playground.training.fitting import Fitting, finish

EACH = 3  # questions per task of the small world
ROOM = 48  # positions of a canvas
FEW = 10  # prompts


def fit_canvas(cls: type[CanvasDecoder], fitting: Fitting) -> dict[str, Tensor]:
    """What a canvas decoder learns of a denoiser, by name, in float16. Raises Refusal."""
    model = fitting.model
    if not hasattr(model, "new_states"):
        raise Refusal(f"{model.name} is not a network that fills masked positions: choose pocket-diffusion.", "model")
    prompts = (openings(model, fitting.texts) if fitting.texts
               else world_prompts(model, fitting.seed, EACH))
    prompts = [ids for ids in prompts if 0 < len(ids) <= model.context - ROOM]
    if len(prompts) < FEW:
        raise Refusal(f"{len(prompts)} prompts are too few to train on: name more texts with --texts.", "texts")
    answers = OwnAnswers(model, prompts, fitting.checkpoint, fitting.progress)
    weights = finish(cls.learn(answers, fitting.seed), fitting.watch)
    fitting.checkpoint.unlink(missing_ok=True)
    return {name: tensor.half() for name, tensor in weights.items()}


@dataclass
class OwnAnswers:
    """Prompts of a denoiser, and how the blocks of its own answers can be filled."""

    model: MaskedDenoiser
    prompts: list[list[int]]
    checkpoint: Path
    progress: Progress = unseen

    def rounds(self, length: int) -> list[Round]:
        """Forwards over the blocks of all answers, decoded in blocks of this length."""
        known = self._known()
        for number, prompt in enumerate(self.prompts):
            if f"{length} {number}" not in known:
                self.progress(number / len(self.prompts), f"answers in blocks of {length}")
                known[f"{length} {number}"] = list(self._of_one(number, prompt, length))
                self._save(known)
        return [Round(*one) for number in range(len(self.prompts)) for one in known[f"{length} {number}"]]

    def _of_one(self, number: int, prompt: list[int], length: int) -> Iterator[Round]:
        answer = one_by_one(self.model, prompt, ROOM, length)
        for start in range(0, len(answer) - length + 1, length):
            block, canvas = range(start, start + length), [*answer[:start], *[None] * (ROOM - start)]
            read = partial(self._read, prompt, canvas, block)
            yield from oracle_rounds(read, block, answer[start:start + length], number)

    def _read(self, prompt: list[int], canvas: list[int | None], block: range, filled: dict[int, int]
              ) -> tuple[list[int], list[float]]:
        """Proposals and confidences of a block, with some of its positions filled."""
        text = [*prompt, *(filled.get(position, token) for position, token in enumerate(canvas))]
        best = proposed(self.model, text, [len(prompt) + position for position in block])
        return best.indices.tolist(), best.values.tolist()

    def _known(self) -> dict[str, list]:
        try:
            saved = json.loads(self.checkpoint.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return saved["rounds"] if isinstance(saved, dict) and saved.get("of") == self._digest else {}

    def _save(self, known: dict[str, list]) -> None:
        try:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.checkpoint.with_suffix(".unfinished")
            unfinished.write_text(json.dumps({"of": self._digest, "rounds": known}), encoding="utf-8")
            unfinished.replace(self.checkpoint)
        except OSError as reason:
            raise Refusal(
                f"{self.checkpoint} cannot be written ({reason}): free some space, or set PLAYGROUND_HOME to another "
                "folder.",
                "out",
            ) from None

    @property
    def _digest(self) -> str:
        """What a checkpoint belongs to: the model and the prompts."""
        about = repr((self.model.revision, self.model.quantization, self.prompts))
        return blake2b(about.encode(), digest_size=8).hexdigest()


def proposed(model: MaskedDenoiser, text: list[int | None], positions: list[int]):
    """The most probable token of some positions and its probability, as `torch.max` gives them, in float64."""
    return model.denoise(text, positions).double().softmax(-1).max(-1)


def one_by_one(model: MaskedDenoiser, prompt: list[int], room: int, length: int) -> list[int]:
    """The answer in blocks of this length, the most confident position of a block in each forward, up to the block that
    contains an end token.
    """
    answer: list[int | None] = [None] * room
    for start in range(0, room, length):
        block = range(start, min(start + length, room))
        while masked := [position for position in block if answer[position] is None]:
            best = proposed(model, [*prompt, *answer], [len(prompt) + position for position in masked])
            first = int(torch.argmax(best.values))
            answer[masked[first]] = int(best.indices[first])
        if model.end_ids & set(answer[start:block.stop]):
            break
    return [token for token in answer if token is not None]
