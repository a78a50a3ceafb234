"""What a draft model guesses of texts its target writes, and whether it would stand: what a strategy may learn from, in
numbers.

The target answers prompts by its own law. At every place of an answer the draft draws one guess, which stands with the
chance min(1, p / q). Then the draft reads the answer again with most of its words replaced by those guesses, for in use
it will stand on guesses of its own. Huang et al. 2024, arXiv 2405.19715. Where nothing is left to chance, p and q are
all on their best tokens.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.speculative.acceptance_head import Guesses
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.hub_files import Progress, unseen
from playground.engine.model import Model
from playground.engine.sampling import greedy
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.decoding.session import Models

EACH = 40  # questions of each task of the small world
OPENING = 48  # tokens of a text that the target goes on from
ROOM = 96  # tokens it writes at most
TOGETHER = 32  # texts that grow in one forward
MIXED = 0.15  # share of the target's own words in what the draft reads again


def world_prompts(model: Model, seed: int, each: int = EACH) -> list[list[int]]:
    """Questions of the small world as token ids, in the model's chat form where it has one, in any order; none that is
    held out.
    """
    from playground.pocket.world import TASKS
    from playground.pocket.world.show import items
    asked = [item for task in TASKS for item in items(task, each, seed)]
    Random(seed).shuffle(asked)
    if not model.tokens.tokenizer.chat_template:
        return [model.tokens.encode(item.prompt) for item in asked]
    return [model.tokens.encode_chat(item.prompt, before=item.before) for item in asked]


def openings(model: Model, texts: Iterable[str]) -> list[list[int]]:
    """The beginning of every stretch of the texts that is as long as what is read and written of it, as token ids."""
    read = (model.tokens.encode(text) for text in texts)
    length = min(OPENING, model.context // 4)
    return [
        ids[start : start + length]
        for ids in read
        for start in range(0, max(1, len(ids) - length), length + ROOM)
        if ids
    ]


@dataclass
class Chance:
    """Draws for texts that grow without a lane, from one seed; `drawn` is False where the best token is taken in place
    of a draw.
    """

    seed: int = 0
    drawn: bool = True

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def law(self, logits: Tensor) -> Tensor:
        """What tokens are drawn from, [n, V]."""
        return (logits if self.drawn else greedy(logits)).softmax(-1).cpu()

    def draw(self, p: Tensor) -> Tensor:
        """A token of each row of p [n, V], [n]."""
        return p.multinomial(1, generator=self.generator)[:, 0]

    def flips(self, share: float, count: int) -> Tensor:
        """Which of so many things happen, each with this chance, [count]."""
        return torch.rand(count, generator=self.generator) < share


def guesses(models: Models, prompts: list[list[int]], chance: Chance, progress: Progress = unseen) -> Iterator[Guesses]:
    """The guesses in an answer to each prompt, in their order. Raises Refusal where there is no draft, or one that
    reads other tokens.
    """
    _check(models)
    context = min(models.target.context, models.draft.context)
    room = min(ROOM, context // 2)
    fitting = [ids for ids in prompts if len(ids) <= context - room]
    for start in range(0, len(fitting), TOGETHER):
        progress(start / len(fitting), f"Text {start + 1} of {len(fitting)}")
        part = fitting[start:start + TOGETHER]
        for prompt, said in zip(part, answers(models.target, part, room, chance)):
            yield guessed(models, prompt, said, chance)


def _check(models: Models) -> None:
    if models.draft is None:
        raise Refusal(
            f"Guesses are a draft model's, and {models.target.name} has none: name one with --draft.", "draft"
        )
    if models.differences:
        raise Refusal(
            f"The draft model has another vocabulary ({models.differences}): choose a draft of the same model family.",
            "draft",
        )
    if models.target.fills:
        raise Refusal(
            f"{models.target.name} fills a canvas and does not write from left to right: choose a language model.",
            "model",
        )


def answers(model: Model, prompts: list[list[int]], room: int, chance: Chance) -> list[list[int]]:
    """What a model says after each prompt, drawn from its own law: at most `room` tokens, its end token included."""
    said = [[] for _ in prompts]
    growing = [(model.new_store(), list(prompt), words) for prompt, words in zip(prompts, said)]
    while growing:
        rows, _ = model.forward(
            [ForwardInput(store, unread, _chain(unread), last_only=True) for store, unread, _ in growing]
        )
        drawn = chance.draw(chance.law(torch.cat(rows))).tolist()
        for (store, unread, words), token in zip(growing, drawn):
            store.keep(len(unread) - 1)
            unread[:] = [token]
            words.append(token)
        growing = [text for text in growing if text[2][-1] not in model.end_ids and len(text[2]) < room]
    return said


def guessed(models: Models, prompt: list[int], said: list[int], chance: Chance, mixed: float = MIXED) -> Guesses:
    """One guess of the draft at every place of an answer, where its state is known: where the guess was fed, not the
    target's word.
    """
    vocabulary = min(models.target.vocabulary, models.draft.vocabulary)
    p, q = (
        chance.law(read(model, prompt + said)[0][len(prompt) - 1 : -1, :vocabulary])
        for model in (models.target, models.draft)
    )
    drawn = chance.draw(q)
    fed = torch.where(chance.flips(mixed, len(said)), torch.tensor(said), drawn)
    states = read(models.draft, prompt + fed.tolist())[1][len(prompt):].cpu()
    places = fed == drawn
    return Guesses(states[places], (p / q).gather(1, drawn[:, None])[places, 0].clamp(max=1))


def read(model: Model, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [n, V] after each token, and what the head read there, [n, width]; ordinary tensors, so that one can learn
    from them.
    """
    (logits,), captured = model.forward(
        [ForwardInput(model.new_store(), ids, _chain(ids))], LayerPlan(capture=frozenset([model.depth]))
    )
    return logits.clone(), model.normed(captured[model.depth]).clone()


def _chain(ids: list[int]) -> list[int]:
    return list(range(-1, len(ids) - 1))
