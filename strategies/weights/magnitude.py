"""Pruning by magnitude."""
from playground.algorithms.weights.pruning_masks import PATTERNS, UNSTRUCTURED, lowest, outside_pattern, pruned_bits
from playground.contract import ChangedWeight, WeightChange, knob


class Magnitude(WeightChange):
    """Set the weights with the smallest magnitude to zero, without any calibration.

    A share of each matrix, or, with a pattern N:M, all but the N largest of every M consecutive inputs of a row, which
    some GPUs compute faster. The other weights stay as they are. The baseline of pruning, Han et al. 2015,
    arXiv 1506.02626.
    """

    name, title, paper, sheet = "magnitude", "Magnitude pruning", "1506.02626", "weights/compressing-truth"
    adjective, guarantee = "pruned by magnitude", ("heuristic",)

    sparsity: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the weights of each matrix that become zero")
    pattern: str = knob(UNSTRUCTURED, choices=PATTERNS, help="N:M keeps N of M inputs, whatever the sparsity")

    def changed(self, weight, inputs):
        scores = weight.abs()
        if self.pattern == UNSTRUCTURED:
            mask = lowest(scores.flatten(), self.sparsity).view_as(weight)
        else:
            mask = outside_pattern(scores, self.pattern)
        return ChangedWeight(weight.masked_fill(mask, 0), pruned_bits(float(mask.float().mean()), self.pattern))
