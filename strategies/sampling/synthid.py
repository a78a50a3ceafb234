"""The tournament watermark of SynthID."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.watermarks import (
    context_of,
    g_values,
    is_repeated,
    tournament,
    tournament_detector,
)
from playground.contract import Sampler, knob
from playground.errors import Refusal
from playground.events import Event, Figure

SIGNIFICANT = 4.0
KEYS = "654 400 836 123 340 443 597 160 57"  # those of the transformers library's example
MOST = 64


class SynthID(Sampler):
    """Watermark a text by a tournament: many tokens are sampled from the model and compete by coin flips, and the
    winner is chosen.

    The flips follow from a hash of the token, of the tokens before it and of a key for each layer; two tokens compete
    in a match, and the larger flip wins. This is computed as a change of the probabilities. Averaged over all keys it
    leaves the distribution unchanged, unlike a green list. A detector that knows the keys computes the mean flip of the
    text, 0.5 without a watermark. After a context that occurred before in the text nothing is changed. It makes
    machine-generated text recognisable without loss of quality. Without keys nothing changes. Tokens are always
    sampled. Dathathri et al. 2024 (Nature 634), with the hash of the transformers library.
    """

    name, title, paper, sheet, rank = (
        "synthid", "Watermark: SynthID", "Dathathri et al. 2024", "sampling/watermarks", 96
    )
    guarantee = ("collapses",)

    width: int = knob(4, 1, 12, step=1, help="number of previous tokens that the coin flips of a token depend on")
    keys: str = knob(KEYS, help="secret keys, one for each layer of the tournament, separated by spaces")

    _detector = None

    def check(self):
        self._keys()

    def _keys(self) -> list[int]:
        words = self.keys.split()
        if len(words) > MOST or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
            raise Refusal(
                f"keys must be at most {MOST} whole numbers of up to nine digits, separated by spaces: {KEYS}.", "keys"
            )
        return list(map(int, words))

    def apply(self, scores, histories):
        keys = self._keys()
        if not keys:
            return scores
        return torch.stack([self._marked(row, history[self.start:], keys) for row, history in zip(scores, histories)])

    def _marked(self, row: torch.Tensor, written: list[int], keys: list[int]) -> torch.Tensor:
        if is_repeated(written, self.width):
            return row
        g = g_values(context_of(written, self.width), torch.arange(len(row)), keys)
        return tournament(row.softmax(-1), g.to(row.device)).log()

    def explain(self, scores, history, token) -> Iterator[Event]:
        keys = self._keys()
        if not keys:
            return
        if self._detector is None:
            self._detector = tournament_detector(self.width, keys)
        seen = self._detector.read([*history[self.start:], token])
        place, value = len(history) - self.start, seen.values[-1]
        if value is not None:
            span = [place, place + 1, f"{value:.2f}", value]
            yield Figure("spans", "won coin flips", {"spans": [span], "shades": True})
        series = {"x": place, "series": {"z-score": seen.z}, "lines": {"threshold": SIGNIFICANT}}
        yield Figure("scalar", "watermark", series)
