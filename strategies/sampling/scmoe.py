"""SCMoE: a mixture of experts, contrasted with itself under a weak choice of experts."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.contrastive import FAR, contrast_events, plausible
from playground.contract import Sampler, knob
from playground.events import Event, Figure

WEAK = "weak_experts"


class SelfContrast(Sampler):
    """Contrast a mixture of experts with itself: its usual experts against a single one of fixed rank in every layer.

    The weak pass runs only the expert of rank `weak`, 1 for the best, at every position of prompt and text, with a KV
    cache of its own. Among the tokens at least alpha times as probable as the best, the score is (1 + beta) z_s - beta
    z_w of the logits of both passes. beta 0 and alpha 1 are greedy decoding. `strong` is the number of experts of the
    strong pass, 0 for the model's own. The choice stays argmax unless another sampler draws. Each token takes two
    forwards. Shi et al. 2024, arXiv 2405.14507.
    """

    name, title, paper, sheet = "scmoe", "Self-contrast of experts (SCMoE)", "2405.14507", "sampling/scmoe"
    stage, draws, streams, guarantee = "mix", False, (WEAK,), ("collapses",)
    needs = ("experts",)

    beta: float = knob(0.5, 0.0, 2.0, step=0.1, help="strength of the contrast; 0 is greedy decoding")
    alpha: float = knob(
        0.1, 0.001, 1.0, step=0.001, help="smallest probability of an eligible token, relative to the best; 1 is greedy"
    )
    weak: int = knob(2, 1, 64, step=1, help="rank of the only expert of the weak pass; 1 is the best")
    strong: int = knob(0, 0, 64, step=1, help="experts of the strong pass; 0: as many as the model uses")

    def routings(self):
        strong = {"target": tuple(range(1, self.strong + 1))} if self.strong else {}
        return {WEAK: (self.weak,), **strong}

    def mix(self, rows):
        strong, weak = rows["target"], rows[WEAK]
        scores = (1 + self.beta) * strong - self.beta * weak
        # tokens that are not eligible are far below, so that a grammar which allows no others still has a choice
        return torch.where(plausible(strong, self.alpha), scores, strong.log_softmax(-1) - FAR)

    def observe(self, rows, token, position) -> Iterator[Event]:
        strong, weak = rows["target"].log_softmax(-1), rows[WEAK].log_softmax(-1)
        kl = float(torch.nan_to_num(strong.exp() * (strong - weak)).sum())
        yield Figure("scalar", "KL divergence of the weak pass, in nats", {"x": position, "series": {"KL": kl}})
        mixed = self.mix({name: row[None] for name, row in rows.items()})[0]
        yield from contrast_events(rows["target"], rows[WEAK], mixed, self.alpha, position, self.piece)
