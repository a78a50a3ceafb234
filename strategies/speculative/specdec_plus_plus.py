"""SpecDec++: keep drafting while all draft tokens will probably be accepted."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import accumulate
from operator import mul

from playground.algorithms.speculative.acceptance_head import (
    AcceptanceHead,
    DraftSamples,
    HeadCalibration,
    Training,
    learn,
)
from playground.algorithms.speculative.drafting import chain_until, new_tree
from playground.contract import Drafter, Lane, knob
from playground.events import Figure, Note

DRAWN, BEST = "drawn", "best"  # sampling and greedy lanes; each has its own head


class SpecDecPlusPlus(Drafter):
    """The draft model keeps drafting while all its draft tokens will probably be accepted, then the target verifies
    them.

    The probability that nothing is rejected is the product of the acceptance probabilities; drafting stops once one
    minus it exceeds h. The paper shows that a constant h is close to optimal. With `head`, acceptance is predicted by a
    small head on the draft's hidden states, trained for one pair of models (`python -m playground fit
    specdec_plus_plus` trains it for pairs other than the bundled one). The head sees a token only once the draft has
    read it, so the last one is sent without a prediction. `proxy` needs no training: it takes the draft's probability
    of the token, optionally calibrated by the acceptance rate of such tokens so far. `automatic` uses the head if one
    was trained for the loaded models, else the proxy.

    h = 1 drafts chains of fixed length, most = 0 is plain decoding. Every token that influenced the stop is sent to the
    target, so the output distribution is the target's own. Sampling and greedy lanes use separate heads, because
    acceptance differs; the paper's is for sampling. Rejections have weight six in training, and the bias this causes is
    corrected afterwards, so that predictions are calibrated; the paper leaves it to h. Huang et al. 2024, arXiv
    2405.19715.
    """

    name, title, paper, sheet = "specdec_plus_plus", "SpecDec++", "2405.19715", "speculative/specdec-plus-plus"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)
    reconstruction, sure = True, "medium"

    h: float = knob(0.3, 0.0, 1.0, step=0.05, help="probability of a rejection above which drafting stops; 1: never")
    least: int = knob(2, 1, 4, step=1, help="minimum draft tokens per round")
    most: int = knob(20, 0, 32, step=1, help="maximum draft tokens per round; 0 is plain decoding")
    predictor: str = knob(
        "automatic",
        choices=("automatic", "proxy", "head"),
        help="what predicts acceptance: the draft's own probability, or a head trained for this pair of models; "
        "automatic: the head if there is one",
    )
    estimate: str = knob(
        "corrected",
        choices=("corrected", "draft"),
        help="proxy: the draft's probability, or that probability calibrated by acceptance so far",
    )
    late: bool = knob(True, help="proxy: use the prediction of a token once the next is drafted, as with the head")

    def __post_init__(self):
        self._head, self._chain = None, None
        # of the last chain, by node: the head's prediction, and whether it was accepted if tested
        self._predicted, self._accepted = {}, {}

    @property
    def trained(self):
        return "set predictor to proxy, which needs no training" if self.predictor == "head" else ""

    @property
    def prefers_trained(self):
        return self.predictor == "automatic"

    @property
    def uses_head(self) -> bool:
        """Whether the head predicts acceptance in this run, not the proxy."""
        return self.predictor == "head" or self.prefers_trained and self.found_trained

    @property
    def reads_hidden(self):
        return ("draft",) if self.uses_head else ()

    @classmethod
    def train(cls, drawn: list[DraftSamples], best: list[DraftSamples], seed: int) -> Iterator[Figure | Note]:
        """Train a head on sampled draft tokens and one on greedy ones; returns the weights of both by name."""
        weights = {}
        for rule, texts in ((DRAWN, drawn), (BEST, best)):
            yield Note(f"The head for {'sampling' if rule == DRAWN else 'greedy'} lanes:")
            weights |= {
                f"{rule}.{name}": tensor for name, tensor in (yield from learn(texts, Training(), seed)).items()
            }
        return weights

    def propose(self, lm: Lane, budget) -> Iterator:
        yield from self._outcome(lm)
        self._begin(lm)
        tree = yield from chain_until(
            lm, lm.stream("draft"), new_tree(lm, self), min(self.most, budget), partial(self._ends, lm)
        )
        self._chain = tree
        if len(tree):
            yield from self._figures(lm, tree)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        for test in verdict.tests:
            self._accepted[test.node] = test.kept
            if not self.uses_head or test.node in self._predicted:
                self._calibration.learn(self._uncalibrated(tree)[test.node], test.kept)

    @cached_property
    def _calibration(self) -> HeadCalibration:
        return HeadCalibration()

    def _begin(self, lm: Lane) -> None:
        self._predicted, self._accepted = {}, {}
        if self.uses_head and not self._head:
            rule = f"{DRAWN if lm.chain.draws else BEST}."
            weights = {
                name.removeprefix(rule): tensor
                for name, tensor in lm.fitted[self.name].items()
                if name.startswith(rule)
            }
            self._head = AcceptanceHead.of(weights).to(lm.stream("draft").model.device)

    def _ends(self, lm: Lane, tree) -> bool:
        if self.uses_head:
            self._predict(lm, len(tree) - 2)
        return self._should_stop(tree)

    def _predict(self, lm: Lane, node) -> None:
        """Apply the head to the last draft token that the draft model has read; does nothing for the root."""
        if node >= 0:
            rows = lm.stream("draft").seen
            self._predicted[node] = float(self._head.chances(rows.hidden[rows.row(node)]))

    def _uncalibrated(self, tree) -> dict[int, float]:
        """The predicted acceptance of each draft token before calibration, by node."""
        return self._predicted if self.uses_head else dict(enumerate(tree.confidence))

    def _chances(self, tree) -> list[float]:
        """Probability of acceptance of each draft token; 1 if the head has not seen it."""
        if self.uses_head:
            return [self._predicted.get(node, 1.0) for node in range(len(tree))]
        return [self._calibration.chance(q) if self.estimate == "corrected" else q for q in tree.confidence]

    def survival(self, chances: list[float]) -> list[float]:
        """Probability, after each draft token, that all so far are accepted; the last counts as 1 if its prediction
        comes too late.
        """
        known = [*chances[:-1], 1.0] if self.late or self.uses_head else chances
        return list(accumulate(known, mul))

    def _should_stop(self, tree) -> bool:
        return len(tree) >= self.least and 1 - self.survival(self._chances(tree))[-1] > self.h

    def _figures(self, lm: Lane, tree) -> Iterator[Figure]:
        """Probability of full acceptance after each draft token, the draft length, and the calibration."""
        survival = self.survival(self._chances(tree))
        yield Figure(
            "bars",
            "probability that all draft tokens so far are accepted",
            {"labels": list(map(lm.piece, tree.tokens)), "values": survival},
        )
        series, lines = {"all accepted": survival[-1]}, {"1 - h": 1 - self.h}
        yield Figure(
            "scalar",
            "predicted probability that all draft tokens are accepted",
            {"x": lm.generated, "series": series, "lines": lines},
        )
        yield Figure(
            "scalar",
            "draft length",
            {"x": lm.generated, "series": {"draft tokens": len(tree)}, "lines": {"maximum": self.most}},
        )
        if any(self._calibration.tested):
            yield self._calibration.figure(
                "the head's prediction" if self.uses_head else "the draft's own probability"
            )

    def _outcome(self, lm: Lane) -> Iterator[Figure]:
        """Prediction and outcome of each tested token of the last chain."""
        tested = [node for node in self._accepted if not self.uses_head or node in self._predicted]
        if tested:
            chances = self._chances(self._chain)
            columns = [f"{node + 1} {lm.piece(self._chain.tokens[node])}" for node in tested]
            values = [[chances[node] for node in tested], [float(self._accepted[node]) for node in tested]]
            yield Figure(
                "matrix",
                "the last chain: predicted and actual acceptance",
                {"rows": ["predicted", "accepted"], "columns": columns, "values": values},
            )
