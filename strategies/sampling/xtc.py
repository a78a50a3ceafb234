"""XTC: exclude top choices."""
import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED


class XTC(Sampler):
    """With a given probability, remove every likely token except the least likely of them, so that the text becomes
    less predictable but remains plausible.

    Tokens with a probability of at least `threshold` are likely; if there are fewer than two, nothing is removed. If a
    line break or an end token would be removed, nothing is, so that paragraphs and texts still end; `exempt` off is the
    variant of llama.cpp, without this exception. probability = 0 changes nothing. It is applied after the truncation
    samplers, which limit how unlikely the spared token can be. p-e-w 2024, text-generation-webui pull request 6335.
    """

    name, title, paper, sheet = "xtc", "XTC (exclude top choices)", "p-e-w 2024", "sampling/xtc"
    guarantee = ("collapses",)

    threshold: float = knob(0.1, 0.0, 0.5, step=0.01, help="smallest probability of a likely token")
    probability: float = knob(0.5, 0.0, 1.0, step=0.05, help="how often likely tokens are removed; 0 changes nothing")
    exempt: bool = knob(True, help="remove nothing if a line break or an end token would be removed")

    def apply(self, scores, histories):
        top = self.top_choices(scores)
        applies = [self._applies(row, history) for row, history in zip(top, histories)]
        return scores.masked_fill(top & torch.tensor(applies, device=scores.device)[:, None], REMOVED)

    def top_choices(self, scores: torch.Tensor) -> torch.Tensor:
        """The likely tokens of each row without the least likely of them, bool [n, V]; ties spare the lowest id."""
        p = scores.softmax(-1)
        likely = (p >= self.threshold) & (p > 0)  # removed tokens reach a threshold of 0, too
        spared = p.masked_fill(~likely, 2.0).argmin(-1, keepdim=True)
        return likely.scatter(-1, spared, False)

    def _applies(self, top: torch.Tensor, history: list[int]) -> bool:
        """Whether to remove the tokens `top`, bool [V]. Flips only if there are any and all may be removed."""
        tokens = top.nonzero()[:, 0].tolist()
        if not tokens or self.exempt and any(map(self._keeps_form, tokens)):
            return False
        return self.flip(self.probability, history)

    def _keeps_form(self, token: int) -> bool:
        return token in self.end_ids or self.piece(token) == "\n"
