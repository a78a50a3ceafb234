"""Temperature."""
from playground.contract import Sampler, knob
from playground.engine import sampling


class Temperature(Sampler):
    """Divide the scores by t before drawing: below 1 the likely gets likelier, above 1 chances even out.

    At t = 0 the largest score is taken; at t = 1 the row is drawn from as the model gave it. Where other samplers cut
    rows, it matters who comes first: a high temperature after the cut flattens only what was kept. Ackley et al. 1985.
    """

    name, title, paper, sheet, rank = (
        "temperature",
        "Temperature",
        "Ackley et al. 1985",
        "sampling/sampling-baselines",
        90,
    )
    guarantee = ("collapses",)

    t: float = knob(0.8, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; 0 is greedy")
    place: str = knob(
        "before cuts",
        choices=("before cuts", "after cuts"),
        help="against samplers that cut rows: as transformers has it, or llama.cpp",
    )

    @property
    def stage(self) -> str:
        return "temperature" if self.place == "before cuts" else "truncation"

    def apply(self, scores, histories):
        return sampling.temperature(scores, self.t)
