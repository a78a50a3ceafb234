"""Frequency penalty."""
from collections import Counter

import torch

from playground.algorithms.sampling.repetition import last_tokens, lowered
from playground.contract import Sampler, knob


class FrequencyPenalty(Sampler):
    """Lower the score of a token by the penalty times the number of its occurrences.

    Counts are over the generated text, optionally including the prompt, or over its last `window` tokens. A negative
    penalty encourages repetition, 0 changes nothing. The choice stays argmax unless another sampler draws. A baseline,
    as the chat interface of OpenAI defines it.
    """

    name, title, paper, sheet = "frequency_penalty", "Frequency penalty", "baseline", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 3, False
    guarantee = ("collapses",)

    penalty: float = knob(
        0.5, -2.0, 2.0, step=0.1, help="subtracted from a token's score per occurrence; 0 changes nothing"
    )
    window: int = knob(0, 0, 4096, step=1, help="last tokens that are counted; 0: all")
    prompt: bool = knob(False, help="also count the tokens of the prompt")

    def apply(self, scores, histories):
        start = 0 if self.prompt else self.start
        counts = [Counter(last_tokens(history, start, self.window)) for history in histories]
        return torch.stack([lowered(row, count, self.penalty) for row, count in zip(scores, counts)])
