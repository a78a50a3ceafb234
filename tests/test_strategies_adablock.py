"""AdaBlock-dLLM: which positions it fills, by its rule, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.algorithms.diffusion.proposals import Proposals
from playground.events import Figure
from strategies.diffusion.adablock import AdaBlock
from support.canvases import denoiser, forwards, run


class Window:
    """A lane that proposes a newline at some positions."""

    length = 32

    def __init__(self, delimiters: dict[int, float]):
        self.given = Proposals(
            {i: int(i in delimiters) for i in range(32)}, {i: delimiters.get(i, .9) for i in range(32)}
        )

    def piece(self, token: int) -> str:
        return "\n" if token else "x"


@pytest.mark.oracle("adablock")
@pytest.mark.parametrize("threshold, length", [(.3, 7), (.65, 12)])
def test_the_most_confident_delimiter_of_the_window_ends_the_block(threshold, length):
    lane = Window({2: .35, 6: .60, 20: .99})  # the window is a quarter of the canvas, 8 positions
    assert AdaBlock(delimiter_threshold=threshold, block_length=12)._length(lane, lane.given, 0) == length


class FirstDelimiter(AdaBlock):
    """Wrong: the first delimiter ends the block."""

    def _length(self, lm, given, start):
        return next(i for i in given.tokens if self._delimits(lm, given.tokens[i])) - start + 1


@pytest.mark.refuses("adablock")
def test_the_first_delimiter_gives_another_block():
    lane = Window({2: .35, 6: .60})
    assert FirstDelimiter()._length(lane, lane.given, 0) == 3 != AdaBlock()._length(lane, lane.given, 0)


def test_the_last_block_is_clipped_and_the_search_shares_its_forward_with_the_first_fill():
    events = run(denoiser(), "adablock", threshold=0.0, delimiter_threshold=1.05, block_length=8)
    borders = [event.data["series"]["positions"] for event in events if isinstance(event, Figure)]
    assert borders == [8, 6] and len(forwards(events)) == 2
