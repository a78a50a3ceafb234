"""Speculative lanes run to their end, and models for tests of drafters."""
from __future__ import annotations

import torch
from pairs import pair
from tables import TableModel

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.trace import metrics


def recorded(
    config: LaneConfig,
    memory: Memory | None = None,
    prompt: str = "The green bird",
    length: int = 24,
    models: Models | None = None,
    **more,
):
    """A session that has run to its end, and its events."""
    session = prepare(models or pair(), [config], Prompt(prompt, **more), Limits(0, length), memory=memory)
    return session, [stamped.event for stamped in session]


def passes(session) -> int:
    return metrics(session.trace)["target_forwards"]


def letters(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def follows(answer: list[int], start: int, size: int = 26) -> TableModel:
    """A model that writes this answer after a prompt of `start` tokens, whatever was drafted."""
    return TableModel(
        "abcdefghijklmnopqrstuvwxyz"[:size],
        rule=lambda context: (
            torch.eye(size, dtype=torch.float64)[answer[min(len(context) - start, len(answer) - 1)]] * 50
        ),
    )


def constant(size: int = 3) -> TableModel:
    """A model whose distribution does not depend on the context."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    return TableModel("abc"[:size], rule=lambda context: logits[:size])


def recording_rejections(found: list):
    """A verifier that records its inputs and verdicts."""
    class Recording(find("rejection")):
        def judge(self, lm, tree, rows):
            found.append((tree, super().judge(lm, tree, rows)))
            return found[-1][1]

        def __deepcopy__(self, memo):
            return self

    return Recording()
