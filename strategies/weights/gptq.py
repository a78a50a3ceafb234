"""GPTQ: quantisation whose errors the weights that follow make up for."""
from playground.algorithms.weights.grouped_rounding import WHOLE, RoundingGrid, group_size, stored_bits
from playground.algorithms.weights.second_order import compensated
from playground.contract import CalibratedChange, ChangedWeight, knob


class GPTQ(CalibratedChange):
    """Round weights column by column, and change the columns that are not rounded yet so that outputs stay close.

    The output error of a layer on calibration texts is quadratic in its weights. After a column is rounded, the best
    change of the others follows the inverse Hessian of the inputs; one Cholesky factor has all that is needed. The grid
    of a group is found when its first column is reached, from the weights as they are then. Layers of later blocks read
    what the rounded blocks before them put out. Columns are taken in their order, not by the size of their inputs as an
    option of the released code does. Frantar et al. 2022, arXiv 2210.17323.
    """

    name, title, paper, sheet = "gptq", "GPTQ", "2210.17323", "weights/quantization-evaluation"
    adjective, guarantee, needs = "GPTQ-quantised", ("heuristic",), ("corpus",)

    bits: int = knob(4, 2, 16, step=1, help="bits of a weight; 16 rounds nothing")
    group: int = knob(64, 0, 1024, step=16, help="inputs that share a scale; 0: all of a row")
    symmetric: bool = knob(False, help="a grid that is symmetric around 0, without zero points")
    damping: float = knob(0.01, 0.0001, 1.0, help="added to the diagonal of the Hessian, as a share of its mean")

    def changed(self, weight, inputs):
        if self.bits == WHOLE:
            return ChangedWeight(weight, WHOLE)
        size, grids = group_size(self.group, weight.shape[1]), []

        def settle(at, new, factor):
            if at % size == 0:
                grids.append(RoundingGrid.of(new[:, at:at + size], self.bits, self.symmetric))
            return grids[-1].round(new[:, at:at + 1])[:, 0]

        new = compensated(weight, inputs, self.damping, settle)
        return ChangedWeight(new, stored_bits(self.bits, self.group, weight.shape[1], self.symmetric))
