"""Plain sampling, with the usual chain of samplers."""
from collections.abc import Iterator

from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, Lane, Strategy, knob, make


class Sample(Decoder):
    """Sample each token from the model's distribution after the usual processors.

    Repetition penalty, temperature, top-k, top-p and min-p are applied in the order of the transformers library, and
    the token is sampled from the result. With every processor off this samples from the model itself; at temperature 0,
    top-k 1 or top-p 0 it is greedy. Holtzman et al. 2020, arXiv 1904.09751; min-p arXiv 2407.01082.
    """

    name, title, paper, sheet = "sample", "Sampling", "1904.09751", "sampling/sampling-baselines"
    guarantee = ("distribution_identical", "collapses")

    temperature: float = knob(0.8, 0.0, 5.0, step=0.05, help="below 1 sharpens, above 1 flattens; 0 is greedy")
    top_k: int = knob(0, 0, 1000, step=1, help="keep this many tokens; 0 keeps all")
    top_p: float = knob(0.95, 0.0, 1.0, step=0.01, help="keep the smallest set with this much probability; 1 keeps all")
    min_p: float = knob(
        0.0, 0.0, 1.0, step=0.01, help="keep tokens at least this probable, relative to the best; 0 keeps all"
    )
    repetition_penalty: float = knob(1.0, 0.8, 2.0, step=0.05, help="above 1 makes tokens seen before less likely")

    def toggles(self) -> list[Strategy]:
        return [
            make("repetition_penalty", penalty=self.repetition_penalty),
            make("temperature", t=self.temperature),
            make("top_k", k=self.top_k),
            make("top_p", p=self.top_p),
            make("min_p", m=self.min_p),
        ]

    def decode(self, lm: Lane) -> Iterator:
        return plain(lm)
