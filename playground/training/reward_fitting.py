"""Fits the reward models of the searches to a target, on its own answers to questions of the small world.

The answers are sampled, and graded by the known answers.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from playground.algorithms.search.reward_head import GradedAnswer
from playground.engine.checkpoint.catalogue import made_models
from playground.engine.checkpoint.hub_files import Progress
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Note
from playground.training.draft_rollouts import Sampling, answers, read
from playground.training.fitting import Fitting, finish

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract import Strategy
    from playground.questions.world import Item

SOURCES = {"arithmetic": 600, "facts": 200, "context_qa": 200, "lists": 300}  # questions per task; answers are short
QUESTIONS = 264  # of these, in random order, are asked
SAMPLES = 4  # answers to each question
ROOM = 110  # maximum number of generated tokens
TOGETHER = 48  # texts in one forward
FEWEST = 40  # right answers, and wrong ones


def fit_rewards(cls: type[Strategy], fitting: Fitting) -> dict[str, Tensor]:
    """Sample answers of the target at temperature 1, grade them, and train the reward models; returns the weights.

    The answers are kept in a file, so an interrupted run goes on where it stopped. Raises Refusal if the model cannot
    answer, or if nearly all answers are right, or wrong.
    """
    model, progress = fitting.model, fitting.progress
    if model.fills:
        raise Refusal(
            f"{model.name} is a diffusion model and does not generate from left to right: choose an autoregressive "
            "model.",
            "model",
        )
    asked = questions(fitting.seed)
    prompts = [_encoded(model, item) for item in asked]
    written = list(_written(model, prompts, fitting.seed, progress))
    graded = []
    for number, (question, tokens) in enumerate(written):
        progress(number / len(written), f"Reading answer {number + 1} of {len(written)}")
        if (answer := _graded(model, question, asked[question], prompts[question], tokens)) is not None:
            graded.append(answer)
    _check(model, graded)
    right = sum(answer.grade == 1 for answer in graded)
    fitting.watch(Note(f"{len(graded)} answers of {model.name} to {len(asked)} questions, {right} of them right."))
    return finish(cls.train_on_grades(graded, fitting.seed), fitting.watch)


def questions(seed: int) -> list[Item]:
    """Training questions of the small world in random order."""
    from playground.questions.world.show import items
    asked = [item for task, count in SOURCES.items() for item in items(task, count, seed)]
    Random(seed).shuffle(asked)
    return asked[:QUESTIONS]


def _encoded(model: Model, item: Item) -> list[int]:
    tokens = model.tokens
    if not tokens.tokenizer.chat_template:
        return tokens.encode(item.prompt)
    return tokens.encode_chat(item.prompt, before=item.before)


def _written(model: Model, prompts: list[list[int]], seed: int, progress: Progress) -> Iterator[tuple[int, list[int]]]:
    """Answers with the number of their question; those of an earlier run come from the file."""
    about = repr((model.name, model.revision, model.quantization, str(model.dtype), prompts, ROOM, SAMPLES, seed))
    path = made_models().parent / "fitted" / f"answers-{blake2b(about.encode(), digest_size=8).hexdigest()}.jsonl"
    order = [question for question in range(len(prompts)) for _ in range(SAMPLES)]
    known = _known(path, len(order))
    yield from known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for start in range(len(known), len(order), TOGETHER):
                progress(start / len(order), f"The target writes answer {start + 1} of {len(order)}")
                part = order[start:start + TOGETHER]
                found = answers(model, [prompts[question] for question in part], ROOM, Sampling(seed + start))
                file.writelines(json.dumps(pair) + "\n" for pair in zip(part, found))
                file.flush()
                yield from zip(part, found)
    except OSError as reason:
        raise Refusal(
            f"{path} cannot be written ({reason}): free some space, or set PLAYGROUND_HOME to another folder.", "out"
        ) from None


def _known(path: Path, count: int) -> list[tuple[int, list[int]]]:
    """The answers of the whole batches in the file, `count` at most; what follows was cut off, and is removed."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    whole = [line for line in lines if line.endswith("\n")]
    kept = whole if len(whole) == count else whole[:len(whole) // TOGETHER * TOGETHER]
    if len(kept) < len(lines):
        path.write_text("".join(kept), encoding="utf-8")
    return [tuple(json.loads(line)) for line in kept]


@torch.inference_mode()
def _graded(model: Model, question: int, item: Item, prompt: list[int], tokens: list[int]) -> GradedAnswer | None:
    """One answer with its states and its grade; None for an empty one. A truncated one is graded as it is."""
    from playground.questions.world import score
    text = tokens[:-1] if tokens[-1] in model.end_ids else tokens
    if not text:
        return None
    grade = float(score(item, model.tokens.decode(text, after=prompt)))
    logits, states = read(model, prompt + tokens)
    first = len(prompt) - 1
    rows = logits[first:first + len(tokens)].float().log_softmax(-1)
    logp = float(rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None]).mean())
    return GradedAnswer(question, states[len(prompt):len(prompt) + len(text)].half().cpu().clone(), logp, grade)


def _check(model: Model, graded: list[GradedAnswer]) -> None:
    right = sum(answer.grade == 1 for answer in graded)
    if min(right, len(graded) - right) < FEWEST:
        raise Refusal(
            f"{right} of {len(graded)} answers of {model.name} to questions of the small world are right: a reward "
            "model learns from right and wrong ones. Choose another model.",
            "model",
        )
