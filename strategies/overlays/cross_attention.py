"""Where a decoder reads in what its encoder has read."""
from __future__ import annotations

import torch
from torch import Tensor

from playground.algorithms.overlays.token_figures import SHOWN, bars, by_token, shaded
from playground.contract import ReadsSource, knob
from playground.events import Note

NAMED = 3  # source tokens on a card


class CrossAttentionView(ReadsSource):
    """Show which tokens of the prompt the decoder of an encoder-decoder model read for each token it wrote.
    No bundled model is one.

    The matrix has a row for each source token and a column for each token of the answer, the bars what each source
    token received in all: what was used and what was ignored. A token is painted by its largest weight, of the row that
    predicted it. Mean over the heads of one layer, or of all. Weights say where values were read, not why a token was
    chosen: they correlate. The view is ours; the models are those that Encoder-Decoder Gemma, Zhang et al. 2025,
    arXiv 2504.06225, and Return of the Encoder, Elfeki et al. 2025, arXiv 2501.16273, argue for.
    """

    name, title, paper, sheet = "cross_attention", "Cross-attention", "2504.06225", "weights/encoder-decoder"
    reconstruction = True

    layer: int = knob(-1, -1, 128, step=1, help="decoder layer, from 0; -1 is the mean of all")

    _text = None

    def begin(self, text, model):
        self._text, self._layers = text, []

    def read_source(self, layer, weights):
        self._layers.append(weights.mean(0).cpu())

    def draw(self):
        if self._text is None or self._text.generated < 1:
            return
        weights = self.read()
        source = [self._text.piece(token) for token in self._text.tokens[:weights.shape[1]]]
        pieces, received = self._text.pieces(), weights.sum(0)
        yield shaded("largest weight on a token of the prompt", weights.amax(1).tolist(),
                     [read_most(row, source) for row in weights])
        most = sorted(received.topk(min(SHOWN, len(source))).indices.tolist())
        yield by_token("cross-attention", [source[at] for at in most], pieces, weights.T[most].tolist())
        yield bars("attention received in all", [source[at] for at in most], received[most].tolist())
        ignored = int((received < received.sum() / len(source) / 10).sum())
        yield Note(f"Of {len(source)} tokens of the prompt, {ignored} received less than a tenth of an even share of "
                   "the cross-attention.")

    def read(self) -> Tensor:
        """The weights [generated, source] of the rows that predicted the generated tokens, mean over the heads."""
        layers = self._layers if self.layer < 0 else self._layers[:self.layer + 1][-1:]
        return torch.stack(layers).mean(0)[-self._text.generated - 1:-1]


def read_most(row: Tensor, source: list[str]) -> str:
    """What a row [source] read most, in words."""
    best = row.topk(min(NAMED, len(source)))
    return "read " + ", ".join(f"{source[at]!r} {weight:.2f}" for weight, at in zip(*map(Tensor.tolist, best)))
