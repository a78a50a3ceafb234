"""Tail-free sampling."""
from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED


class TailFree(Sampler):
    """Truncate where the curve of the sorted probabilities becomes flat; the tail after that point is removed.

    The absolute second differences of the probabilities, in descending order, are normalised and summed up; tokens are
    kept until the sum exceeds z. The most probable token always stays, the least probable never does. Useful where the
    number of plausible continuations varies, since the shape of the distribution decides, not a fixed number or share.
    z = 1 keeps all tokens, and so does a distribution without curvature. Phénix and Egan 2019.
    """

    name, title, paper, sheet = "tail_free", "Tail-free", "Phénix and Egan 2019", "sampling/sampling-baselines"
    guarantee = ("collapses",)
    reads_text = False

    z: float = knob(0.95, 0.0, 1.0, step=0.01, help="share of the curvature that is kept; 1 keeps all tokens")

    def apply(self, scores, histories):
        if self.z >= 1 or scores.shape[-1] < 3:
            return scores
        p, order = scores.softmax(-1).sort(descending=True, stable=True)
        curvature = p.diff().diff().abs()
        total = curvature.sum(-1, keepdim=True)
        out = (curvature.cumsum(-1) > self.z * total) & (total > 0)
        tail = scores.new_zeros(scores.shape, dtype=bool)
        tail[:, 1:-1], tail[:, -1:] = out, total > 0
        return scores.masked_fill(tail.scatter(-1, order, tail.clone()), REMOVED)
