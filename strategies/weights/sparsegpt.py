"""SparseGPT: pruning whose errors the weights that follow make up for."""
from playground.algorithms.weights.pruning_masks import PATTERNS, UNSTRUCTURED, lowest, outside_pattern, pruned_bits
from playground.algorithms.weights.second_order import compensated
from playground.contract import CalibratedChange, ChangedWeight, knob


class SparseGPT(CalibratedChange):
    """Prune weights column by column, and change the columns that follow so that outputs stay close.

    As in GPTQ, the change follows the inverse Hessian of the inputs on calibration texts. Which weights are pruned is
    decided for a block of columns when its first one is reached: those whose removal costs least, w squared by the
    diagonal of the inverse. With a pattern N:M the blocks are its groups of M inputs. Frantar and Alistarh 2023,
    arXiv 2301.00774.
    """

    name, title, paper, sheet = "sparsegpt", "SparseGPT", "2301.00774", "weights/compressing-truth"
    adjective, guarantee, needs = "pruned by SparseGPT", ("heuristic",), ("corpus",)

    sparsity: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the weights of each block that become zero")
    pattern: str = knob(UNSTRUCTURED, choices=PATTERNS, help="N:M keeps N of M inputs, whatever the sparsity")
    block: int = knob(128, 8, 1024, step=8, help="columns whose weights are compared with each other")
    damping: float = knob(0.01, 0.0001, 1.0, help="added to the diagonal of the Hessian, as a share of its mean")

    def changed(self, weight, inputs):
        if self.pattern == UNSTRUCTURED and not self.sparsity:
            return ChangedWeight(weight, pruned_bits(0, self.pattern))
        size, masks = self._block, []

        def settle(at, new, factor):
            if at % size == 0:
                costs = new[:, at:at + size] / factor.diagonal()[at:at + size]
                masks.append(self._mask(costs.square()))
            return new[:, at].masked_fill(masks[-1][:, at % size], 0)

        new = compensated(weight, inputs, self.damping, settle)
        return ChangedWeight(new, pruned_bits(float((new == 0).float().mean()), self.pattern))

    @property
    def _block(self):
        return self.block if self.pattern == UNSTRUCTURED else int(self.pattern.split(":")[1])

    def _mask(self, costs):
        """Which weights of a block [out, columns] are pruned."""
        if self.pattern == UNSTRUCTURED:
            return lowest(costs.flatten(), self.sparsity).view_as(costs)
        return outside_pattern(costs, self.pattern)
