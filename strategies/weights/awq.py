"""AWQ: quantisation that spares the weights of large inputs."""
from playground.algorithms.weights.grouped_rounding import SCALE_BITS, WHOLE, rounded, stored_bits
from playground.contract import CalibratedChange, ChangedWeight, knob

SMALLEST = 1e-4  # scale of an input that is almost always 0


class AWQ(CalibratedChange):
    """Scale up the weights of large inputs before rounding, and those inputs down, so that they round more finely.

    Each input channel has the scale of its mean magnitude to the power of an exponent, and the exponent between 0 and 1
    with the least output error on calibration texts is taken; 0 is round to nearest. Here each layer has scales of its
    own, which count as bits, and the weights are stored with the scaling undone; the authors share scales between
    layers with the same input, fold them into the norm before, and search for clipping of the grid as well, which is
    left out. Lin et al. 2023, arXiv 2306.00978.
    """

    name, title, paper, sheet = "awq", "AWQ", "2306.00978", "weights/quantization-evaluation"
    adjective, guarantee, needs = "AWQ-quantised", ("heuristic",), ("corpus",)

    bits: int = knob(4, 2, 16, step=1, help="bits of a weight; 16 rounds nothing")
    group: int = knob(64, 0, 1024, step=16, help="inputs that share a scale; 0: all of a row")
    symmetric: bool = knob(False, help="a grid that is symmetric around 0, without zero points")
    exponents: int = knob(20, 1, 100, step=1, help="exponents that are tried, from 0; 1 is round to nearest")

    def changed(self, weight, inputs):
        if self.bits == WHOLE:
            return ChangedWeight(weight, WHOLE)
        size, gram = inputs.abs().mean(0).clamp(min=SMALLEST), inputs.T @ inputs
        tried = [self._rounded(weight, size ** (number / self.exponents)) for number in range(self.exponents)]
        best = min(tried, key=lambda new: output_error(new - weight, gram))
        bits = stored_bits(self.bits, self.group, weight.shape[1], self.symmetric)
        return ChangedWeight(best, bits + SCALE_BITS / len(weight))

    def _rounded(self, weight, size):
        """The weights rounded under scales of their inputs [in], whose range is centred at 1."""
        scale = size / (size.max() * size.min()).sqrt()
        return rounded(weight * scale, self.bits, self.group, self.symmetric) / scale


def output_error(change, gram):
    """The sum of squares of the change [out, in] times all inputs, whose products with each other are `gram`."""
    return float((change @ gram * change).sum())
