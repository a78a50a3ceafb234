"""A length penalty that grows exponentially."""
from collections.abc import Iterator

import torch

from playground.contract import Sampler, knob
from playground.events import Event, Figure

MOST = 1e6  # added to a score: beside it, no other token has a chance


class ExponentialLengthPenalty(Sampler):
    """From a given length on, raise the score of the end tokens more with every token, until the text ends.

    After n further tokens the absolute value of the end's score, times factor to the power n minus 1, is added to it.
    With a factor just above 1 a text ends where an end is plausible; a large one ends it soon, wherever it is. Useful
    for answers of similar length. An end whose score is exactly 0, or which was removed, stays as it is. The choice
    stays argmax unless another sampler draws. factor = 1 changes nothing. A baseline, as
    `exponential_decay_length_penalty` of the transformers library.
    """

    name, title, paper = "exponential_length_penalty", "Exponential length penalty", "baseline"
    sheet, stage, rank, draws = "sampling/logit-processors", "penalty", 14, False
    guarantee = ("collapses",)

    start_at: int = knob(32, 0, 1024, step=1, help="tokens after which the end becomes more likely")
    factor: float = knob(1.05, 1.0, 2.0, step=0.01, help="growth per token; 1 changes nothing")

    def apply(self, scores, histories):
        beyond = [max(0, len(history) - self.start - self.start_at) for history in histories]
        ends = self._ends(scores.shape[-1])
        if not (any(beyond) and ends) or self.factor == 1:
            return scores
        raised = scores.clone()
        raised[:, ends] += self._bonus(scores[:, ends], torch.tensor(beyond, device=scores.device)[:, None])
        return raised

    def _ends(self, size: int) -> list[int]:
        return [end for end in self.end_ids if end < size]

    def _bonus(self, scores: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
        """What is added to scores [n, ends] after `beyond` [n, 1] tokens too many; 0 where there is no end to raise."""
        factor = torch.as_tensor(self.factor, dtype=scores.dtype, device=scores.device)
        return (scores.abs() * (factor ** beyond - 1)).nan_to_num(posinf=MOST).clamp(max=MOST).where(
            scores.isfinite(), torch.zeros_like(scores)
        )

    def explain(self, scores, history, token) -> Iterator[Event]:
        place, ends = len(history) - self.start, self._ends(len(scores))
        if place < self.start_at or not ends:
            return
        after = self.apply(scores[None], [history])[0]
        series = {name: float(row.softmax(-1)[ends].sum()) for name, row in (("before", scores), ("after", after))}
        yield Figure("scalar", "probability of the end", {"x": place, "series": series})
