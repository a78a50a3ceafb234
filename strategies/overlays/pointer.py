"""Copied from the context, or generated? Attention read as a pointer to an earlier occurrence of the token."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from playground.algorithms.overlays.token_figures import bars, by_token, shaded
from playground.contract import ReadsHeads, knob
from playground.contract.overlay import ReadsLogits
from playground.events import Note

KINDS = ("copied", "unclear", "generated")
LIKELY = 0.5  # probability of the context's tokens from which a token may count as copied


class Pointer(ReadsHeads, ReadsLogits):
    """Say of each token whether the model points to an earlier occurrence of it, and where.

    A pointer network puts out attention itself: a choice among its inputs. Here the attention of the row that predicts
    a token is read as one: of every head, the weight on earlier occurrences of the token, and the part of it that
    follows an earlier occurrence of the current token, as an induction head has it. A token is called copied if it
    occurs before, the tokens of the context have more than half of the probability, and some head has more than `theta`
    on its occurrences; generated if it does not occur before; and unclear otherwise. Tokens with fewer than `letters`
    letters and digits do not count among the context's, or function words would make everything likely. A token has the
    colour of the largest such weight. Attention to an earlier occurrence does not prove that it was copied from there:
    no part is switched off, so it correlates. No pointer network is trained, and nothing is mixed into the output. The
    view is ours; the idea is that of Vinyals et al. 2015, arXiv 1506.03134.
    """

    name, title, paper, sheet = "pointer", "Copied or generated", "1506.03134", "overlays/pointer"
    reconstruction, sure = True, "medium"

    theta: float = knob(0.3, 0.05, 0.9, step=0.05, help="weight of a head on earlier occurrences that counts as a copy")
    letters: int = knob(4, 0, 12, step=1, help="least letters and digits of a token of the context")

    _text = None

    def begin(self, text, model):
        self._text, self._switchable = text, model.parts is not None
        self._tokens = torch.tensor(text.tokens, device=model.device)
        content = [sum(map(str.isalnum, text.piece(token))) >= self.letters for token in text.tokens]
        self._content = torch.tensor(content, device=model.device)
        self._weights: dict[int, list[Tensor]] = {}  # by layer, its largest head on earlier occurrences, [n]
        self._places: dict[int, list[Tensor]] = {}  # by layer, that head, its strongest slot, induction in %, [n, 3]
        self._mass: list[Tensor] = []  # probability of the context's tokens, [n]

    def read_heads(self, layer, first, weights):
        following = self._following(first, weights.shape[1])
        weights = weights[:, :len(following)].double()
        slots = self._tokens[:weights.shape[2]]
        pointed = weights * (slots == following[:, None])
        induced = pointed * (slots.roll(1) == self._tokens[first:first + len(following), None])
        induced[..., 0] = 0  # nothing comes before the first slot
        best = pointed.sum(-1).max(0)
        own = best.indices[None, :, None].expand(1, -1, weights.shape[2])
        slot = pointed.gather(0, own)[0].argmax(-1) if weights.shape[2] else best.indices
        percent = (100 * induced.sum(-1).amax(0)).round().long()
        self._weights.setdefault(layer, []).append(best.values.cpu())
        self._places.setdefault(layer, []).append(torch.stack([best.indices, slot, percent], 1).cpu())

    def _following(self, first: int, count: int) -> Tensor:
        """The tokens that these rows predict; the last row of the text predicts none."""
        return self._tokens[first + 1:first + 1 + count]

    def read_logits(self, first, logits):
        p = logits.double().softmax(1)
        count = len(self._following(first, len(p)))
        places = torch.arange(first + count, device=p.device)
        seen = places <= places[first:, None]
        tokens = self._tokens[:first + count]
        held = torch.zeros_like(p[:count]).scatter_reduce(
            1, tokens.expand(count, -1), (seen & self._content[:first + count]).to(p), "amax"
        )
        self._mass.append((held * p[:count]).sum(1).cpu())

    def draw(self):
        if not self._weights or self._text.generated < 1:
            return
        layers, own = sorted(self._weights), slice(self._text.start - 1, len(self._text.tokens) - 1)
        weights = torch.stack([torch.cat(self._weights[layer])[own] for layer in layers])  # [layers, tokens]
        places = torch.stack([torch.cat(self._places[layer])[own] for layer in layers])
        strongest, mass = weights.max(0), torch.cat(self._mass)[own].tolist()
        largest = strongest.values.tolist()
        kinds = [self.named(at, weight, share) for at, (weight, share) in enumerate(zip(largest, mass))]
        heads = places.gather(0, strongest.indices[None, :, None].expand(1, -1, 3))[0].tolist()
        labels = [self._label(kind, share, weight, layers[layer], head) for kind, share, weight, layer, head in zip(
            kinds, mass, largest, strongest.indices.tolist(), heads)]
        named = [[] if math.isclose(weight, 0) else [f"head {layers[layer]}.{head[0]}"]
                 for weight, layer, head in zip(largest, strongest.indices.tolist(), heads)]
        yield shaded("largest attention to earlier occurrences", largest, labels, named if self._switchable else [])
        yield by_token("attention to earlier occurrences, largest head by layer",
                       [f"layer {layer}" for layer in layers], self._text.pieces(), weights.tolist())
        yield bars("tokens", list(KINDS), [kinds.count(kind) for kind in KINDS])
        yield Note(f"{kinds.count('copied')} of {len(kinds)} tokens point to an earlier occurrence that the model made "
                   f"likely, {kinds.count('generated')} have none, and {kinds.count('unclear')} are unclear. Attention "
                   "correlates: nothing was switched off.")

    def named(self, number: int, weight: float, mass: float) -> str:
        """Of the generated token with this number, by the largest weight on its occurrences and the context's mass."""
        at = self._text.start + number
        if self._text.tokens[at] not in self._text.tokens[:at]:
            return "generated"
        return "copied" if mass > LIKELY and weight > self.theta else "unclear"

    def _label(self, kind: str, mass: float, weight: float, layer: int, found: list[int]) -> str:
        head, slot, percent = found
        said = f"{kind}; tokens of the context have {100 * mass:.0f} % of the probability"
        if math.isclose(weight, 0):
            return said
        return (f"{said}; layer {layer}, head {head} looks at token {slot + 1} of the text with {weight:.2f}; "
                f"induction: {percent / 100:.2f}")
