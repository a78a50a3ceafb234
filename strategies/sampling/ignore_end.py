"""Suppression of the end tokens."""
from playground.contract import Sampler
from playground.engine.sampling import REMOVED


class IgnoreEnd(Sampler):
    """Remove the end tokens from every row, so that the text runs to its maximum length.

    Their probability goes to the other tokens. Stop strings and the end of a grammar still end the text: where an end
    token is the only one left, it stays. Useful to measure speed at a fixed length, and to see what a model generates
    beyond its end token. The choice stays argmax unless another sampler draws. A baseline, as `--ignore-eos` of
    llama.cpp.
    """

    name, title, paper, sheet = "ignore_end", "Ignore end of text", "baseline", "sampling/logit-processors"
    stage, rank, draws = "penalty", 13, False
    guarantee = ("heuristic",)

    def apply(self, scores, histories):
        ends = [end for end in self.end_ids if end < scores.shape[-1]]
        left = scores.clone()
        left[:, ends] = REMOVED
        return left.where((left > REMOVED).any(-1, keepdim=True), scores)
