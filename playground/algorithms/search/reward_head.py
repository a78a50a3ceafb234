"""A small reward model and a process reward model on the hidden states of a target.

Both are networks with one hidden layer on the input of the target's lm_head. `outcome` is trained at the end of whole
answers, `process` after every token of an answer, with the grade of the whole answer as label: its value is an estimate
of the grade that the beginning leads to. Process labels by outcome: Cobbe et al. 2021, arXiv 2110.14168 (token-level
verifiers).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict, Sequential, SiLU
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from playground.events import Figure, Note

JUDGES = ("outcome", "process")
INNER = 64  # channels of the hidden layer
EPOCHS, BATCH, RATE, DECAY = 8, 32, 3e-3, 0.05  # BATCH: answers in one step
HELD_OUT = 8  # one question in this many is held out


class GradedAnswer(NamedTuple):
    """An answer of the target to a question with a known answer."""

    question: int  # number of the question; several answers share one
    states: Tensor  # inputs of the lm_head after each token of the answer but the end token, [n, hidden_size]
    logp: float  # mean log-probability of its tokens, in nats
    grade: float  # 0 to 1


class RewardHead(Module):
    """Both networks; each gives a logit for every hidden state."""

    def __init__(self, width: int):
        super().__init__()
        self.judges = ModuleDict(
            {judge: Sequential(Linear(width, INNER), SiLU(), Linear(INNER, 1)) for judge in JUDGES}
        )

    def forward(self, judge: str, states: Tensor) -> Tensor:
        """Logits [n] of hidden states [n, hidden_size]."""
        return self.judges[judge](states)[:, 0]

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> RewardHead:
        """The networks with these weights, in float32."""
        head = cls(weights[f"judges.{JUDGES[0]}.0.weight"].shape[1])
        head.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        return head.eval().requires_grad_(False)


def train_reward_head(answers: list[GradedAnswer], seed: int) -> Iterator[Figure | Note]:
    """Train both networks on answers to most questions and measure them on the others; returns float16 weights."""
    torch.manual_seed(seed)
    taught = [answer for answer in answers if answer.question % HELD_OUT]
    held_out = [answer for answer in answers if not answer.question % HELD_OUT]
    head = RewardHead(answers[0].states.shape[1])
    steps = EPOCHS * -(-len(taught) // BATCH)
    optimizer = torch.optim.AdamW(head.parameters(), RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(taught)).split(BATCH):
            optimizer.zero_grad()
            sum(_losses(head, [taught[i] for i in batch.tolist()]).values()).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            losses = {f"{judge}, held out": float(loss) for judge, loss in _losses(head, held_out).items()}
        yield Figure("scalar", "loss in nats", {"x": epoch + 1, "series": losses})
    yield Note(_measured(head.eval(), held_out))
    return {name: tensor.half() for name, tensor in head.state_dict().items()}


def _losses(head: RewardHead, answers: list[GradedAnswer]) -> dict[str, Tensor]:
    """Mean cross-entropy with the grades: of the last tokens, and of all tokens, in which every answer counts once."""
    counts = torch.tensor([len(answer.states) for answer in answers])
    grades = torch.tensor([answer.grade for answer in answers])
    states = torch.cat([answer.states for answer in answers]).float()
    ends = counts.cumsum(0) - 1
    whole = cross_entropy(head("outcome", states[ends]), grades)
    each = cross_entropy(head("process", states), grades.repeat_interleave(counts), reduction="none")
    return {"outcome": whole, "process": (each / counts.repeat_interleave(counts)).sum() / len(answers)}


@torch.no_grad()
def _measured(head: RewardHead, answers: list[GradedAnswer]) -> str:
    """How well scores separate right from wrong answers to questions that were held out."""
    right = torch.tensor([answer.grade == 1 for answer in answers])
    scores = {
        "outcome": torch.cat([head("outcome", answer.states[-1:].float()) for answer in answers]),
        "process at the end": torch.cat([head("process", answer.states[-1:].float()) for answer in answers]),
        "process halfway": torch.cat([head("process", middle(answer.states).float()) for answer in answers]),
        "mean log-probability": torch.tensor([answer.logp for answer in answers]),
    }
    figures = ", ".join(f"{name} {separation(found, right):.3f}" for name, found in scores.items())
    return (
        f"Held-out questions: {int(right.sum())} of {len(right)} answers are right. Area under the ROC curve (0.5 is "
        f"chance): {figures}."
    )


def middle(states: Tensor) -> Tensor:
    """The state in the middle of an answer, [1, hidden_size]."""
    return states[len(states) // 2][None]


def separation(scores: Tensor, right: Tensor) -> float:
    """Area under the ROC curve: the share of pairs of a right and a wrong answer in which the right one scores higher.

    Ties count half; NaN if all answers are right, or all wrong.
    """
    good, bad = scores[right][:, None], scores[~right][None]
    return float(((good > bad).double() + 0.5 * (good == bad).double()).mean())
