"""Rollouts of a draft model on texts of its target: training data for strategies that predict acceptance.

The target samples answers to prompts. At every position of an answer the draft samples one draft token, which is
accepted with probability min(1, p / q). Then the draft reads the answer again with most tokens replaced by its own
draft tokens, because in use its context contains draft tokens as well. Huang et al. 2024, arXiv 2405.19715. With greedy
decoding, p and q have all mass on their best tokens.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.speculative.acceptance_head import DraftSamples
from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.engine.sampling import greedy
from playground.errors import Refusal
from playground.training.checkpoint import Checkpoint

if TYPE_CHECKING:
    from playground.decoding.models import Models

EACH = 40  # questions per task of the small world
OPENING = 48  # prompt tokens taken from a text
ROOM = 96  # maximum number of generated tokens
TOGETHER = 32  # texts in one forward
MIXED = 0.15  # share of the target's tokens that are not replaced when the draft reads the answer again


def world_prompts(model: Model, seed: int, each: int = EACH) -> list[list[int]]:
    """Training questions of the small world in random order, as token ids, with the model's chat template if any."""
    from playground.questions.world import TASKS
    from playground.questions.world.show import items
    asked = [item for task in TASKS for item in items(task, each, seed)]
    Random(seed).shuffle(asked)
    if not model.tokens.tokenizer.chat_template:
        return [model.tokens.encode(item.prompt) for item in asked]
    return [model.tokens.encode_chat(item.prompt, before=item.before) for item in asked]


def openings(model: Model, texts: Iterable[str]) -> list[list[int]]:
    """Prompts from the texts, as token ids: the first tokens of every chunk of prompt plus generated length."""
    read = (model.tokens.encode(text) for text in texts)
    length = min(OPENING, model.context // 4)
    return [
        ids[start : start + length]
        for ids in read
        for start in range(0, max(1, len(ids) - length), length + ROOM)
        if ids
    ]


@dataclass
class Sampling:
    """Seeded sampling for texts generated without a lane. With `sampled` False, decoding is greedy."""

    seed: int = 0
    sampled: bool = True

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities that tokens are sampled from, [n, V]."""
        return (logits if self.sampled else greedy(logits)).softmax(-1).cpu()

    def draw(self, p: Tensor) -> Tensor:
        """One token for each row of p [n, V], [n]."""
        return p.multinomial(1, generator=self.generator)[:, 0]

    def bernoulli(self, share: float, count: int) -> Tensor:
        """`count` independent Bernoulli samples with probability `share`, bool [count]."""
        return torch.rand(count, generator=self.generator) < share


def rollouts(
    models: Models, prompts: list[list[int]], sampling: Sampling, kept: Path, progress: Progress = unseen
) -> Iterator[DraftSamples]:
    """Draft tokens on an answer to each prompt, in the order of the prompts.

    Those of finished parts are read from files beside `kept`, and written there. Raises Refusal if there is no draft
    model, or if its vocabulary differs from the target's.
    """
    check_pair(models)
    context = min(models.target.context, models.draft.context)
    room = min(ROOM, context // 2)
    fitting = [ids for ids in prompts if len(ids) <= context - room]
    for start in range(0, len(fitting), TOGETHER):
        progress(start / len(fitting), f"Text {start + 1} of {len(fitting)}")
        part = fitting[start:start + TOGETHER]
        about = (models.target.revision, models.draft.revision, models.target.quantization, sampling.seed, part)
        place = kept.with_suffix(f".{'drawn' if sampling.sampled else 'best'}-{start}{kept.suffix}")
        yield from _of_part(models, part, room, sampling, Checkpoint(place, about))


def _of_part(
    models: Models, prompts: list[list[int]], room: int, sampling: Sampling, kept: Checkpoint
) -> list[DraftSamples]:
    """Rollouts of prompts in one batch, from the file if it has them; draws after them are the same either way."""
    if (saved := kept.read()) is None:
        made = [rollout(models, prompt, answer, sampling)
                for prompt, answer in zip(prompts, answers(models.target, prompts, room, sampling))]
        saved = {"samples": [tuple(each) for each in made], "generator": sampling.generator.get_state()}
        kept.write(saved)
    sampling.generator.set_state(saved["generator"])
    return [DraftSamples(*each) for each in saved["samples"]]


def check_pair(models: Models) -> None:
    """Raise Refusal if the models have no rollouts."""
    if models.draft is None:
        raise Refusal(
            f"This needs a draft model, and {models.target.name} has none: choose one with --draft.", "draft"
        )
    if models.differences:
        raise Refusal(
            f"The draft model has another vocabulary ({models.differences}): choose a draft of the same model family.",
            "draft",
        )
    if models.target.fills:
        raise Refusal(
            f"{models.target.name} is a diffusion model and does not generate from left to right: choose an "
            "autoregressive model.",
            "model",
        )


def answers(model: Model, prompts: list[list[int]], room: int, sampling: Sampling) -> list[list[int]]:
    """Sample a continuation of each prompt from the model: at most `room` tokens, the end token included."""
    answers = [[] for _ in prompts]
    active = [(model.new_store(), list(prompt), written) for prompt, written in zip(prompts, answers)]
    while active:
        rows, _ = model.forward(
            [ForwardInput(store, unread, _chain(unread), last_only=True) for store, unread, _ in active]
        )
        drawn = sampling.draw(sampling.probabilities(torch.cat(rows))).tolist()
        for (store, unread, written), token in zip(active, drawn):
            store.commit(len(unread) - 1)
            unread[:] = [token]
            written.append(token)
        active = [text for text in active if text[2][-1] not in model.end_ids and len(text[2]) < room]
    return answers


def rollout(
    models: Models, prompt: list[int], answer: list[int], sampling: Sampling, mixed: float = MIXED
) -> DraftSamples:
    """Draft tokens on one answer, at the positions where the draft then read its own token, not the target's."""
    vocabulary = min(models.target.vocabulary, models.draft.vocabulary)
    p, q = (
        sampling.probabilities(read(model, prompt + answer)[0][len(prompt) - 1 : -1, :vocabulary])
        for model in (models.target, models.draft)
    )
    drawn = sampling.draw(q)
    fed = torch.where(sampling.bernoulli(mixed, len(answer)), torch.tensor(answer), drawn)
    states = read(models.draft, prompt + fed.tolist())[1][len(prompt):].cpu()
    places = fed == drawn
    return DraftSamples(states[places], (p / q).gather(1, drawn[:, None])[places, 0].clamp(max=1))


def read(model: Model, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [n, V] after each token, and the inputs of the lm_head [n, width], cloned out of inference mode."""
    (logits,), captured = model.forward(
        [ForwardInput(model.new_store(), ids, _chain(ids))], LayerPlan(capture=frozenset([model.depth]))
    )
    return logits.clone(), model.normed(captured[model.depth]).clone()


def _chain(ids: list[int]) -> list[int]:
    return list(range(-1, len(ids) - 1))
