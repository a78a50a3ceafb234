"""Fast-dLLM: several tokens per forward where the model is confident, and states reused within a block."""
from playground.algorithms.diffusion.block_loop import BlockDecoder, FullReader, exact_reader
from playground.algorithms.diffusion.cached_reading import DualReader, PrefixReader
from playground.algorithms.diffusion.proposals import Proposals, above, by_factor
from playground.contract import knob


class FastDLLM(BlockDecoder):
    """Fill every position of the block whose confidence reaches a threshold, and read only a part of the canvas again.

    Rule factor fills the n most confident positions for the largest n with (n + 1)(1 - c_n) below the factor, so that
    more tokens need more confidence each. The first forward of a block reads the whole canvas; the others reuse the
    states before the block (prefix), or all except the block's own (dual). With full attention these states go stale,
    so the caches are approximations; a model that sees block by block keeps the states of finished blocks, which is
    exact. Fast-dLLM: Wu et al. 2025, arXiv 2505.22618; version 2, of such models, arXiv 2509.26328.
    """

    name, title, paper, sheet = "fast_dllm", "Fast-dLLM", "2505.22618", "diffusion/mdlm-baseline"
    guarantee, attention = ("heuristic",), ("full", "block")

    cache: str = knob("dual", choices=("none", "prefix", "dual"), help="which states are reused within a block")
    refresh: int = knob(0, 0, 32, step=1, help="read everything in every n-th forward of a block; 0 only in its first")
    rule: str = knob("threshold", choices=("threshold", "factor"), help="which positions are filled in one forward")
    threshold: float = knob(0.9, 0.0, 1.05, step=0.05, help="rule threshold: confidence to fill; above 1 one at a time")
    factor: float = knob(1.0, 0.1, 3.0, step=0.1, help="rule factor: larger fills more positions per forward")

    def reader(self, lm):
        if self.cache == "none":
            return FullReader(lm)
        if lm.block_length:
            return exact_reader(lm)
        return (PrefixReader if self.cache == "prefix" else DualReader)(lm, self.refresh)

    def choose(self, lm, proposals: Proposals, block: range) -> list[int]:
        if self.rule == "factor":
            return by_factor(proposals, self.factor)
        return above(proposals, self.threshold)
