"""Dream's sampler: the canvas is filled on a schedule of times, without blocks."""
from collections.abc import Iterator

import torch

from playground.algorithms.diffusion.proposals import Proposals, fill
from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.engine.sampling import in_float64

LAST = 1e-3  # time at which the schedule ends


class Dream(CanvasDecoder):
    """Fill a share of the masked positions in each step, anywhere on the canvas.

    Times fall from 1 to 0.001 in equal steps. From time t to s a share 1 - s / t of the masked positions is filled,
    rounded down, and in the last step all; a step that fills none still costs a forward. Rule origin fills each
    position with that probability instead. The others rank positions by the probability of the proposed token
    (maskgit_plus), by its lead over the second (topk_margin) or by negative entropy, all of the distribution after
    temperature; with an order temperature, positions are drawn from the softmax of their scores. Dream 7B: Ye et al.
    2025, arXiv 2508.15487.
    """

    name, title, paper, sheet = "dream", "Dream's sampler", "2508.15487", "diffusion/mdlm-baseline"
    guarantee = ("heuristic",)

    steps: int = knob(0, 0, 512, step=1, help="forwards for the whole answer; 0 takes one per position")
    rule: str = knob(
        "entropy", choices=("origin", "maskgit_plus", "topk_margin", "entropy"), help="which positions are filled first"
    )
    order_temperature: float = knob(0.0, 0.0, 2.0, step=0.1, help="0 takes the best positions; above it draws them")
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="0 takes the top token; 1 samples from the model")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        steps = self.steps or lm.length
        times = torch.linspace(1, LAST, steps + 1, dtype=torch.float64).tolist()
        for step, (time, following) in enumerate(zip(times, times[1:])):
            if not lm.masked:
                return
            share = 1.0 if step == steps - 1 else 1 - following / time
            rows = yield lm.read()
            proposals = self._proposals(lm, rows)
            if chosen := self._chosen(lm, rows, proposals, share):
                yield fill(lm, proposals, chosen)

    def _proposals(self, lm, rows) -> Proposals:
        """A token for each masked position, with its probability after temperature."""
        tokens = {position: lm.pick(rows, position) for position in lm.masked}
        return Proposals(tokens, {i: float(self._distribution(rows, i)[token]) for i, token in tokens.items()})

    def _chosen(self, lm, rows, proposals: Proposals, share: float) -> list[int]:
        masked = list(proposals.tokens)
        if self.rule == "origin":
            return [position for position in masked if lm.flip(share, position, "order")[0]]
        scores = {position: self._score(rows, proposals, position) for position in masked}
        count = int(len(masked) * share)
        if not self.order_temperature:
            return sorted(masked, key=lambda position: -scores[position])[:count]
        return _drawn(lm, {i: score / self.order_temperature for i, score in scores.items()}, count)

    def _score(self, rows, proposals: Proposals, position: int) -> float:
        if self.rule == "maskgit_plus":
            return proposals.confidence[position]
        p = self._distribution(rows, position)
        if self.rule == "topk_margin":
            first, second = p.topk(2).values.tolist()
            return first - second
        return float(-torch.special.entr(p).sum())

    def _distribution(self, rows, position: int) -> torch.Tensor:
        """The distribution after temperature, or the model's own at temperature 0, [V] in float64."""
        return in_float64(rows.p[position] if self.temperature else rows.raw[position].softmax(-1))


def _drawn(lm, scores: dict[int, float], count: int) -> list[int]:
    """`count` positions, drawn without replacement from the softmax of their scores."""
    left, drawn = dict(scores), []
    for _ in range(count):
        weights = torch.tensor(list(left.values()), dtype=torch.float64).softmax(-1)
        position = list(left)[lm.draw(weights, len(drawn), "order")]
        drawn.append(position)
        del left[position]
    return drawn
