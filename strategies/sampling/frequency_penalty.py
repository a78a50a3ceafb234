"""Frequency penalty."""
import torch

from playground.algorithms.sampling.repetition import occurrences, stretch
from playground.contract import Sampler, knob


class FrequencyPenalty(Sampler):
    """Make a token less likely each time it occurs: its score falls by the penalty times the number of its places.

    What is counted is what was written; the prompt only where asked for, and only the last tokens where there is a
    window. A negative penalty invites repetition, 0 changes nothing. The choice stays argmax unless another sampler
    draws. A baseline, as the chat interface of OpenAI defines it.
    """

    name, title, paper, sheet = "frequency_penalty", "Frequency penalty", "baseline", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 3, False
    guarantee = ("collapses",)

    penalty: float = knob(
        0.5, -2.0, 2.0, step=0.1, help="what a token's score loses each time it occurs; 0 changes nothing"
    )
    window: int = knob(0, 0, 1024, step=1, help="last tokens that are counted; 0 counts all")
    prompt: bool = knob(False, help="count the tokens of the prompt too")

    def apply(self, scores, histories):
        start, size = 0 if self.prompt else self.start, scores.shape[-1]
        counts = [occurrences(stretch(history, start, self.window), size) for history in histories]
        return scores - self.penalty * torch.stack(counts).to(scores)
