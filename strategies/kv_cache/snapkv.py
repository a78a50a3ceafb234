"""The end of the prompt says which of its tokens matter."""
from torch.nn.functional import avg_pool1d, max_pool1d

from playground.errors import Refusal
from playground.parts.votes import Votes, heaviest
from playground.strategy import CachePolicy, knob

POOLS = {"avg": avg_pool1d, "max": max_pool1d}


class SnapKV(CachePolicy):
    """Cut the prompt once, to the tokens its last few tokens attend to; whatever is generated afterwards stays.

    The last `window` tokens of the prompt vote with their attention weights, summed over the window and over the query heads
    of a group. The votes are smoothed along the text, so that tokens stay together with their neighbours, and each layer and
    KV head keeps the best ones next to the window itself. Pooling comes after the sum over a group here; with avg the order
    makes no difference, with max it can. Li et al. 2024, arXiv 2404.14469.
    """

    name, title, paper, sheet = "snapkv", "Prompt snapshot (SnapKV)", "2404.14469", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")
    row_wise, watches = False, True

    window: int = knob(16, 1, 128, step=1, help="last tokens of the prompt, which vote and stay")
    capacity: int = knob(64, 2, 2048, step=1, help="tokens of the prompt that stay, the window included")
    kernel: int = knob(5, 1, 15, step=2, help="neighbouring tokens whose votes are pooled, an odd number; 1 pools nothing")
    pooling: str = knob("avg", choices=("avg", "max"), help="how votes of neighbours are pooled")

    def __post_init__(self):
        self.votes = Votes()

    def check(self):
        if self.capacity <= self.window:
            raise Refusal(f"capacity is {self.capacity} and the window alone takes {self.window}: raise capacity above it.", "capacity")
        if self.kernel % 2 == 0:
            raise Refusal(f"kernel must be odd to have a middle, not {self.kernel}: take {self.kernel + 1}.", "kernel")

    def wants(self, position, prompt):
        return prompt - self.window <= position < prompt

    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights, keys)

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        late = held.positions >= held.prompt - self.window
        early = held.live & ~late  # once they have been cut there are no more of them than may stay, so all of them do
        return late | heaviest(self._pooled(held, late), self.capacity - self.window, early)

    def _pooled(self, held, late):
        """Votes before the window, smoothed along the text, [kv_heads, slots]; those of the window are left out."""
        votes = self.votes.of(held.layer, held.positions).masked_fill(late, 0)
        return POOLS[self.pooling](votes, self.kernel, 1, self.kernel // 2)

    def budget(self, generated):
        return self.capacity + generated
