"""Temperature by entropy."""
from collections.abc import Iterator

from torch import Tensor

from playground.contract import Sampler, knob
from playground.engine.sampling import MIN_TEMPERATURE, REMOVED, entropy
from playground.errors import Refusal
from playground.events import Event, Figure


class DynamicTemperature(Sampler):
    """Choose the temperature of each row by its entropy: low where the model is certain, high where it is not.

    The temperature is low + (high - low) * (H / H_max) ** exponent, where H_max is the entropy of a uniform
    distribution over the remaining tokens. Useful for more variety without errors in names, numbers and syntax, which a
    high temperature damages first. low = high is a fixed temperature. Kalomaze 2023, as in llama.cpp.
    """

    name, title, paper, sheet, rank = (
        "dynamic_temperature", "Dynamic temperature", "Kalomaze 2023", "sampling/sampling-baselines", 91
    )
    guarantee = ("collapses",)
    reads_text = False

    low: float = knob(0.3, 0.0, 5.0, step=0.05, help="temperature of a certain row; 0 is greedy there")
    high: float = knob(1.3, 0.0, 5.0, step=0.05, help="temperature of a uniform row")
    exponent: float = knob(1.0, 0.1, 4.0, step=0.1, help="above 1 keeps the temperature low up to a higher entropy")
    place: str = knob(
        "before cuts",
        choices=("before cuts", "after cuts"),
        help="relative to samplers that truncate: before, or after as in llama.cpp",
    )

    @property
    def stage(self) -> str:
        return "temperature" if self.place == "before cuts" else "truncation"

    def check(self):
        if self.low > self.high:
            raise Refusal("low must not exceed high, the temperature of a uniform row: choose a smaller value.", "low")

    def apply(self, scores, histories):
        return scores / self.temperatures(scores)[:, None].clamp(min=MIN_TEMPERATURE)

    def temperatures(self, scores: Tensor) -> Tensor:
        """The temperature of each row, [n]; `low` if a single token is left."""
        most = (scores > REMOVED).sum(-1).clamp(min=2).to(scores.dtype).log()
        return self.low + (self.high - self.low) * (entropy(scores) / most).clamp(0, 1) ** self.exponent

    def explain(self, scores, history, token) -> Iterator[Event]:
        chosen = float(self.temperatures(scores[None])[0])
        yield Figure("scalar", "temperature", {"x": len(history) - self.start, "series": {"temperature": chosen}})
