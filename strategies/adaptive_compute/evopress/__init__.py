"""EvoPress: attention blocks and FFNs left out for good, chosen by an evolutionary search."""
import re
from collections.abc import Iterator, Sequence
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.adaptive_compute.evopress.drop_search import Dropped, SearchSizes, search

MOST = 0.5  # share of the blocks up to which the fit searches


class DroppedChoices(LayerChoices):
    """The same blocks are left out of every forward."""

    def __init__(self, dropped: Dropped):
        self._dropped = dropped

    def attends(self, layer: int, hidden: Tensor) -> bool:
        return layer not in self._dropped.attention

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        return [] if layer in self._dropped.ffn else [SharedFeedForward(None, full)]


class Divergence:
    """Fitness of states: KL divergence of the dropped model from the whole one, in nats per token."""

    def __init__(self, texts, seed: int):
        self._texts, self._chance = texts, Random(seed)
        self._whole: dict[int, Tensor] = {}  # log-probabilities of the whole model [n, V], by text

    def __call__(self, states: list[Dropped], tokens: int) -> list[float]:
        drawn = self._draw(tokens)
        return [sum(self._of(state, number) for number in drawn) / self._count(drawn) for state in states]

    def _draw(self, tokens: int) -> list[int]:
        """Texts in random order until they have enough tokens."""
        order, total = self._chance.sample(range(len(self._texts.texts)), len(self._texts.texts)), 0
        for end, number in enumerate(order, 1):
            total += len(self._texts.texts[number]) - 1
            if total >= tokens:
                return order[:end]
        return order

    def _count(self, drawn: list[int]) -> int:
        return sum(len(self._texts.texts[number]) - 1 for number in drawn)

    def _of(self, state: Dropped, number: int) -> float:
        """Divergence summed over one text; its last position, which predicts nothing in it, is left out."""
        ids = self._texts.texts[number]
        if number not in self._whole:
            self._whole[number] = self._texts.read(ids, LayerChoices())[:-1].log_softmax(-1)
        found = self._texts.read(ids, DroppedChoices(state))[:-1].log_softmax(-1)
        return float(kl_div(found, self._whole[number], log_target=True, reduction="sum"))


class EvoPress(ComputePolicy):
    """Leave out whole attention blocks and feed-forward networks (FFN), those a search found to matter least together.

    `python -m playground fit evopress` searches once per model: random sets of blocks, then offspring that swap one
    block for another, ranked by how far the model's distribution moves on calibration texts. `sparsity` selects the
    result that leaves out that share of the attention blocks and as many FFNs; 0 leaves out nothing. `blocks` names
    them by hand instead, as in "3 attn, 4 mlp, 6 attn+mlp". A layer without attention holds no keys and values, so a
    cache policy is refused beside it. Without a search for the model, and without `blocks`, nothing is left out. The
    authors search with more offspring and more text than suits two cores, and also choose quantisation levels, which
    this does not. Sieberling et al. 2024, arXiv 2410.14649.
    """

    name, title, paper, sheet = "evopress", "Dropped blocks (EvoPress)", "2410.14649", "adaptive-compute/evopress"
    guarantee = ("collapses",)
    skips_attention, prefers_trained = True, True

    sparsity: float = knob(
        0.25, 0.0, 0.5, step=0.0625, help="share of the attention blocks, and of the FFNs, that is left out"
    )
    blocks: str = knob("", help='blocks to leave out, such as "3 attn, 4 mlp, 6 attn+mlp"; empty: what `fit` found')

    def check(self):
        read_blocks(self.blocks)

    def begin(self, parts, weights):
        self._dropped, self._depth = self._chosen(parts.depth, weights), parts.depth
        self._told = bool(weights or self.blocks.strip() or not self.sparsity)
        outside = sorted(layer for layer in self._dropped.attention | self._dropped.ffn if layer >= parts.depth)
        if outside:
            raise Refusal(f"There is no layer {outside[0]}: the model has layers 0 to {parts.depth - 1}.", "blocks")

    def _chosen(self, depth: int, weights) -> Dropped:
        """By hand, or the result of the search for this sparsity; where it has none, for the next lower one."""
        if self.blocks.strip():
            return read_blocks(self.blocks)
        counts = [int(name) for name in weights if int(name) <= self.sparsity * depth + 1e-9]
        if not counts:
            return Dropped(frozenset(), frozenset())
        return Dropped(*(frozenset(row.nonzero()[:, 0].tolist()) for row in weights[str(max(counts))]))

    def choices(self, positions, prompt):
        return DroppedChoices(self._dropped)

    def explain(self, choices, row, generated) -> Iterator:
        if not self._told:
            self._told = True
            yield Note("No search result for this model, so nothing is left out: run `python -m playground fit "
                       "evopress`, or name blocks.")
        if not generated:
            kinds = (self._dropped.attention, self._dropped.ffn)
            values = [[float(layer not in dropped) for dropped in kinds] for layer in range(self._depth)]
            labels = [f"layer {layer}" for layer in range(self._depth)]
            data = {"rows": labels, "columns": ["attention", "FFN"], "values": values}
            yield Figure("matrix", "blocks that run", data)

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Search for every number of blocks up to half of them; returns masks [2, layers] of what is left out."""
        depth, found = texts.parts.depth, {}
        fitness = Divergence(texts, seed)
        for count in range(1, int(MOST * depth) + 1):
            bests = []
            for best, value in search(depth, count, fitness, SearchSizes(), seed):
                bests.append(best)
                series = {f"KL with {count} of {depth} left out": value}
                data = {"x": len(bests), "axis": "generation", "series": series}
                yield Figure("scalar", "divergence of the best state", data)
            yield Note(f"{count} of {depth}: {written(bests[-1])}")
            found[str(count)] = torch.tensor([[layer in dropped for layer in range(depth)] for dropped in bests[-1]])
        return found


def read_blocks(text: str) -> Dropped:
    """Blocks named by hand. Raises Refusal."""
    attention, ffn = set(), set()
    for entry in filter(None, map(str.strip, re.split(r"[,\n]", text))):
        match = re.fullmatch(r"(\d{1,4})[ :]*(attn|mlp|attn\+mlp)", entry)
        if not match:
            raise Refusal(f'"{entry}" is no block: write a layer and attn, mlp or attn+mlp, as in "3 attn".', "blocks")
        layer, kind = int(match[1]), match[2]
        attention |= {layer} if "attn" in kind else set()
        ffn |= {layer} if "mlp" in kind else set()
    return Dropped(frozenset(attention), frozenset(ffn))


def written(dropped: Dropped) -> str:
    """Blocks in the form that `read_blocks` reads."""
    kinds = {layer: "+".join(["attn"] * (layer in dropped.attention) + ["mlp"] * (layer in dropped.ffn))
             for layer in sorted(dropped.attention | dropped.ffn)}
    return ", ".join(f"{layer} {kind}" for layer, kind in kinds.items())
