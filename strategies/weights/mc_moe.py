"""MC-MoE's quantisation: experts get more bits the more they are used and the more rounding harms them."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from playground.algorithms.weights.grouped_rounding import WHOLE, rounded, stored_bits
from playground.contract import CalibratedChange, ChangedWeight, RouterReading, knob
from playground.errors import Refusal

EXPERTS = ".experts."  # in the names of their matrices


class MCMoE(CalibratedChange):
    """Round the experts of a mixture to different numbers of bits, which an integer program gives out in each layer.

    An expert costs f^alpha w^beta e^gamma at a number of bits: how often calibration tokens choose it, how probable the
    router finds it then, and how far the layer's output moves when this expert alone is rounded. Of three numbers of
    bits each expert gets one, so that the sum of costs is least, the mean within the budget, and each of the two larger
    ones given to some expert. Attention gets bits of its own; router, norms and embeddings stay. Rounding is to the
    nearest value, where the authors use GPTQ. Their second half, which leaves out second experts while a text is
    written, is not part of this. Huang et al. 2024, arXiv 2410.06270.
    """

    name, title, paper, sheet = "mc_moe", "MC-MoE: bits by expert", "2410.06270", "weights/mc-moe"
    adjective, guarantee, needs = "rounded expert by expert", ("heuristic",), ("corpus", "experts")

    budget: float = knob(3.0, 1.0, 16.0, step=0.125, help="bits of an expert's weight, on average over a layer; 16 "
                                                          "rounds none")
    lowest: int = knob(2, 1, 6, step=1, help="fewest bits of an expert; the others get one or two more")
    attention: int = knob(4, 1, 16, step=1, help="bits of attention; 16 rounds nothing")
    group: int = knob(64, 0, 1024, step=16, help="inputs that share a scale; 0: all of a row")
    alpha: float = knob(1.0, 0.0, 3.0, step=0.25, help="exponent of how often an expert is chosen")
    beta: float = knob(1.5, 0.0, 3.0, step=0.25, help="exponent of its probability")
    gamma: float = knob(2.0, 0.0, 3.0, step=0.25, help="exponent of the output error")

    @property
    def widths(self) -> list[int]:
        return [self.lowest, self.lowest + 1, self.lowest + 2]

    def changed(self, weight, inputs):
        return self._rounded(weight, self.attention)

    def change(self, blocks):
        if not any(EXPERTS in name for name in blocks.layers):
            raise Refusal("This model has no experts whose weights can be read: choose a mixture of experts, such as "
                          "pocket-moe.", self.name)
        for block in blocks:
            if self.budget < WHOLE and (routed := block.routed()):
                self._change_experts(blocks, routed)
            for name in block.layers:
                if EXPERTS not in name:
                    blocks.put(name, *self.changed(blocks.weight(name), None))

    def _change_experts(self, blocks, routed: RouterReading) -> None:
        matrices = [tuple(map(blocks.weight, names)) for names in routed.names]
        picks = cheapest(costs(self, matrices, routed), self.widths, int(self.budget * len(matrices) + 1e-9))
        for names, own, pick in zip(routed.names, matrices, picks):
            for name, weight in zip(names, own):
                blocks.put(name, *self._rounded(weight, self.widths[pick]))

    def _rounded(self, weight: Tensor, bits: int) -> ChangedWeight:
        if bits == WHOLE:
            return ChangedWeight(weight, WHOLE)
        return ChangedWeight(rounded(weight, bits, self.group, False),
                             stored_bits(bits, self.group, weight.shape[1], False))

    def moved(self, own: tuple[Tensor, Tensor], routed: RouterReading, index: int) -> list[float]:
        """How far the output of the layer moves, over all tokens, when one expert alone has each number of bits."""
        rows, places = (routed.chosen == index).nonzero(as_tuple=True)
        inputs, gates = routed.inputs[rows].float(), routed.gates[rows, places, None].float()
        before = routed.experts.apply(*own, inputs)
        after = (routed.experts.apply(*(self._rounded(weight, bits).weight for weight in own), inputs)
                 for bits in self.widths)
        return [float((gates * (each - before)).norm()) for each in after]


def costs(change: MCMoE, matrices: Sequence[tuple[Tensor, Tensor]], routed: RouterReading) -> list[list[float]]:
    """The cost of each expert at each number of bits. matrices: both of each expert."""
    often, probable = usage(routed)
    return [[float(often[index]) ** change.alpha * float(probable[index]) ** change.beta * error ** change.gamma
             for error in change.moved(own, routed, index)] for index, own in enumerate(matrices)]


def usage(routed: RouterReading) -> tuple[Tensor, Tensor]:
    """Of each expert, its shares of the choices, and of the probabilities of chosen experts over all experts."""
    chosen = routed.probabilities.new_zeros(routed.probabilities.shape).scatter_(1, routed.chosen, 1.0)
    often, probable = chosen.sum(0), (chosen * routed.probabilities).sum(0)
    return often / often.sum(), probable / probable.sum()


def cheapest(costs: Sequence[Sequence[float]], widths: Sequence[int], most: int) -> list[int]:
    """Which of three widths each expert takes: the sum of costs is least, that of widths at most `most`, and the second
    and third width occur. Of equal sums the first in the order of experts. Raises Refusal if nothing fits.
    """
    fewest = len(costs) * widths[0] + 3
    if most < fewest or len(costs) < 2:
        raise Refusal(f"{len(costs)} experts with {widths[0]} bits and two with more take "
                      f"{fewest / max(1, len(costs)):.3g} bits on average: raise budget, or lower lowest.", "budget")
    paths: dict[tuple[int, frozenset[int]], tuple[float, tuple[int, ...]]] = {(0, frozenset()): (0.0, ())}
    for own in costs:
        grown: dict[tuple[int, frozenset[int]], tuple[float, tuple[int, ...]]] = {}
        for (spent, used), (cost, picks) in paths.items():
            for pick, width in enumerate(widths):
                key, path = (spent + width, used | {pick}), (cost + own[pick], (*picks, pick))
                if key[0] <= most:
                    grown[key] = min(path, grown.get(key, path))
        paths = grown
    return list(min(path for (_, used), path in paths.items() if {1, 2} <= used)[1])
