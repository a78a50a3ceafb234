"""Round-to-nearest quantisation of weights."""
from playground.algorithms.weights.grouped_rounding import WHOLE, rounded, stored_bits
from playground.contract import ChangedWeight, WeightChange, knob


class RoundToNearest(WeightChange):
    """Round each weight to the nearest value of a grid of a few bits, without any calibration.

    Each group of consecutive inputs of a row has a scale of its own, and a zero point unless the grid is symmetric. The
    grid spans the group, so nothing is clipped and no weight moves by more than half a step. One bit is the sign. Only
    linear layers within decoder layers are rounded; embeddings and lm_head stay. The weights are rounded in place and
    computed with as before, so nothing becomes faster. The baseline of Jin et al. 2024, arXiv 2402.16775.
    """

    name, title, paper, sheet = "rtn", "Round to nearest", "2402.16775", "weights/quantization-evaluation"
    adjective, guarantee = "rounded to nearest", ("heuristic",)

    bits: int = knob(4, 1, 16, step=1, help="bits of a weight; 16 rounds nothing")
    group: int = knob(64, 0, 1024, step=16, help="inputs that share a scale; 0: all of a row")
    symmetric: bool = knob(False, help="a grid that is symmetric around 0, without zero points")

    def changed(self, weight, inputs):
        if self.bits == WHOLE:
            return ChangedWeight(weight, WHOLE)
        new = rounded(weight, self.bits, self.group, self.symmetric)
        return ChangedWeight(new, stored_bits(self.bits, self.group, weight.shape[1], self.symmetric))
