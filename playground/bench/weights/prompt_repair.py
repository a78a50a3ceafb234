"""What learnt prompts give a compressed lane: losses, divergence and scores, beside the same for the loaded model."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from playground.bench.survey.survey import Entrant, survey
from playground.bench.weights.repair_report import NONE, OTHER, OWN, WAYS
from playground.contract import CachePolicy, make
from playground.contract.lane_config import LaneConfig
from playground.decoding import fitted_weights
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.errors import Refusal
from playground.questions.questions import ask
from playground.questions.world import TASKS
from playground.questions.world.show import items
from playground.training.calibration import answered

STRATEGY = "idp"
TOKENS = 330  # of an answer at most


class AskedText(NamedTuple):
    """A question and its known answer as token ids."""

    asked: list[int]
    answer: list[int]


def held_out_texts(model: Model, each: int) -> list[AskedText]:
    """Questions of every task, in wordings that nothing was trained on; those that the context cannot hold are left
    out.
    """
    found = []
    for item in (item for task in TASKS for item in items(task, each, 1, held_out=True)):
        asked = model.tokens.encode_chat(item.prompt, before=item.before)
        ids = answered(model.tokens, item)
        if len(asked) < len(ids) <= model.context:
            found.append(AskedText(asked, ids[len(asked):]))
    return found


def prompts_of(model: Model) -> dict[str, Tensor]:
    """The prompts that were trained for a model; raises Refusal if there are none."""
    found = fitted_weights.stored(STRATEGY, {"target": model})
    if found is None:
        way = f" --quantization {model.quantization}" if model.quantization != "none" else ""
        raise Refusal(f"There are no prompts for {model.name} in the weights {model.quantization}: run `python -m "
                      f"playground fit {STRATEGY}{way}`.", "only")
    return found


def policy_for(model: Model, prompts: dict[str, Tensor], **knobs: Any) -> CachePolicy:
    """IDP with these prompts, ready to read texts with the model."""
    policy = make(STRATEGY, **knobs)
    policy.begin_fitted(prompts)
    policy.begin(model.parts)  # type: ignore[attr-defined]
    return policy


def logits_of(model: Model, policy: CachePolicy | None, text: AskedText) -> Tensor:
    """Logits [n, V] after each token but the last of a text. A prompt is chosen while the question is read."""
    store, rows = model.new_store(), []
    if policy:
        store.memory = copy(policy).attend_memory  # type: ignore[attr-defined]
    for ids in (text.asked, text.answer):
        (found,), _ = model.forward([ForwardInput(store, ids, list(range(-1, len(ids) - 1)))])
        store.commit(len(ids) - 1)
        rows.append(found.float())
    return torch.cat(rows)[:-1]


@torch.inference_mode()
def losses(model: Model, policy: CachePolicy | None, texts: Sequence[AskedText], originals: Sequence[Tensor]
           ) -> dict[str, float]:
    """Mean loss of the tokens of questions and of answers, and KL(original || model) over answers, in nats per token.

    originals: logits of the loaded model for the same texts.
    """
    found = defaultdict(list)
    for text, original in zip(texts, originals):
        logits, first = logits_of(model, policy, text), len(text.asked) - 1
        each = cross_entropy(logits, torch.tensor([*text.asked, *text.answer][1:], device=logits.device),
                             reduction="none")
        found["questions"] += each[:first].tolist()
        found["answers"] += each[first:].tolist()
        divergences = kl_div(logits.log_softmax(-1), original.log_softmax(-1), reduction="none", log_target=True)
        found["KL"] += divergences.sum(-1)[first:].tolist()
    return {name: fmean(values) for name, values in found.items()}


def scores(model: Model, extras: list[tuple[str, dict[str, Any]]], each: int) -> dict[str, float]:
    """Mean score of a greedy lane by task, 0 to 1, over held-out questions."""
    entrant = Entrant("lane", LaneConfig("greedy", {}, extras))
    questions = [question for task in TASKS for question in ask(task, each, 1)]
    found = defaultdict(list)
    for answer in survey(Models(model), [entrant], questions, 1, Limits(0, TOKENS), warm_up=False):
        if answer.score is not None:
            found[answer.question.task].append(answer.score)
    return {task: fmean(values) for task, values in found.items()}


def repaired(original: Model, changed: Sequence[Model], texts: Sequence[AskedText], each: int
             ) -> Iterator[dict[str, Any]]:
    """A row for each way of using prompts with the loaded model and with each of its compressed forms.

    each: questions of a task that lanes answer; 0 asks none.
    """
    pools = {model.quantization: prompts_of(model) for model in (original, *changed)}
    with torch.inference_mode():
        logits = [logits_of(original, None, text) for text in texts]
    for model in (original, *changed):
        for way, knobs in WAYS.items():
            if way == OTHER and model is original:
                continue
            prompts = pools[original.quantization if way == OTHER else model.quantization]
            policy = None if way == NONE else policy_for(model, prompts, **knobs)
            row = {"weights": model.quantization, "prompts": way, **losses(model, policy, texts, logits)}
            if each and way in (NONE, OWN):
                row["scores"] = scores(model, [] if way == NONE else [(STRATEGY, knobs)], each)
            yield row
