"""TCCF: think in large blocks, then check and answer in small ones, with the same weights."""
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from playground.algorithms.diffusion.block_loop import end_block, exact_reader
from playground.algorithms.diffusion.proposals import Proposals, above, bounded_mean, fill, propose
from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.errors import Refusal
from playground.events import Figure, Note

GLUE = "\n\nNow check the steps above for mistakes and give the final answer.\n"


@dataclass
class DraftedBlock:
    """A block that is filled but not yet written: its end may be cut off.

    passes: what was filled in each forward; raw: the logits [G, V] of the filled positions, NaN elsewhere.
    """

    passes: list[Proposals] = field(default_factory=list)
    raw: torch.Tensor | None = None

    @property
    def tokens(self) -> dict[int, int]:
        """The filled positions and their tokens, ascending."""
        found = {position: token for one in self.passes for position, token in one.tokens.items()}
        return dict(sorted(found.items()))

    @property
    def confidences(self) -> list[float]:
        """Confidences of what was filled, in order."""
        return [confidence for one in self.passes for confidence in one.confidence.values()]

    def add(self, rows, chosen: Proposals) -> None:
        """Add what one forward fills."""
        self.raw = torch.full_like(rows.raw, float("nan")) if self.raw is None else self.raw
        self.raw[list(chosen.tokens)] = rows.raw[list(chosen.tokens)]
        self.passes.append(chosen)


class TCCF(CanvasDecoder):
    """Write a first text in large blocks, append a request to check it, and continue in small blocks.

    Stage one ends at the stop text, at an end token, which is dropped, or after its share of the canvas; stage two at
    an end token. Both fill by a threshold: fixed, or following the confidences in the block between two bounds (BACD).
    The states of stage one are computed again, since other blocks see other positions; small blocks of one position
    decode from left to right. On a model that sees the whole canvas only the order of filling changes. With blocks of
    one position in both stages this is autoregressive decoding with the request inserted. The request is part of the
    method: compare with equal block lengths. Think coarse, critic fine: Lu et al. 2026, arXiv 2602.09555.
    """

    name, title, paper, sheet = "tccf", "Think coarse, critic fine", "2602.09555", "diffusion/block-diffusion-tts"
    guarantee, attention = ("heuristic",), ("full", "block")

    coarse: int = knob(16, 1, 64, step=1, help="positions in a block of the first stage")
    fine: int = knob(1, 1, 64, step=1, help="positions in a block of the second stage")
    share: float = knob(0.67, 0.1, 0.9, step=0.01, help="largest share of the canvas for the first stage")
    stop: str = knob("</think>", help="text that ends the first stage, and is kept")
    request: str = knob(GLUE, multiline=True, help="text between the stages")
    rule: str = knob("bounded", choices=("bounded", "threshold"), help="bounded: the threshold follows the confidences")
    low: float = knob(0.6, 0.0, 1.05, step=0.05, help="rule bounded: lower bound of the threshold")
    high: float = knob(0.9, 0.0, 1.05, step=0.05, help="upper bound of the threshold, or the fixed one")
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="0 takes the top token; 1 samples from the model")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        request = lm.spell(self.request)
        room = int(self.share * (lm.length - len(request)))
        if room < 1:
            raise Refusal(
                f"The request between the stages has {len(request)} tokens, and the canvas {lm.length}: allow more "
                "tokens, or shorten the request.",
                "max_new_tokens",
            )
        lm.attend_in_blocks(self.coarse)
        thought = yield from self._think(lm, room)
        yield Note(f"Stage one wrote {thought} tokens in blocks of {self.coarse}; the request and stage two follow.")
        if request:
            lm.based_on(None)
            yield lm.fill(range(thought, thought + len(request)), request, [1.0] * len(request))
        lm.attend_in_blocks(self.fine)
        yield from self._answer(lm, thought + len(request))

    def _think(self, lm, room: int) -> Iterator:
        """Write stage one; returns its length."""
        reader, text = exact_reader(lm), ""
        for block in lm.blocks(self.coarse):
            block = range(block.start, min(block.stop, room))
            draft = yield from self._draft(lm, reader, block)
            kept = []
            for position, token in draft.tokens.items():
                if lm.ends(token):
                    break
                kept.append(position)
                text += lm.piece(token)
                if self.stop and self.stop in text:
                    break
            yield from _write(lm, draft, kept)
            if len(kept) < len(block) or self.stop and self.stop in text or block.stop == room:
                return block.start + len(kept)
        return room

    def _answer(self, lm, start: int) -> Iterator:
        """Write stage two, from `start` to the end of the canvas."""
        reader = exact_reader(lm)
        for block in lm.blocks(self.fine, start):
            draft = yield from self._draft(lm, reader, block)
            yield from _write(lm, draft, list(draft.tokens))
            yield from end_block(lm, block)

    def _draft(self, lm, reader, block: range) -> Iterator:
        """Run forwards until every position of the block has a token; returns the `DraftedBlock`."""
        draft = DraftedBlock()
        while masked := [position for position in block if position not in draft.tokens]:
            rows = yield reader.read(block, masked, len(draft.passes), draft.tokens)
            proposals = propose(lm, rows, masked)
            threshold = self._threshold(draft.confidences, proposals)
            yield Figure("scalar", "threshold", {"x": masked[0], "series": {"threshold": threshold}})
            draft.add(rows, proposals.of(above(proposals, threshold)))
        return draft

    def _threshold(self, filled: list[float], proposals: Proposals) -> float:
        if self.rule == "threshold":
            return self.high
        return bounded_mean(filled, proposals.confidence.values(), self.low, self.high)


def _write(lm, draft: DraftedBlock, positions: list[int]) -> Iterator:
    """Fill some positions of a draft, in the order in which it was made."""
    lm.based_on(lm.rows_of(draft.raw))
    for one in draft.passes:
        if kept := [position for position in one.tokens if position in positions]:
            yield fill(lm, one, kept)
