"""Repetition penalty."""
import torch

from playground.algorithms.sampling.repetition import last_tokens
from playground.contract import Sampler, knob
from playground.engine import sampling


class RepetitionPenalty(Sampler):
    """Lower the score of every token that occurred before, prompt included, once, however often it occurred.

    Positive scores are divided by the penalty, negative ones multiplied, before temperature. At 1 nothing changes. A
    `window` limits it to the last tokens, as in llama.cpp. The choice stays argmax unless another sampler draws. Keskar
    et al. 2019, arXiv 1909.05858.
    """

    name, title, paper, sheet = "repetition_penalty", "Repetition penalty", "1909.05858", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 1, False
    guarantee = ("collapses",)

    penalty: float = knob(1.15, 0.8, 2.0, step=0.05, help="above 1 makes tokens seen before less likely")
    window: int = knob(0, 0, 4096, step=1, help="last tokens that are considered; 0: all")

    def apply(self, scores, histories):
        if self.penalty == 1:
            return scores
        recent = (last_tokens(history, 0, self.window) for history in histories)
        return torch.stack(
            [sampling.repetition_penalty(row, tokens, self.penalty) for row, tokens in zip(scores, recent)]
        )
