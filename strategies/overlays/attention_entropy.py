"""Where each head looks: entropy of its attention, and the usual quantities beside it."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.special import entr

from playground.algorithms.overlays.token_figures import bars, by_token, matrix, numbered, shaded
from playground.contract import ReadsHeads, knob
from playground.events import Note

QUANTITIES = ("entropy", "sink", "distance", "previous", "induction")
MEANS = {
    "entropy": "attention entropy, 1 is uniform",
    "sink": "attention to the first tokens",
    "distance": "mean distance of attention, 1 is the start",
    "previous": "attention to the previous token",
    "induction": "attention to what followed this token before",
}
MASS = 1e-3  # weight beside the slots, of a learned attention sink, from which it counts as one more slot
COLLAPSED, OVERLOADED = 0.10, 0.75  # median normalised entropy of a head
RECEIVERS = 12  # tokens in the figure of received attention


class AttentionEntropy(ReadsHeads):
    """Show where each attention head looks: at one token, or evenly at all of them.

    The entropy of a head's weights, divided by the logarithm of the number of tokens it can see, is 0 if it looks at
    one token and 1 if at all equally. A head whose median is below 0.10 is called collapsed on this text, above 0.75
    overloaded; both thresholds are ours. The other quantities are the weight on the first tokens (the sink), the mean
    distance as a share of the text, the weight on the previous token, and the weight on tokens that followed an earlier
    occurrence of the current one (induction). A token has the colour of the row that predicted it. Attention says where
    values were read, not why a token was chosen: it correlates. The measure of Jha and Reagen 2025, arXiv 2501.03489,
    who train with it; here nothing is trained.
    """

    name, title, paper, sheet = "attention_entropy", "Attention entropy", "2501.03489", "overlays/attention-entropy"
    needs = ("attention_scores",)

    quantity: str = knob("entropy", choices=QUANTITIES, help="what colours the text and fills the figures")
    n_sink: int = knob(1, 0, 8, step=1, help="first tokens of the text that count as sink")

    _text = None

    def begin(self, text, model):
        self._text, self._switchable = text, model.parts is not None
        self._tokens = torch.tensor(text.tokens, device=model.device)
        self._found: dict[int, list[Tensor]] = {}  # by layer, [heads, n, quantities] for each piece
        self._targets: dict[int, list[Tensor]] = {}  # by layer, the slot with the largest weight, [heads, n]
        self._received = torch.zeros(len(text.tokens), dtype=torch.float64)

    def read_heads(self, layer, first, weights):
        rows, slots = weights.shape[1:]
        at = torch.arange(first, first + rows, device=weights.device)
        measured = [self.measure(name, weights, at) for name in QUANTITIES]
        self._found.setdefault(layer, []).append(torch.stack(measured, -1).double().cpu())
        self._targets.setdefault(layer, []).append(weights.argmax(-1).cpu())
        self._received[:slots] += weights.mean(0).sum(0).double().cpu()

    def measure(self, name: str, weights: Tensor, at: Tensor) -> Tensor:
        """One quantity of weights [heads, n, slots] of rows at positions [n], as [heads, n]; NaN where it has none."""
        slots = torch.arange(weights.shape[-1], device=weights.device)
        if name == "entropy":
            return normalised_entropy(weights, at)
        if name == "sink":
            return weights[..., :self.n_sink].sum(-1)
        if name == "distance":
            return (weights * (at[:, None] - slots)).sum(-1) / at.clamp(min=1)
        if name == "previous":
            return (weights * (slots == at[:, None] - 1)).sum(-1).masked_fill(at == 0, torch.nan)
        followed = self._tokens[:len(slots)].roll(1) == self._tokens[at][:, None]  # the token before slot s is ours
        return (weights * (followed & (slots > 0) & (slots <= at[:, None]))).sum(-1)

    def draw(self):
        if not self._found or self._text.generated < 1:
            return
        layers = sorted(self._found)
        every = torch.stack([torch.cat(self._found[layer], 1) for layer in layers])  # [layers, heads, tokens, 5]
        predicting = slice(self._text.start - 1, len(self._text.tokens) - 1)
        every, chosen = every[:, :, predicting], QUANTITIES.index(self.quantity)
        own, name = every[..., chosen], MEANS[self.quantity]
        narrowest = [divmod(head, every.shape[1]) for head in
                     every[..., 0].nan_to_num(2.0).flatten(0, 1).argmin(0).tolist()]
        named = [[f"head {layers[layer]}.{head}"] for layer, head in narrowest] if self._switchable else []
        yield shaded(name, own.flatten(0, 1).nanmean(0).tolist(), self._labels(layers, every, narrowest, predicting),
                     named)
        heads = numbered("head", own.shape[1])
        yield matrix(f"{name}: mean by head", [f"layer {layer}" for layer in layers], heads, own.nanmean(2).tolist())
        yield by_token(f"{name}: by layer and token", [f"layer {layer}" for layer in layers], self._text.pieces(),
                       own.nanmean(1).tolist())
        yield self._receivers(len(layers))
        yield Note(verdict(every[..., 0].nanmedian(2).values.flatten()))

    def _labels(
        self, layers: list[int], every: Tensor, narrowest: list[tuple[int, int]], predicting: slice
    ) -> list[str]:
        """For each token: the mean, and the head that is most certain where to look, [layer, head]."""
        targets = torch.stack([torch.cat(self._targets[layer], 1) for layer in layers])[:, :, predicting]
        means = every.flatten(0, 1).nanmean(0)
        labels = []
        for token, (layer, head) in enumerate(narrowest):
            slot = int(targets[layer, head, token])
            place = f"layer {layers[layer]}, head {head}"
            mean = float(means[token, QUANTITIES.index(self.quantity)])
            labels.append(f"{mean:.2f} on average; {place} looks at “{self._text.piece(self._text.tokens[slot])}” most")
        return labels

    def _receivers(self, layers: int):
        """The tokens that later rows attend to most: mean weight over the rows that see them, all heads and layers."""
        length = len(self._text.tokens)
        shares = self._received / layers / torch.arange(length, 0, -1)
        most = shares.topk(min(RECEIVERS, length)).indices.sort().values.tolist()
        labels = [f"{place + 1}: {self._text.piece(self._text.tokens[place])}" for place in most]
        return bars("attention received, mean over later tokens", labels, shares[most].tolist())


def normalised_entropy(weights: Tensor, at: Tensor) -> Tensor:
    """Entropy of weights [heads, n, slots] over its maximum for the slots each row at positions [n] sees, [heads, n].

    A row sees the slots from the oldest one with weight on. Weight that is missing to 1, of a learned sink, is one
    more slot. NaN where a row sees a single slot.
    """
    missing = (1 - weights.sum(-1)).clamp(min=0)
    oldest = (weights > 0).int().argmax(-1)
    seen = at - oldest + 1 + (missing > MASS)
    entropy = entr(weights).sum(-1) + entr(missing.masked_fill(missing <= MASS, 0))
    return (entropy / seen.log()).clamp(0, 1).masked_fill(seen < 2, torch.nan)


def verdict(medians: Tensor) -> str:
    """How many heads look at hardly more than one token, and how many at nearly all, in a sentence."""
    collapsed, overloaded = int((medians < COLLAPSED).sum()), int((medians > OVERLOADED).sum())
    return (f"Attention: of {len(medians)} heads, {collapsed} look at one token (median normalised entropy below "
            f"{COLLAPSED:.2f}) and {overloaded} at nearly all alike (above {OVERLOADED:.2f}).")
