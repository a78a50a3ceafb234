"""Adaptive weighted rejection sampling."""
from collections.abc import Callable, Iterator
from math import log

import torch

from playground.algorithms.search.particle_filter import NEVER, Particle, Redrawn
from playground.contract import Lane, knob
from playground.events import Figure, Note
from strategies.constrained.awrs.token_rejection import Tries, counting, first_legal, recursive

PEAKED = 2 / 3  # a row whose best token has this probability is estimated by counting
ENDLESS = 0


class AWRS(Redrawn):
    """Grow several texts under a grammar, and sample each token by rejection: a token sampled from the model is
    checked, and if the grammar rejects it, another one, so that few tokens of the vocabulary are ever checked.

    One or two trials beyond the first accepted token give an unbiased estimate of the allowed probability mass, which
    is multiplied into the text's weight. Texts are resampled and the answer is sampled by weight, as in `smc`, which
    computes the mass from the whole mask. Flat rows are tried without replacement with one further trial ("recursive");
    peaked ones are sampled with replacement until `accepts` tokens were accepted ("counting"). One text without weights
    is a plain mask. No mask is computed: the parser checks single tokens, and a black-box checker may replace it; after
    256 rejections at one position it checks the whole vocabulary. Any tokenisation of an allowed text is accepted, even
    where a mask allows only the tokenizer's own. Lipkin et al. 2025, arXiv 2504.05410, with the estimators of its
    library.
    """

    name, title, paper, sheet = "awrs", "Weighted rejection sampling", "2504.05410", "constrained/awrs"

    checks_tokens = True

    particles: int = knob(10, 1, 64, step=1, help="texts that grow side by side")
    weights: bool = knob(
        True,
        help="estimate the allowed mass; without it all texts have equal weights, which samples as a mask would",
    )
    estimate: str = knob(
        "by shape",
        choices=("by shape", "recursive", "counting"),
        help="by shape: counting if the best token has probability two thirds",
    )
    accepts: int = knob(
        2,
        2,
        8,
        step=1,
        help="accepted tokens when counting; more lower the variance and cost trials; above 2 every row is counted",
    )
    rejects: int = knob(
        ENDLESS, 0, 1000, step=1, help="rejections for one token after which a counted text is abandoned; 0 never"
    )

    def _steps(self, lm: Lane, growing: list[Particle], rows: list) -> Iterator:
        choices = []
        for particle, row in zip(growing, rows):
            choices.append(self._step(lm, particle, row))
            yield lm.pause()  # hundreds of trials for each
        return choices

    def _step(self, lm: Lane, particle: Particle, rows):
        p, position = rows.scores[0].cpu().double().softmax(-1), rows.length
        tries = Tries(p, rows.allows, lambda q: lm.draw(q, position, "try"))
        token, weight = self._tried(tries, lambda: lm.uniform(position, "refused before"))
        particle.weight += log(weight) if weight else NEVER
        particle.asked = tries.asked
        if particle.weight == NEVER:
            return None
        refused = [tried for tried, passed in tries.asked.items() if not passed]
        rows.add_stage("mask", rows.scores.index_fill(-1, torch.tensor(refused, device=rows.raw.device).long(), NEVER))
        return lm.choose(rows, token)

    def _tried(self, tries: Tries, uniform: Callable[[], float]) -> tuple[int | None, float]:
        if not self.weights:
            return first_legal(tries)
        shaped = self.estimate == "by shape" and (self.accepts > 2 or float(tries.p.max()) >= PEAKED)
        if shaped or self.estimate == "counting":
            return counting(tries, uniform, self.accepts, self.rejects or len(tries.p) ** 2)
        return recursive(tries)

    def _step_events(self, lm: Lane, growing: list[Particle], turn: int) -> Iterator:
        asked = [particle.asked for particle in growing]
        counts = {
            "tokens tried": sum(map(len, asked)) / len(asked),
            "refused": sum(not ok for tried in asked for ok in tried.values()) / len(asked),
        }
        yield Figure("scalar", "tries for a token, mean of the texts", {"x": turn, "axis": "step", "series": counts})
        for particle in growing:
            if refused := [lm.piece(token) for token, ok in particle.asked.items() if not ok]:
                passed = [lm.piece(token) for token, ok in particle.asked.items() if ok]
                yield Note(
                    f"{len(refused) + len(passed)} tries of {lm.vocabulary} tokens: refused {quoted(refused)}, passed"
                    f" {quoted(passed)}; log-weight {particle.weight:.2f}.",
                    particle.leaf.number,
                )


def quoted(pieces: list[str]) -> str:
    shown = ", ".join(map(repr, pieces[:6])) or "none"
    return f"{shown} and {len(pieces) - 6} more" if len(pieces) > 6 else shown
