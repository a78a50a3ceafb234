"""Epsilon sampling."""
from playground.contract import Sampler, knob
from playground.engine import sampling


class Epsilon(Sampler):
    """Truncate to tokens with a probability of at least epsilon; the most probable one always stays.

    A fixed threshold truncates flat distributions more than peaked ones: among hundreds of plausible tokens each is
    improbable. epsilon = 0 keeps all. Hewitt et al. 2022, arXiv 2210.15191.
    """

    name, title, paper, sheet, rank = "epsilon", "Epsilon", "2210.15191", "sampling/sampling-baselines", 6
    guarantee = ("collapses",)
    reads_text = False

    epsilon: float = knob(
        0.0009, 0.0, 0.1, step=0.0001, help="smallest probability, usually 0.0003 to 0.0009; 0 keeps all"
    )

    def apply(self, scores, histories):
        return sampling.floor(scores, scores.new_tensor(self.epsilon))
