"""Temperature."""
from playground.contract import Sampler, knob
from playground.engine import sampling


class Temperature(Sampler):
    """Divide the scores by t before sampling: below 1 sharpens the distribution, above 1 flattens it.

    At t = 0 the largest score is taken; at t = 1 the scores are unchanged. The order relative to truncation matters: a
    high temperature after a truncation flattens only the tokens kept. Ackley et al. 1985.
    """

    name, title, paper, sheet, rank = (
        "temperature",
        "Temperature",
        "Ackley et al. 1985",
        "sampling/sampling-baselines",
        90,
    )
    guarantee = ("collapses",)
    reads_text = False

    t: float = knob(0.8, 0.0, 5.0, step=0.05, help="below 1 sharpens, above 1 flattens; 0 is greedy")
    place: str = knob(
        "before cuts",
        choices=("before cuts", "after cuts"),
        help="relative to samplers that truncate: before as in transformers, or after as in llama.cpp",
    )

    @property
    def stage(self) -> str:
        return "temperature" if self.place == "before cuts" else "truncation"

    def apply(self, scores, histories):
        return sampling.temperature(scores, self.t)
