"""Texts that a target wrote itself: training data for draft heads, which have to predict this model's tokens.

Every second answer is sampled, the others are greedy, because both ways of decoding are drafted for. The texts are
written once for a model and kept in a file; an interrupted run goes on where it stopped. Source: self-distillation as
in Cai et al. 2024, arXiv 2401.10774.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from playground.engine.cache.kv_cache import KVCache
from playground.engine.checkpoint.catalogue import made_models
from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.errors import Refusal
from playground.training.draft_rollouts import Sampling, openings, world_prompts

EACH = 200  # questions per task of the small world
ROOM = 128  # maximum number of generated tokens
TOGETHER = 48  # texts in one forward


class TargetText(NamedTuple):
    """A prompt and the target's answer, as token ids."""

    tokens: list[int]
    start: int  # tokens of the prompt


class Unfinished(NamedTuple):
    """An answer that is being written."""

    number: int
    store: KVCache
    unread: list[int]
    answer: list[int]


def target_texts(model: Model, texts: list[str], seed: int, progress: Progress = unseen) -> list[TargetText]:
    """The target's answers to prompts: the beginnings of the texts, or questions of the small world if there are none.

    Raises Refusal if the model does not write from left to right, or if the file of the texts cannot be written.
    """
    if model.fills:
        raise Refusal(
            f"{model.name} is a diffusion model and does not generate from left to right: choose an autoregressive "
            "model.",
            "model",
        )
    room = min(ROOM, model.context // 2)
    prompts = openings(model, texts) if texts else world_prompts(model, seed, EACH)
    prompts = [ids for ids in prompts if 0 < len(ids) <= model.context - room]
    path = _path(model, prompts, room, seed)
    known = _read(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for number, answer in _answers(model, prompts, room, seed, set(known)):
                known[number] = answer
                file.write(json.dumps([number, answer]) + "\n")
                progress(len(known) / len(prompts), f"The target writes text {len(known)} of {len(prompts)}")
    except OSError as reason:
        raise Refusal(
            f"{path} cannot be written ({reason}): free some space, or set PLAYGROUND_HOME to another folder.", "out"
        ) from None
    return [TargetText(ids + known[number], len(ids)) for number, ids in enumerate(prompts)]


def _path(model: Model, prompts: list[list[int]], room: int, seed: int) -> Path:
    """The file of the answers, named after everything they depend on."""
    about = repr((model.name, model.revision, model.quantization, str(model.dtype), prompts, room, seed))
    digest = blake2b(about.encode(), digest_size=8).hexdigest()
    return made_models().parent / "fitted" / f"texts-{digest}.jsonl"


def _read(path: Path) -> dict[int, list[int]]:
    """Answers by the number of their prompt. A last line that was cut off is dropped."""
    known = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    for line in lines:
        if not line.endswith("\n"):
            path.write_text("".join(lines[:-1]), encoding="utf-8")
            break
        number, answer = json.loads(line)
        known[number] = answer
    return known


def _answers(
    model: Model, prompts: list[list[int]], room: int, seed: int, known: set[int]
) -> Iterator[tuple[int, list[int]]]:
    """Answers to the prompts that have none yet, with their numbers, in the order in which they end.

    Each answer has random numbers of its own, so that it does not depend on where an earlier run stopped.
    """
    waiting = [number for number in range(len(prompts)) if number not in known][::-1]
    rules = {number: Sampling(seed * len(prompts) + number, bool(number % 2)) for number in waiting}
    active: list[Unfinished] = []
    while waiting or active:
        while waiting and len(active) < TOGETHER:
            number = waiting.pop()
            active.append(Unfinished(number, model.new_store(), list(prompts[number]), []))
        _extend(model, active, rules)
        for text in active:
            if text.answer[-1] in model.end_ids or len(text.answer) == room:
                yield text.number, text.answer
        active = [text for text in active if text.answer[-1] not in model.end_ids and len(text.answer) < room]


def _extend(model: Model, active: list[Unfinished], rules: dict[int, Sampling]) -> None:
    """Add one token to every text, in one forward."""
    works = [
        ForwardInput(text.store, text.unread, list(range(-1, len(text.unread) - 1)), last_only=True) for text in active
    ]
    for text, row in zip(active, model.forward(works)[0]):
        rule = rules[text.number]
        token = int(rule.draw(rule.probabilities(row))[0]) if rule.sampled else int(row[-1].argmax())
        text.store.commit(len(text.unread) - 1)
        text.unread[:] = [token]
        text.answer.append(token)
