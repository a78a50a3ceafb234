"""Presence penalty."""
import torch

from playground.algorithms.sampling.repetition import occurrences, stretch
from playground.contract import Sampler, knob


class PresencePenalty(Sampler):
    """Make every token that occurred less likely, by the same amount however often it did: a push towards new words.

    What counts is what was written; the prompt only where asked for, and only the last tokens where there is a window.
    A negative penalty keeps to the words it has, 0 changes nothing. The choice stays argmax unless another sampler
    draws. A baseline, as the chat interface of OpenAI defines it.
    """

    name, title, paper, sheet = "presence_penalty", "Presence penalty", "baseline", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 4, False
    guarantee = ("collapses",)

    penalty: float = knob(
        0.5, -2.0, 2.0, step=0.1, help="what a token's score loses once it has occurred; 0 changes nothing"
    )
    window: int = knob(0, 0, 1024, step=1, help="last tokens that are looked at; 0 looks at all")
    prompt: bool = knob(False, help="look at the tokens of the prompt too")

    def apply(self, scores, histories):
        start, size = 0 if self.prompt else self.start, scores.shape[-1]
        seen = [occurrences(stretch(history, start, self.window), size) > 0 for history in histories]
        return scores - self.penalty * torch.stack(seen).to(scores)
