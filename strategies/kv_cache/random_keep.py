"""Random eviction."""
import torch

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead, knob

CHUNK = 256  # positions drawn together, so that scores do not depend on how many tokens are committed at once


class RandomKeep(TopKEviction, DecidesByHead):
    """Keep a random sample of the tokens: the baseline that every selection rule has to beat.

    Each token of a layer and KV head gets a random score once, and the largest scores stay, so the kept tokens are
    always a uniform sample of the text: early and late tokens are equally likely to stay. With `recent` it is H2O with
    random scores. A baseline; the sampling is Vitter's reservoir, 1985.
    """

    name, title, paper, sheet = "random_keep", "By chance", "Vitter 1985", "kv-cache/kv-baselines"

    dice: int = knob(0, 0, 99, step=1, help="seed of the random scores")

    def __post_init__(self):
        self._drawn, self._heads = {}, 0  # by layer; KV heads of a text

    def scores(self, held):
        drawn = self._drawn.get(held.layer)
        if drawn is None or drawn.shape[1] <= held.next:
            drawn = self._drawn[held.layer] = self._draw(held)
        return drawn.gather(1, held.positions.clamp(min=0).expand(len(drawn), -1))

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone._drawn = {layer: self._drawn[layer][heads]} if layer in self._drawn else {}
        return alone

    def _draw(self, held):
        """Scores of a layer's positions, at least up to the next row's, [kv_heads, n * CHUNK]; equal for all texts."""
        heads = len(held.read("keys"))
        self._heads = self._heads or heads  # the prompt is one text
        chunks = [self._chunk(held.layer, self._heads, at) for at in range(held.next // CHUNK + 1)]
        return torch.cat(chunks, 1).repeat(heads // self._heads, 1).to(held.positions.device)

    def _chunk(self, layer, heads, at):
        """Scores of a layer's positions from at * CHUNK on, [kv_heads, CHUNK]."""
        generator = torch.Generator().manual_seed((self.dice << 12 | layer) << 12 | at)
        return torch.rand(heads, CHUNK, generator=generator)
