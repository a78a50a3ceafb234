"""dKV-Cache: the states of a position are reused once it is filled, one forward later."""
from __future__ import annotations

from collections.abc import Iterable

import torch

from playground.algorithms.diffusion.block_loop import BlockDecoder
from playground.algorithms.diffusion.cached_reading import CachedReader
from playground.algorithms.diffusion.proposals import Proposals, most_confident
from playground.contract import knob

FULL_STEPS = 2  # a block begins with two full forwards: before them nothing was filled long enough


class DelayedReader(CachedReader):
    """Computes masked positions, and those filled in the forward before, whose states were still those of a mask.

    A position that predicts a later one (a shifted model) has to be computed while that one is masked: `shift` says
    which positions keep their states, "un" where the next one is filled, "right" where the position itself is, and
    "un_right" where both are.
    """

    def __init__(self, lm, interval: int, shift: str, prompt_only: bool, prompt_kept: bool):
        super().__init__(lm, interval)
        self.shift, self.prompt_only, self.prompt_kept = shift, prompt_only, prompt_kept
        self.first = True  # no forward yet
        self.filled: list[set[int]] = []  # filled positions before each forward of the block

    def read(self, block: range, masked: list[int], step: int):
        self.filled = self.filled if step else []
        self.filled.append(set(self.lm.everything) - set(self.lm.masked))
        request = super().read(block, masked, step)
        self.first = False
        return request

    def is_full(self, step: int) -> bool:
        return self.first or not (self.prompt_kept or self.prompt_only) and self._due(step)

    def computed(self, block: range, masked: list[int], step: int) -> Iterable[int]:
        answer = {*range(self.lm.length), *self.lm.sources([0])}
        if self.prompt_only or self._due(step):
            return answer
        kept = {position for position in self.lm.everything if self._settled(position, self.filled[step - 1])}
        return (answer if self.prompt_kept else set(self.lm.everything)) - kept

    def _due(self, step: int) -> bool:
        return step < FULL_STEPS or step % self.refresh == 0

    def _settled(self, position: int, filled: set[int]) -> bool:
        """Whether a position keeps its states; `filled` are the positions filled before the last forward."""
        following = position + 1 in filled or position + 1 == self.lm.length
        if self.lm.sources([position]) == [position]:
            return position in filled
        return {"un": following, "right": position in filled, "un_right": following and position in filled}[self.shift]


class RandomOrderReader(CachedReader):
    """Computes the positions filled next, those filled last, and a window of masked neighbours, in an order drawn for
    each block in advance.
    """

    def __init__(self, lm, interval: int, window: int, count: int):
        super().__init__(lm, interval)
        self.window, self.count = window, count
        self.order: list[int] = []  # masked positions of the block, in the order in which they are filled
        self.last: list[int] = []  # filled in the last forward

    def read(self, block: range, masked: list[int], step: int):
        if step == 0:
            self.order = shuffled(self.lm, masked)
        self.last, self.order = [i for i in self.last if i not in masked], [i for i in self.order if i in masked]
        request = super().read(block, masked, step)
        self.last = self.next
        return request

    @property
    def next(self) -> list[int]:
        """The positions filled now."""
        return self.order[:self.count]

    def computed(self, block: range, masked: list[int], step: int) -> Iterable[int]:
        near = {i for position in self.next for i in neighbours(position, masked)[:self.window]}
        return {*self.lm.sources(self.next), *self.next, *self.last, *near}

    def predicted(self, masked: list[int]) -> list[int]:
        return self.next


def neighbours(position: int, masked: list[int]) -> list[int]:
    """Other masked positions, the nearest first, the left one before the right one."""
    return sorted((i for i in masked if i != position), key=lambda i: (abs(i - position), i))


def shuffled(lm, positions: list[int]) -> list[int]:
    """The positions in a random order."""
    left, order = list(positions), []
    while left:
        order.append(left.pop(lm.draw(torch.ones(len(left), dtype=torch.float64), left[0], "order")))
    return order


class DKVCache(BlockDecoder):
    """Reuse the key and value states of positions that are filled, and compute the masked ones in every forward.

    The states of a position change strongly until it is filled and hardly afterwards. They are reused from the second
    forward after it was filled: in the first, the position is read as a token for the first time. Every n-th forward
    computes everything. Variant prefill keeps the states of the prompt only, pd those of the prompt for the whole run
    and those of the answer as decode does, and greedy fills in a random order, drawn in advance, so that only the next
    positions have to be computed. Ma et al. 2025, arXiv 2505.15781.
    """

    name, title, paper, sheet = "dkv_cache", "dKV-Cache", "2505.15781", "diffusion/dkv-cache"
    guarantee = ("heuristic",)

    variant: str = knob("decode", choices=("decode", "prefill", "pd", "greedy"), help="which states are reused")
    interval: int = knob(4, 1, 32, step=1, help="every n-th forward of a block computes everything; 1 reuses nothing")
    count: int = knob(1, 1, 32, step=1, help="positions filled per forward")
    window: int = knob(4, 0, 16, step=1, help="variant greedy: masked neighbours computed with each position")
    shift: str = knob(
        "un", choices=("un", "right", "un_right"),
        help="models that predict the next position: reuse states where the next one, the position or both are filled",
    )

    def reader(self, lm):
        if self.variant == "greedy":
            return RandomOrderReader(lm, self.interval, self.window, self.count)
        prompt_only = self.variant == "prefill" and self.interval > 1
        prompt_kept = self.variant == "pd" and self.interval > 1
        return DelayedReader(lm, self.interval, self.shift, prompt_only, prompt_kept)

    def choose(self, lm, proposals: Proposals, block: range) -> list[int]:
        return most_confident(proposals, self.count)
