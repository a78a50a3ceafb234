"""Learn2PD: a small network decides which proposals of a block are final, and a predicted end cuts the canvas."""
from __future__ import annotations

from collections.abc import Iterator

from playground.algorithms.diffusion.block_loop import BlockDecoder
from playground.algorithms.diffusion.position_filter import FilterTraining, PositionFilter, learn_filter
from playground.algorithms.diffusion.proposals import fill, propose
from playground.contract import knob
from playground.engine.sampling import in_float64
from playground.errors import Refusal
from playground.events import Figure, Note

LENGTHS = (8, 16, 24, 32)  # blocks for which a filter is trained
USUAL = 0.9  # threshold on confidence, for comparison


class Learn2PD(BlockDecoder):
    """Fill what a trained filter takes for final, and leave out what is after a predicted end of the text.

    The filter is a network of two layers that reads the confidences of all positions of the block, filled ones
    included, and gives for each the probability that its proposal will not change any more. Those above `accept` are
    filled, and always the most confident position. It was trained on forwards over this model's own answers, where it
    is known which proposals were final: `python -m playground fit learn2pd --model NAME` does that for another model.
    With `end_prediction`, an end token that passes the filter, or else the most confident one that is proposed
    anywhere, fills all later masked positions, which are not read again. accept 1 without end_prediction is one
    position per forward. Bao et al. 2025, arXiv 2509.25188; the layers of the filter are reconstructed from its size.
    """

    name, title, paper, sheet = "learn2pd", "Learn2PD", "2509.25188", "diffusion/learn2pd"
    guarantee, sure, fitted_to_target = ("heuristic",), "medium", True

    block_length: int = knob(16, 8, 32, step=8, help="positions in a block; there is a filter for each length")
    accept: float = knob(0.95, 0.0, 1.0, step=0.01, help="output of the filter above which a position is filled")
    count: int = knob(1, 1, 4, step=1, help="most confident positions that are filled in any case")
    end_prediction: bool = knob(True, help="a predicted end token fills all later positions at once")

    trained = "choose fast_dllm, which needs no training"

    def __post_init__(self):
        self._filter: PositionFilter | None = None
        self._stop: int | None = None  # positions that are still read; None is all

    def check(self) -> None:
        if self.block_length not in LENGTHS:
            raise Refusal(f"There are filters for blocks of {', '.join(map(str, LENGTHS))} positions: choose one.",
                          "block_length")

    @classmethod
    def learn(cls, lessons, seed: int) -> Iterator[Figure | Note]:
        """Train a filter for each block length on rounds of the model; returns the weights of all by name."""
        weights = {}
        for length in LENGTHS:
            rounds = lessons.rounds(length)
            yield Note(f"Blocks of {length}: {len(rounds)} forwards.")
            found = yield from learn_filter(rounds, FilterTraining(), seed)
            weights |= {f"{length}.{name}": tensor for name, tensor in found.items()}
        return weights

    def fill_block(self, lm, reader, block: range) -> Iterator:
        while masked := [position for position in lm.masked if position in block]:
            rows = yield self._read(lm, block)
            proposals, confidence = propose(lm, rows, masked), self._confidences(rows, block)
            confidence |= proposals.confidence
            chances = self._chances(lm, [confidence[position] for position in block])
            accepted = [position for position in masked if chances[position - block.start] > self.accept]
            yield self._picture(lm, block, confidence, chances)
            yield fill(lm, proposals, sorted({*accepted, *proposals.ranked[:self.count]}))
            if self.end_prediction:
                yield from self._end(lm, rows, accepted)

    def _read(self, lm, block: range):
        """A forward over the canvas up to its predicted end."""
        if not self.end_prediction:
            return lm.read()
        stop = lm.length if self._stop is None else self._stop
        return lm.read(range(stop), range(lm.everything.start, stop), lm.new_states())

    def _confidences(self, rows, block: range) -> dict[int, float]:
        """The largest probability at each position, in float64; 1 behind the end."""
        read = block[:max(0, self._stop - block.start)] if self._stop else block
        largest = in_float64(rows.raw[list(read)]).softmax(-1).amax(-1).tolist()
        return dict.fromkeys(block, 1.0) | dict(zip(read, largest))

    def _chances(self, lm, confidence: list[float]) -> list[float]:
        """The filter's output for each position; positions beyond the canvas count as certain."""
        if self._filter is None:
            own, prefix = lm.fitted[self.name], f"{self.block_length}."
            self._filter = PositionFilter.of(
                {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}
            )
        beyond = [1.0] * (self.block_length - len(confidence))
        return self._filter.chances(confidence + beyond)[:len(confidence)]

    def _end(self, lm, rows, accepted: list[int]) -> Iterator:
        """Fill what is after the first accepted end token, or after the most confident proposed one."""
        ends = [position for position in accepted if lm.ends(lm.ids[position])]
        last = ends[0] if ends else self._predicted_end(lm, rows)
        later = [position for position in lm.masked if last is not None and position > last]
        if not later:
            return
        token = lm.ids[last] if ends else rows.best(last)
        yield Note(f"The end is predicted at position {last + 1}: masked positions after it are not read again.")
        yield lm.fill(later, [token] * len(later), [1.0] * len(later))
        words = [position for position, token in enumerate(lm.ids) if token is not None and not lm.ends(token)]
        self._stop = max([last, *words]) + 1

    def _predicted_end(self, lm, rows) -> int | None:
        """The masked position whose most probable token is an end token, with the largest probability."""
        ends = [position for position in lm.masked if lm.ends(rows.best(position))]
        p = {position: float(in_float64(rows.raw[position]).softmax(-1).amax()) for position in ends}
        return max(ends, key=p.__getitem__, default=None)

    def _picture(self, lm, block: range, confidence: dict[int, float], chances: list[float]) -> Figure:
        columns = [f"{i + 1} {'·' if lm.ids[i] is None else lm.piece(lm.ids[i]).strip()}" for i in block]
        masked = [lm.ids[i] is None for i in block]
        return Figure("matrix", "confidence, and what the filter makes of it", {
            "rows": ["confidence", "filter", f"filter above {self.accept:g}", f"confidence above {USUAL}"],
            "columns": columns,
            "values": [
                [confidence[i] for i in block], chances,
                [float(open and chance > self.accept) for open, chance in zip(masked, chances)],
                [float(open and confidence[i] >= USUAL) for open, i in zip(masked, block)],
            ],
        })
