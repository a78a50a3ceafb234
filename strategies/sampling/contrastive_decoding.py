"""Contrastive decoding with two models."""
import math
from collections.abc import Iterator

from torch import Tensor

from playground.algorithms.sampling.contrastive import contrast_events, plausible
from playground.contract import Decoder, Lane, knob
from playground.engine.sampling import REMOVED


class ContrastiveDecoding(Decoder):
    """Score tokens by the ratio of their probabilities under a large model and a small one.

    Among the tokens at least alpha times as probable as the large model's best, the score is ln p - ln a, where a is
    the small model's distribution at its own temperature. Useful for open-ended text, where both models favour short,
    generic and repetitive continuations; an implausible token that the small model underestimates by chance is favoured
    as well. alpha = 1 is greedy decoding of the large model. The target is the expert, the draft model the amateur. Li
    et al. 2022, arXiv 2210.15097, who search with beams; here the argmax is taken, or a sample if a sampler draws.
    """

    name, title, paper, sheet = "contrastive_decoding", "Contrastive decoding", "2210.15097", "sampling/guidance"
    needs, guarantee = ("draft",), ("heuristic", "collapses")

    alpha: float = knob(
        0.1, 0.0, 1.0, step=0.01, help="smallest probability of an eligible token, relative to the best; 1 is greedy"
    )
    temperature: float = knob(0.5, 0.1, 5.0, step=0.1, help="of the small model; above 1 weakens the contrast")

    def decode(self, lm: Lane) -> Iterator:
        amateur, rows = lm.stream("draft"), (yield lm.prefill())
        weaker = yield amateur.extend()
        while True:
            better, worse = rows.scores[-1], weaker.scores[-1]
            scores = contrasted(better, worse / self.temperature, self.alpha)
            yield from contrast_events(better, worse, scores, self.alpha, lm.generated, lm.piece)
            rows.add_stage(self.name, scores[None])
            yield lm.keep(lm.pick(rows))
            rows, weaker = yield lm.together(lm.extend(), amateur.extend())


def contrasted(better: Tensor, weaker: Tensor, alpha: float) -> Tensor:
    """ln p - ln a of the eligible tokens, -inf for the others, [V].

    A token that masks or samplers removed only from the amateur's row counts as the least probable token there.
    """
    logp, loga = better.log_softmax(-1), weaker.log_softmax(-1)
    least = loga[loga > REMOVED].min() if bool((loga > REMOVED).any()) else -math.log(len(loga))
    return (logp - loga.clamp(min=least)).masked_fill(~plausible(better, alpha) | (better == REMOVED), REMOVED)
