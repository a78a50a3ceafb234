"""Tokens that stay by chance."""
import torch

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import knob

# positions whose numbers are drawn together, so that they do not depend on how many tokens come at a time
STRETCH = 256


class RandomKeep(TopKEviction):
    """Keep tokens by chance: what every rule that chooses has to beat.

    Each token of a layer and KV head is given a random number once, and the largest numbers stay, so at every moment
    those that stay are an even sample of the text so far: an early token is as likely among them as a late one. With
    `recent` it is H2O with dice in place of votes. A baseline; the sampling is Vitter's reservoir, 1985.
    """

    name, title, paper, sheet = "random_keep", "By chance", "Vitter 1985", "kv-cache/kv-baselines"

    dice: int = knob(0, 0, 99, step=1, help="another number makes another choice")

    def __post_init__(self):
        self._drawn = {}

    def scores(self, held):
        drawn = self._drawn.get(held.layer)
        if drawn is None or drawn.shape[1] <= held.next:
            drawn = self._drawn[held.layer] = self._draw(held)
        return drawn.gather(1, held.positions.clamp(min=0).expand(len(drawn), -1))

    def _draw(self, held):
        """Numbers of a layer's positions, [kv_heads, STRETCH and its multiples], beyond the next row's."""
        heads = len(held.read("keys"))
        stretches = [self._stretch(held.layer, heads, at) for at in range(held.next // STRETCH + 1)]
        return torch.cat(stretches, 1).to(held.positions.device)

    def _stretch(self, layer, heads, at):
        """Numbers of a layer's positions from at * STRETCH on, [kv_heads, STRETCH]."""
        chance = torch.Generator().manual_seed((self.dice << 12 | layer) << 12 | at)
        return torch.rand(heads, STRETCH, generator=chance)
