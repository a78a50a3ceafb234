"""Elastic-Cache: states are computed again where and when attention has changed."""
from __future__ import annotations

from collections.abc import Iterator

from playground.algorithms.diffusion.attention_drift import AXES, AttentionDrift
from playground.algorithms.diffusion.proposals import above, fill, propose
from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.events import Figure, Note

COLUMNS = 32  # forwards in the picture of the layers
REUSED, CHANGED, COMPUTED = 0.0, 0.5, 1.0


class ElasticCache(CanvasDecoder):
    """Compute a sliding window of masked positions, and everything only in layers after one whose attention changed.

    After a first whole forward, each forward computes the first masked positions (`window`), those filled last, and the
    filled positions that got most of the attention in each layer. In each layer the attention of the latter is compared
    with that of the forward before; once the cosine similarity falls below gamma, all later layers compute every
    position. gamma above 1 does so from the second layer on in every forward, 0 never does, and refresh 1 reuses
    nothing. Positions of the window whose confidence reaches the threshold are filled, at least one. Elastic-Cache:
    Nguyen-Tri et al. 2025, arXiv 2510.14973; the axis of the cosine is the paper's, `heads` that of its code.
    """

    name, title, paper, sheet = "elastic_cache", "Elastic-Cache", "2510.14973", "diffusion/elastic-cache"
    guarantee, sure = ("heuristic",), "medium"

    gamma: float = knob(0.9, 0.0, 1.05, step=0.05, help="similarity of attention below which layers compute everything")
    window: int = knob(16, 1, 128, step=1, help="masked positions that are computed and may be filled, the first ones")
    threshold: float = knob(0.9, 0.0, 1.05, step=0.05, help="confidence to fill; above 1 one position per forward")
    tracked: int = knob(1, 1, 4, step=1, help="filled positions per layer whose attention is compared")
    far_cache: bool = knob(True, help="masked positions beyond the window are reused; otherwise all are computed")
    axis: str = knob("keys", choices=(*AXES,), help="axis of the attention weights along which the cosine is taken")
    refresh: int = knob(0, 0, 32, step=1, help="compute everything in every n-th forward; 0 only in the first")
    stop_at_end: bool = knob(True, help="the first end token fills all later masked positions")
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="0 takes the top token; 1 samples from the model")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        drift = AttentionDrift(lm.new_states(), self.gamma, self.tracked, self.axis)
        step, filled, layers = 0, [], []
        while lm.masked:
            window, whole = lm.masked[:self.window], self._is_whole(step)
            drift.begin(*(self._absolute(lm, some) for some in (window, lm.masked)), whole)
            computed = None if whole else self._computed(lm, drift, window, filled)
            proposals = propose(lm, (yield lm.read(window, computed, drift.states)), window)
            layers.append(_course(drift))
            yield from self._shown(lm, drift, step, layers)
            filled = above(proposals, self.threshold)
            yield fill(lm, proposals, filled)
            yield from self._cut(lm, filled)
            step += 1

    def _is_whole(self, step: int) -> bool:
        return step == 0 or bool(self.refresh) and step % self.refresh == 0

    def _computed(self, lm, drift: AttentionDrift, window: list[int], filled: list[int]) -> list[int]:
        """Positions that pass through the first layer: tracked ones, those filled last, and masked ones."""
        tracked = [position + lm.everything.start for position in drift.watched]
        masked = window if self.far_cache else lm.masked
        return sorted({*tracked, *filled, *masked, *lm.sources(masked)})

    def _absolute(self, lm, positions: list[int]) -> list[int]:
        """Positions counted from the beginning of the prompt."""
        return [position - lm.everything.start for position in positions]

    def _cut(self, lm, filled: list[int]) -> Iterator:
        """The first end token fills all masked positions after it; those before it remain masked."""
        ends = [position for position, token in enumerate(lm.ids) if token is not None and lm.ends(token)]
        later = [position for position in lm.masked if ends and position > ends[0]]
        if self.stop_at_end and later and set(ends) <= set(filled):
            yield Note("An end token was filled: it fills all later positions, without a forward.")
            yield lm.fill(later, [lm.ids[ends[0]]] * len(later), [1.0] * len(later))

    def _shown(self, lm, drift: AttentionDrift, step: int, layers: list[list[float]]) -> Iterator:
        """What each layer computed in the last forwards, and the similarity that decided."""
        depth, first = drift.depth, max(0, step + 1 - COLUMNS)
        yield Figure("matrix", "layers: 0 reused states, 0.5 found that attention changed, 1 computed everything", {
            "rows": [f"layer {layer + 1}" for layer in range(depth)],
            "columns": [str(number + 1) for number in range(first, step + 1)],
            "values": [[course[layer] for course in layers[first:]] for layer in range(depth)],
        })
        if drift.similarity:
            yield Figure("scalar", "lowest similarity of attention in a layer", {
                "x": step + 1, "axis": "forward", "series": {"similarity": min(drift.similarity)},
                "lines": {"gamma": self.gamma},
            })
        if drift.boundary and drift.boundary < depth:
            yield Note(_finding(lm, drift))


def _course(drift: AttentionDrift) -> list[float]:
    """What each layer did in the last forward."""
    reused = drift.depth if drift.boundary is None else drift.boundary
    course = [REUSED] * reused + [COMPUTED] * (drift.depth - reused)
    if drift.boundary:
        course[drift.boundary - 1] = CHANGED
    return course


def _finding(lm, drift: AttentionDrift) -> str:
    layer, start = drift.boundary, lm.everything.start
    position = drift.most_attended[layer - 1][0]
    piece = lm.piece((lm.tokens[:-start] + [*lm.ids])[position])
    return (
        f"Attention changed in layer {layer} (similarity {drift.similarity[-1]:.2f}), which now attends most to "
        f"{piece!r}: the later layers compute every position."
    )
