"""Masked diffusion decoding: the loop that reveals a canvas, some positions each pass."""
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.engine.sampling import entropy
from playground.events import Figure, Note

Score = Callable[[torch.Tensor, int], float]
SCORES: dict[str, Score] = {  # of a raw row [V] and the token proposed for it; the largest is revealed first
    "low_confidence": lambda row, token: float(row.softmax(-1)[token]),
    "margin": lambda row, token: float(row.softmax(-1).topk(2).values.diff().abs()),
    "entropy": lambda row, token: -float(entropy(row)),
    "left_to_right": lambda row, token: 0.0,  # all tie, and of equals the first goes first
}


class MaskedDiffusion(CanvasDecoder):
    """Begin with every position masked, and reveal those the model is surest of, several in one pass.

    Each pass reads the whole canvas, proposes a token for every masked position of the current block, and reveals some
    for good: an equal share of the steps, or all whose proposal has at least the threshold's probability, and the first
    in order if none has. Confidence is the probability before the temperature. A block that holds an end token ends the
    answer. Tokens revealed together do not see each other, so their errors are the price of fewer passes; one at a time
    the draws follow the model exactly, except that low_confidence above temperature 0 prefers likely proposals. LLaDA:
    Nie et al. 2025, arXiv 2502.09992; orders of Dream, arXiv 2508.15487; threshold of Fast-dLLM, arXiv 2505.22618.
    Where blocks or steps do not divide evenly, the last block is shorter and the steps are shared in proportion.
    """

    name, title, paper, sheet = "masked_diffusion", "Masked diffusion", "2502.09992", "diffusion/mdlm-baseline"
    guarantee = ("heuristic",)

    rule: str = knob(
        "steps",
        choices=("steps", "threshold"),
        help="how many a pass reveals: an equal share, or all that are sure enough",
    )
    steps: int = knob(
        0, 0, 128, step=1, help="passes over the whole answer, for the rule of steps; 0 takes one for each position"
    )
    threshold: float = knob(
        0.9, 0.0, 1.05, step=0.05, help="confidence that is sure enough; above 1 reveals one at a time, 0 all at once"
    )
    order: str = knob("low_confidence", choices=(*SCORES, "random"), help="which positions go first")
    block_length: int = knob(
        32, 1, 128, step=1, help="positions that are filled before the next ones are begun; 1 goes from left to right"
    )
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="0 takes the likeliest token; 1 draws from the model")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        for start in range(0, lm.length, self.block_length):
            block = range(start, min(start + self.block_length, lm.length))
            rows = yield from self._fill(lm, block)
            ends = [lm.ids[position] for position in block if lm.ends(lm.ids[position])]
            if ends:
                yield Note("This block ends the answer, so the positions after it get the end token without a pass.")
                yield _filling(lm, rows, dict.fromkeys(lm.masked, ends[0]))
            yield Note(f"Positions {start + 1} to {block.stop} are filled, and the next block begins.")

    def _fill(self, lm, block: range) -> Iterator:
        """Pass by pass until nothing of the block is masked; returns the last rows."""
        shares = iter(self._shares(block, lm.length))
        while left := [position for position in lm.masked if position in block]:
            rows = yield lm.read()
            yield _uncertainty(lm, rows)
            proposed = {position: lm.pick(rows, position) for position in left}
            chosen = self._reveal(lm, rows, proposed, next(shares, 0))
            yield _filling(lm, rows, {position: proposed[position] for position in chosen})
        return rows

    def _shares(self, block: range, length: int) -> list[int]:
        """Positions to reveal in each pass over a block, the larger shares first."""
        steps = min(self.steps or length, length)
        passes = max(1, steps * block.stop // length - steps * block.start // length)
        base, extra = divmod(len(block), passes)
        return [base + (i < extra) for i in range(passes)]

    def _reveal(self, lm, rows, proposed: dict[int, int], share: int) -> list[int]:
        """Positions that get their token in this pass."""
        ranked = self._ranked(lm, rows, proposed)
        if self.rule == "steps":
            return list(islice(ranked, share))
        return [
            position for position, token in proposed.items() if _confidence(rows, position, token) >= self.threshold
        ] or [next(ranked)]

    def _ranked(self, lm, rows, proposed: dict[int, int]) -> Iterator[int]:
        """Positions in the order in which they are to be revealed, the lowest first where some tie."""
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


def _uncertainty(lm, rows) -> Figure:
    """Entropy of every position before this pass reveals anything; a filled one shows its token."""
    values = [0.0 if token is not None else value for token, value in zip(lm.ids, entropy(rows.raw).tolist())]
    labels = [f"{i + 1} {'·' if token is None else lm.piece(token).strip()}" for i, token in enumerate(lm.ids)]
    return Figure("bars", "entropy of each position, nats", {"labels": labels, "values": values})
