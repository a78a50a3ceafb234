"""The sampler of DiffusionGemma: positions of low entropy are accepted, all others become noise again."""
from __future__ import annotations

from collections.abc import Iterator

import torch

from playground.algorithms.diffusion.block_loop import end_block
from playground.contract import CanvasDecoder, knob
from playground.engine.sampling import entropy
from playground.events import Figure


class EntropyBound(CanvasDecoder):
    """Turn a block of random tokens into text over several forwards, and start again with the next block. No
    bundled model turns noise into text: load google/diffusiongemma-26B-A4B-it; the library shows a recorded run of a
    tiny one.

    Each forward predicts every position of the block. The positions of lowest entropy are accepted and sampled, as many
    as keep the sum of their entropies without the largest within a bound, which bounds the information they have about
    each other; all others become random tokens again. The temperature falls from forward to forward, and the next
    forward also reads the tempered logits. A block ends early once its most probable tokens stay the same and their
    mean entropy is low; these tokens are its text. The last block is as long as the rest of the canvas. This is how the
    transformers library runs DiffusionGemma. Entropy bound: Ben-Hamu et al. 2025, arXiv 2505.24857.
    """

    name, title, paper, sheet = "entropy_bound", "Entropy bound", "2505.24857", "diffusion/diffusion-gemma"
    guarantee, attention = ("heuristic",), ("noise",)

    steps: int = knob(48, 1, 128, step=1, help="largest number of forwards for a block")
    bound: float = knob(0.1, 0.0, 2.0, step=0.05, help="nats that the accepted positions may add up to")
    hottest: float = knob(0.8, 0.05, 2.0, step=0.05, help="temperature of the first forward of a block")
    coolest: float = knob(0.4, 0.05, 2.0, step=0.05, help="temperature after the last forward of a block")
    stable: int = knob(1, 0, 8, step=1, help="forwards for which the most probable tokens must stay the same")
    certain: float = knob(0.005, 0.001, 1.0, step=0.001, help="mean entropy in nats below which a block may end")

    def decode(self, lm) -> Iterator:
        states = lm.new_states()
        for start in range(0, lm.length, lm.model.canvas_length):
            block = range(start, min(start + lm.model.canvas_length, lm.length))
            yield from self._denoise(lm, states, block)
            yield from end_block(lm, block)

    def _denoise(self, lm, states, block: range) -> Iterator:
        """Run the forwards of a block and fill it."""
        states.conditioning, tokens, before = None, {position: _noise(lm, position) for position in block}, []
        for left in range(self.steps, 0, -1):
            rows = yield lm.read(block, block, states, tokens)
            scores = rows.raw[list(block)] / (self.coolest + (self.hottest - self.coolest) * left / self.steps)
            nats, best = entropy(scores), scores.argmax(-1).tolist()
            accepted = {block[index] for index in within(nats, self.bound)}
            yield _accepted(lm, block, accepted, nats)
            if self._is_settled(best, before, nats):
                break
            p = scores.softmax(-1)
            tokens = {
                position: lm.draw(p[index], position, "token") if position in accepted else _noise(lm, position)
                for index, position in enumerate(block)
            }
            states.conditioning, before = scores.to(lm.model.dtype), [*before, best]
        lm.based_on(rows)
        yield lm.fill(block, best, rows.raw[list(block)].softmax(-1)[range(len(block)), best].tolist())

    def _is_settled(self, best: list[int], before: list[list[int]], nats: torch.Tensor) -> bool:
        same = len(before) >= self.stable and all(one == best for one in before[len(before) - self.stable:])
        return same and float(nats.mean()) < self.certain


def within(nats: torch.Tensor, bound: float) -> list[int]:
    """The indices of the lowest entropies whose sum without the largest is at most the bound; at least one."""
    values, order = nats.sort(stable=True)
    return order[values.cumsum(0) - values <= bound].tolist()


def _noise(lm, position: int) -> int:
    """A token drawn uniformly from the vocabulary."""
    return lm.draw(torch.full((lm.model.vocabulary,), 1 / lm.model.vocabulary, dtype=torch.float64), position, "noise")


def _accepted(lm, block: range, accepted: set[int], nats: torch.Tensor) -> Figure:
    labels = [f"{position + 1} {'accepted' if position in accepted else 'noise'}" for position in block]
    return Figure("bars", "entropy of each position, nats", {"labels": labels, "values": nats.tolist()})
