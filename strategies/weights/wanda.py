"""Wanda: pruning by weights and activations."""
from playground.algorithms.weights.pruning_masks import PATTERNS, UNSTRUCTURED, lowest, outside_pattern, pruned_bits
from playground.contract import CalibratedChange, ChangedWeight, knob


class Wanda(CalibratedChange):
    """Set to zero the weights whose magnitude times the norm of their input is smallest.

    The norm is taken over calibration texts, and weights are compared within a row, as the inputs of one output. The
    others stay as they are. Blocks are pruned in order, each by the inputs that the pruned ones before it give. With
    equal norms it is pruning by magnitude within rows. Sun et al. 2023, arXiv 2306.11695.
    """

    name, title, paper, sheet = "wanda", "Wanda", "2306.11695", "weights/compressing-truth"
    adjective, guarantee, needs = "pruned by Wanda", ("heuristic",), ("corpus",)

    sparsity: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the weights of each row that become zero")
    pattern: str = knob(UNSTRUCTURED, choices=PATTERNS, help="N:M keeps N of M inputs, whatever the sparsity")

    def changed(self, weight, inputs):
        scores = weight.abs() * inputs.norm(dim=0)
        mask = (lowest(scores, self.sparsity) if self.pattern == UNSTRUCTURED
                else outside_pattern(scores, self.pattern))
        return ChangedWeight(weight.masked_fill(mask, 0), pruned_bits(float(mask.float().mean()), self.pattern))
