"""Presence penalty."""
import torch

from playground.algorithms.sampling.repetition import last_tokens, lowered
from playground.contract import Sampler, knob


class PresencePenalty(Sampler):
    """Lower the score of every token that occurred by the same penalty, however often it occurred.

    Occurrences are in the generated text, optionally including the prompt, or in its last `window` tokens. A negative
    penalty favours tokens that occurred, 0 changes nothing. The choice stays argmax unless another sampler draws. A
    baseline, as the chat interface of OpenAI defines it.
    """

    name, title, paper, sheet = "presence_penalty", "Presence penalty", "baseline", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 4, False
    guarantee = ("collapses",)

    penalty: float = knob(
        0.5, -2.0, 2.0, step=0.1, help="subtracted from the score of a token that occurred; 0 changes nothing"
    )
    window: int = knob(0, 0, 4096, step=1, help="last tokens that are considered; 0: all")
    prompt: bool = knob(False, help="also consider the tokens of the prompt")

    def apply(self, scores, histories):
        start = 0 if self.prompt else self.start
        seen = [dict.fromkeys(last_tokens(history, start, self.window), 1) for history in histories]
        return torch.stack([lowered(row, once, self.penalty) for row, once in zip(scores, seen)])
