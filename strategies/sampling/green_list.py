"""The green-list watermark."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.watermarks import green_detector, green_mask
from playground.contract import Sampler, knob
from playground.events import Event, Figure

SIGNIFICANT = 4.0  # the paper's threshold: one text in 30,000 without a watermark reaches it


class GreenList(Sampler):
    """Watermark a text: for each token, a hash of the previous one selects a green part of the vocabulary, whose tokens
    are favoured.

    A share gamma of all tokens is green, and delta is added to their scores, after all other samplers. A detector that
    knows the key counts the green tokens, each pair of tokens once: without a watermark a share gamma is green, and the
    z-score is the excess in standard deviations. It makes machine-generated text recognisable, even an excerpt. At low
    entropy there is little choice of tokens, so the watermark is weak. delta = 0 changes nothing. The choice stays
    argmax unless another sampler draws. Kirchenbauer et al. 2023, arXiv 2301.10226, algorithm 2, with the hash of the
    transformers library.
    """

    name, title, paper, sheet, rank = "green_list", "Watermark: green list", "2301.10226", "sampling/watermarks", 95
    draws, guarantee = False, ("collapses",)

    gamma: float = knob(0.25, 0.05, 0.95, step=0.05, help="share of the vocabulary that is green")
    delta: float = knob(2.0, 0.0, 10.0, step=0.1, help="added to the scores of green tokens; 0 changes nothing")
    key: int = knob(15485863, 1, 2**31 - 1, step=1, help="secret key of the hash; the detector needs the same one")

    _detector = None

    def apply(self, scores, histories):
        if not self.delta:
            return scores
        green = [self._green(history, scores.shape[-1]) for history in histories]
        return scores + self.delta * torch.stack(green).to(scores)

    def _green(self, history: list[int], size: int) -> torch.Tensor:
        return green_mask(history[-1], size, self.gamma, self.key) if history else torch.zeros(size, dtype=torch.bool)

    def explain(self, scores, history, token) -> Iterator[Event]:
        if self._detector is None:
            self._detector = green_detector(len(scores), self.gamma, self.key)
        seen = self._detector.read([*history[self.start:], token])
        place = len(history) - self.start
        if seen.values[-1] is not None:
            span = [place, place + 1, "green" if seen.values[-1] else "not green", seen.values[-1]]
            yield Figure("spans", "green tokens", {"spans": [span], "shades": True})
        series = {"x": place, "series": {"z-score": seen.z}, "lines": {"threshold": SIGNIFICANT}}
        yield Figure("scalar", "watermark", series)
