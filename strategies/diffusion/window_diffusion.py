"""Window-Diffusion: only masked positions just after the filled ones are computed, and those far away are left out."""
from __future__ import annotations

from collections.abc import Iterator

from playground.algorithms.diffusion.proposals import Proposals, above, fill, most_confident, propose
from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.events import Note


class WindowDiffusion(CanvasDecoder):
    """Read the filled positions and a window of masked ones, of which only the first are computed in most forwards.

    A phase begins with a forward over the filled positions and the next masked ones (`visible`); positions further away
    are not attended to. In the other forwards of the phase the first masked positions (`active`) are computed, with the
    positions filled since the phase began; all others keep their states. An end token cuts the canvas after it. This is
    the general form of the method; the released code for LLaDA reads the whole canvas at the start of a phase
    (`far_field`). Window-Diffusion, 2026; code by vhicrgit.
    """

    name, title, paper, sheet = "window_diffusion", "Window-Diffusion", "vhicrgit 2026", "diffusion/window-diffusion"
    guarantee, sure = ("heuristic",), "medium"

    visible: int = knob(32, 1, 256, step=1, help="masked positions that are attended to, from left to right")
    active: int = knob(8, 1, 256, step=1, help="masked positions that are computed in every forward, at most visible")
    phase: int = knob(8, 1, 64, step=1, help="forwards in a phase; 1 computes everything visible in every forward")
    slide: bool = knob(True, help="the active positions move on as masks are filled")
    far_field: bool = knob(False, help="the first forward of a phase reads the whole canvas")
    threshold: float = knob(1.05, 0.0, 1.05, step=0.05, help="confidence to fill; above 1 one position per forward")
    stop_at_end: bool = knob(True, help="an end token fills all later positions")
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="0 takes the top token; 1 samples from the model")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        while lm.masked:
            states, begun = lm.new_states(), lm.masked
            for step in range(self.phase):
                active = self._active(lm, begun)
                if not active:
                    break
                filled_now = [position for position in begun if position not in lm.masked]
                computed = self._visible(lm, begun) if step == 0 else [*active, *filled_now, *lm.sources(active)]
                proposals = propose(lm, (yield lm.read(active, sorted({*computed}), states)), active)
                yield fill(lm, proposals, self._chosen(proposals))
                yield from self._cut(lm)

    def _visible(self, lm, masked: list[int]) -> list[int]:
        """Positions that take part in a phase that begins with these masks."""
        if self.far_field:
            return list(lm.everything)
        hidden = set(masked[self.visible:])
        return [position for position in lm.everything if position not in hidden]

    def _active(self, lm, begun: list[int]) -> list[int]:
        """Masked positions to predict: of those that were visible when the phase began."""
        window = [position for position in begun[:self.visible] if position in lm.masked]
        return window[:self.active] if self.slide else [i for i in begun[:self.active] if i in lm.masked]

    def _chosen(self, proposals: Proposals) -> list[int]:
        return most_confident(proposals, 1) if self.threshold > 1 else above(proposals, self.threshold)

    def _cut(self, lm) -> Iterator:
        """Fill everything after the first end token that has no mask before it."""
        first = min(lm.masked, default=0)
        ends = [token for token in lm.ids[:first] if lm.ends(token)]
        if self.stop_at_end and ends:
            yield Note("The text has ended: its end token fills all later positions, without a forward.")
            yield lm.fill(lm.masked, [ends[0]] * len(lm.masked), [1.0] * len(lm.masked))
