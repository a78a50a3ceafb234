"""CFSP: channels of the feed-forward networks that calibration texts hardly use are left out."""
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.engine.sampling import in_float64
from playground.events import Figure, Note

STEEPNESS = 1e4 / 131072  # the released divisor of the block importance, per calibration token
SHRUNK = 1.05  # released margin when a block would keep more than all of its channels


def kept_shares(importance: Tensor, tokens: int, ratio: float, contrast: float) -> Tensor:
    """Share of its channels that each block keeps, [layers]; their mean is 1 - ratio.

    `importance` [layers] is summed over so many calibration tokens.
    """
    if ratio == 0:
        return torch.ones(len(importance), dtype=torch.double)
    centred = importance.double() - importance.double().mean()
    weights = torch.sigmoid(contrast * centred / (STEEPNESS * tokens))
    mean, room = weights.mean(), 1 / (1 - ratio)
    if float(weights.amax() / mean) >= room:
        weights = mean + (weights - mean) * (mean * (room - 1)) / ((weights.amax() - mean) * SHRUNK)
    return weights / weights.mean() * (1 - ratio)


class NarrowedChoices(LayerChoices):
    """Every row runs the feed-forward networks with their remaining channels."""

    def __init__(self, parts: dict):
        self._parts = parts

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        part = self._parts.get(layer, full)
        return [SharedFeedForward(None, part)] if part is not None else []


class Measuring(LayerChoices):
    """Runs everything and sums what calibration needs, layer by layer."""

    def __init__(self, depth: int):
        self.turned = torch.zeros(depth, dtype=torch.double)  # angle between a block's input and output, summed
        self.squares: list[Tensor | float] = [0.0] * depth  # of the channels, summed over tokens, [k]
        self.tokens, self._input = 0, torch.empty(0)

    def attends(self, layer: int, hidden: Tensor) -> bool:
        self._input = hidden
        return True

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        return [SharedFeedForward(None, MeasuredFeedForward(full, self, layer))]

    def observe(self, layer: int, before: Tensor, after: Tensor) -> None:
        cosines = cosine_similarity(in_float64(self._input), in_float64(after), dim=-1).clamp(-1, 1)
        self.turned[layer] += float((cosines.arccos() / torch.pi).sum())
        self.tokens += len(after) if layer == 0 else 0


class MeasuredFeedForward:
    """A feed-forward network that adds the squares of its channels to a `Measuring`."""

    def __init__(self, part, sums: Measuring, layer: int):
        self._part, self._sums, self._layer, self.weights = part, sums, layer, part.weights

    def __call__(self, hidden: Tensor) -> Tensor:
        channels = self._part.activations(hidden)
        self._sums.squares[self._layer] = self._sums.squares[self._layer] + in_float64(channels).square().sum(0)
        return self._part(hidden)


class Cfsp(ComputePolicy):
    """Leave out the channels of the feed-forward networks (FFN) that calibration texts use least.

    `python -m playground fit cfsp` reads texts once. A block that turns its input more keeps more channels, and within
    a block those with the largest activations stay; `ratio` of all channels are left out, in every forward. Without
    such a fit, as many channels of every block are left out, those with the smallest output weights. Ratio 0 leaves
    out nothing. Of the released score only the activations remain, since its weight terms cancel; `score` product
    multiplies them by the norm of the output weights. The released divisor of the importance is scaled to the number
    of calibration tokens. Blocks keep channels in multiples of `multiple`, since every width needs code of its own on
    a CPU. There is no recovery training. Wang et al. 2024, arXiv 2409.13199.
    """

    name, title, paper, sheet = (
        "cfsp", "Fewer FFN channels (CFSP)", "2409.13199", "adaptive-compute/fwtw-ftp-cfsp"
    )
    guarantee = ("collapses",)
    prefers_trained = True

    ratio: float = knob(0.2, 0.0, 0.9, step=0.05, help="share of the FFN channels that is left out; 0 leaves out none")
    contrast: float = knob(1.0, 0.0, 4.0, step=0.25, help="how much more important blocks keep; 0: all keep alike")
    score: str = knob(
        "activation", choices=("activation", "product"), help="rank of a channel: its activation, or that times the "
        "norm of its output weights"
    )
    multiple: int = knob(32, 1, 128, step=1, help="channels are kept in multiples of this; 1 is exact, but slower")

    def begin(self, parts, weights):
        self._told, self._depth = bool(weights), parts.depth
        self.shares = self._shares(parts.depth, weights)
        self._parts = {layer: self._narrow(parts, layer, weights) for layer in range(parts.depth)} if self.ratio else {}

    def _shares(self, depth: int, weights) -> list[float]:
        if not weights:
            return [1 - self.ratio] * depth
        return kept_shares(weights["turned"], int(weights["tokens"]), self.ratio, self.contrast).tolist()

    def _narrow(self, parts, layer: int, weights):
        """The remaining part of an FFN; None if no channel remains."""
        norms = parts.output_norms(layer).float().cpu()
        scores = weights["activations"][layer] if weights else norms
        if weights and self.score == "product":
            scores = scores * norms
        count = self._count(self.shares[layer] * len(scores), len(scores))
        kept = scores.topk(count).indices.sort().values
        return parts.narrowed(layer, kept) if count else None

    def _count(self, wanted: float, most: int) -> int:
        """Channels to keep: rounded down if exact, and to the nearest multiple otherwise."""
        if self.multiple == 1:
            return int(wanted + 1e-9)
        return min(most, round(wanted / self.multiple) * self.multiple)

    def choices(self, positions, prompt):
        return NarrowedChoices(self._parts)

    def explain(self, choices, row, generated) -> Iterator:
        if not self._told:
            self._told = True
            yield Note("No calibration for this model: the channels with the smallest output weights are left out. "
                       "`python -m playground fit cfsp` measures which ones texts use.")
        if not generated:
            labels = [f"layer {layer}" for layer in range(self._depth)]
            data = {"labels": labels, "values": [round(share, 4) for share in self.shares]}
            yield Figure("bars", "share of each FFN's channels that is kept", data)

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Read the texts once; returns what each block turns, and how strongly each channel is active."""
        sums = Measuring(texts.parts.depth)
        for number, ids in enumerate(texts.texts, 1):
            texts.read(ids, sums)
            if number % 16 == 0 or number == len(texts.texts):
                series = {f"layer {layer}": float(turned) / sums.tokens for layer, turned in enumerate(sums.turned)}
                yield Figure("scalar", "mean turn of a block", {"x": sums.tokens, "series": series})
        return {
            "turned": sums.turned.float(),
            "tokens": torch.tensor(sums.tokens),
            "activations": torch.stack([(squares / sums.tokens).sqrt().float() for squares in sums.squares]),
        }
