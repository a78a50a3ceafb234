"""Token editing: a forward that fills masks may also replace tokens that the block already holds."""
from collections.abc import Iterator

from playground.algorithms.diffusion.block_loop import end_block, exact_reader
from playground.algorithms.diffusion.proposals import Proposals
from playground.contract import CanvasDecoder, knob
from playground.engine.sampling import in_float64
from playground.events import Figure


class TokenEditing(CanvasDecoder):
    """Fill confident positions, and in the same forward replace earlier tokens of the block that the model now doubts.

    Every forward proposes a token for all positions of the block. A mask is filled if its proposal is above the
    threshold, or is the most probable one; a filled position takes its proposal if that differs and is above the
    edit threshold. The prompt and finished blocks are never edited. Once no mask is left the block is edited until
    nothing changes, for a limited number of forwards, the last of which only confirms it. Edit threshold 1 is plain
    threshold decoding. The bundled denoisers were not trained to correct themselves, as LLaDA 2.1 was. The penalty
    lowers the logit of a position's left neighbour there, against stutter. Greedy, as the joint threshold of SGLang.
    LLaDA 2.1: Bie et al. 2026, arXiv 2602.08676.
    """

    name, title, paper, sheet = "token_editing", "Token editing", "2602.08676", "diffusion/token-editing"
    guarantee, attention = ("heuristic",), ("full", "block")

    threshold: float = knob(0.5, 0.0, 1.0, step=0.05, help="probability above which a mask is filled; 1 one at a time")
    edit_threshold: float = knob(
        0.0, 0.0, 1.0, step=0.05, help="probability above which another token replaces one; 1 replaces none"
    )
    edits: int = knob(16, 0, 64, step=1, help="forwards for a block after its last mask is filled")
    penalty: float = knob(0.0, 0.0, 10.0, step=0.5, help="taken from the logit of the token to the left")
    block_length: int = knob(32, 1, 128, step=1, help="positions in a block; blocks are filled from left to right")

    def decode(self, lm) -> Iterator:
        reader = exact_reader(lm)
        for block in lm.blocks(self.block_length):
            yield from self._settle(lm, reader, block)
            yield from end_block(lm, block)
        yield lm.complete()

    def _settle(self, lm, reader, block: range) -> Iterator:
        """Run forwards until the block holds no mask and no proposal changes it, or its edits are used up."""
        left = self.edits if self.edit_threshold < 1 else 0
        for step in range(len(block) + self.edits):
            masked = [position for position in block if lm.ids[position] is None]
            if not masked:
                if not left:
                    return
                left -= 1
            rows = yield reader.read(block, list(block), step)
            proposed = self._proposed(lm, rows, block)
            changed = self.changed(lm, proposed, masked)
            if not changed:
                return
            yield _changes(step, len(set(changed) & set(masked)), len(set(changed) - set(masked)))
            taken = proposed.of(changed)
            yield lm.revise(taken.tokens, taken.confidence)

    def changed(self, lm, proposed: Proposals, masked: list[int]) -> list[int]:
        """The positions that take their proposal, ascending."""
        open_ones = proposed.of(masked)
        filled = [i for i, c in open_ones.confidence.items() if c > self.threshold] or open_ones.ranked[:1]
        replaced = [
            i for i, token in proposed.tokens.items()
            if i not in open_ones.tokens and token != lm.ids[i] and proposed.confidence[i] > self.edit_threshold
        ]
        return sorted(filled + replaced)

    def _proposed(self, lm, rows, block: range) -> Proposals:
        """The most probable token of every position of the block, and its probability."""
        logits = in_float64(rows.raw[list(block)])
        for row, left in enumerate(block[:-1], 1):
            if lm.ids[left] is not None:
                logits[row, lm.ids[left]] -= self.penalty
        confidence, tokens = logits.softmax(-1).max(-1)
        return Proposals(dict(zip(block, tokens.tolist())), dict(zip(block, confidence.tolist())))


def _changes(step: int, filled: int, replaced: int) -> Figure:
    """Counts of one forward."""
    return Figure("scalar", "positions that change in each forward of a block", {
        "x": step, "axis": "forward", "series": {"filled": filled, "replaced": replaced},
    })
