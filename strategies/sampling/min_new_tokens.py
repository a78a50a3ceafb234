"""A minimum length."""
import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED


class MinNewTokens(Sampler):
    """Remove the end tokens until the text has a minimum number of tokens.

    Stop strings and the end of a grammar still end the text: where an end token is the only one left, it stays. Useful
    against answers that end too early, and to measure texts of comparable length. The choice stays argmax unless
    another sampler draws. count = 0 changes nothing. A baseline, as `min_new_tokens` of the transformers library.
    """

    name, title, paper, sheet = "min_new_tokens", "Minimum new tokens", "baseline", "sampling/logit-processors"
    stage, rank, draws = "penalty", 12, False
    guarantee = ("collapses",)

    count: int = knob(32, 0, 1024, step=1, help="tokens before which the text does not end; 0 changes nothing")

    def apply(self, scores, histories):
        early = [len(history) - self.start < self.count for history in histories]
        ends = [end for end in self.end_ids if end < scores.shape[-1]]
        if not any(early) or not ends:
            return scores
        removed = torch.zeros_like(scores, dtype=torch.bool)
        removed[:, ends] = torch.tensor(early, device=scores.device)[:, None]
        left = scores.masked_fill(removed, REMOVED)
        return left.where((left > REMOVED).any(-1, keepdim=True), scores)
