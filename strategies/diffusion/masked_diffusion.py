"""Masked diffusion decoding: the canvas is unmasked over several forwards, some positions in each."""
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.engine.sampling import entropy
from playground.events import Figure, Note

Score = Callable[[torch.Tensor, int], float]
SCORES: dict[str, Score] = {  # score(raw row [V], proposed token); the largest is unmasked first
    "low_confidence": lambda row, token: float(row.softmax(-1)[token]),
    "margin": lambda row, token: float(row.softmax(-1).topk(2).values.diff().abs()),
    "entropy": lambda row, token: -float(entropy(row)),
    "left_to_right": lambda row, token: 0.0,  # ties are broken by position
}


class MaskedDiffusion(CanvasDecoder):
    """Start with every position masked and unmask the most confident positions, several per forward.

    Each forward reads the whole canvas and proposes a token for every masked position of the current block. Some
    are then unmasked permanently: an equal number per step, or all whose proposal has at least the threshold's
    probability (the first in order if none has). Confidence is the probability before temperature. An end token in
    a block ends the answer. Tokens unmasked in the same forward are chosen independently, so fewer forwards cost
    quality. With one token per forward, sampling follows the model exactly, except that low_confidence above
    temperature 0 favours probable proposals. Guidance w makes the logits (1 + w) with - w without the prompt. If
    the length is not a multiple of the block length the last block is shorter, with steps in proportion. LLaDA: Nie
    et al. 2025, arXiv 2502.09992; orders of Dream, arXiv 2508.15487; threshold of Fast-dLLM, arXiv 2505.22618.
    """

    name, title, paper, sheet = "masked_diffusion", "Masked diffusion", "2502.09992", "diffusion/mdlm-baseline"
    guarantee, attention = ("heuristic",), ("full", "block", "known_first")

    rule: str = knob(
        "steps",
        choices=("steps", "threshold"),
        help="positions unmasked per forward: an equal share, or all above the threshold",
    )
    steps: int = knob(
        0, 0, 128, step=1, help="rule steps: forwards for the whole answer; 0 takes one per position"
    )
    threshold: float = knob(
        0.9, 0.0, 1.05, step=0.05, help="rule threshold: confidence to unmask; above 1 one at a time, 0 all at once"
    )
    order: str = knob("low_confidence", choices=(*SCORES, "random"), help="which positions are unmasked first")
    block_length: int = knob(
        32, 1, 128, step=1, help="positions in a block; blocks are filled in order, 1 decodes left to right"
    )
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="0 takes the top token; 1 samples from the model")
    guidance: float = knob(
        0.0, 0.0, 4.0, step=0.1, help="classifier-free guidance: a second forward without the prompt; 0 takes none"
    )

    @property
    def left_to_right(self) -> bool:
        single = self.order == "left_to_right" and self.rule == "steps" and self.steps == 0
        return single or self.block_length == 1

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        for block in lm.blocks(self.block_length):
            rows = yield from self._fill(lm, block)
            ends = [lm.ids[position] for position in block if lm.ends(lm.ids[position])]
            if ends:
                yield Note("This block contains an end token: it fills all later positions, without a forward.")
                yield _filling(lm, rows, dict.fromkeys(lm.masked, ends[0]))
            yield Note(f"Positions {block.start + 1} to {block.stop} are filled, and the next block begins.")

    def _fill(self, lm, block: range) -> Iterator:
        """Run forwards until no position of the block is masked; returns the rows of the last one."""
        shares = iter(self._shares(block, lm.length))
        while masked := [position for position in lm.masked if position in block]:
            rows = yield from self._read(lm)
            yield _entropy_figure(lm, rows)
            proposed = {position: lm.pick(rows, position) for position in masked}
            chosen = self._select(lm, rows, proposed, next(shares, 0))
            yield _filling(lm, rows, {position: proposed[position] for position in chosen})
        return rows

    def _read(self, lm) -> Iterator:
        """Rows of a forward, moved away from those of a forward with the prompt masked."""
        rows = yield lm.read()
        if not self.guidance:
            return rows
        without = yield lm.read(unprompted=True)
        mixed = (1 + self.guidance) * rows.raw - self.guidance * without.raw
        guided = lm.rows_of(mixed.where(rows.raw.isfinite(), rows.raw))  # what is impossible stays impossible
        lm.based_on(guided)
        return guided

    def _shares(self, block: range, length: int) -> list[int]:
        """Number of positions to unmask in each forward of a block, larger shares first."""
        steps = min(self.steps or length, length)
        forwards = max(1, steps * block.stop // length - steps * block.start // length)
        base, extra = divmod(len(block), forwards)
        return [base + (i < extra) for i in range(forwards)]

    def _select(self, lm, rows, proposed: dict[int, int], share: int) -> list[int]:
        """Positions to unmask in this forward."""
        ranked = self._ranked(lm, rows, proposed)
        if self.rule == "steps":
            return list(islice(ranked, share))
        return [
            position for position, token in proposed.items() if _confidence(rows, position, token) >= self.threshold
        ] or [next(ranked)]

    def _ranked(self, lm, rows, proposed: dict[int, int]) -> Iterator[int]:
        """Positions in unmasking order; ties by position."""
        if self.order == "random":
            return _shuffled(lm, list(proposed))
        score = SCORES[self.order]
        return iter(sorted(proposed, key=lambda position: -score(rows.raw[position], proposed[position])))


def _shuffled(lm, positions: list[int]) -> Iterator[int]:
    while positions:
        yield positions.pop(lm.draw(torch.ones(len(positions), dtype=torch.float64), positions[0], "order"))


def _confidence(rows, position: int, token: int) -> float:
    return float(rows.raw[position].softmax(-1)[token])


def _filling(lm, rows, tokens: dict[int, int]):
    """The request that fills positions with these tokens."""
    return lm.fill(list(tokens), list(tokens.values()), [_confidence(rows, *item) for item in tokens.items()])


def _entropy_figure(lm, rows) -> Figure:
    """Entropy of every masked position before this forward unmasks any; filled positions show their token."""
    values = [0.0 if token is not None else value for token, value in zip(lm.ids, entropy(rows.raw).tolist())]
    labels = [f"{i + 1} {'·' if token is None else lm.piece(token).strip()}" for i, token in enumerate(lm.ids)]
    return Figure("bars", "entropy of each position, nats", {"labels": labels, "values": values})
