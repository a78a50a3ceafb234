"""Top-a sampling."""
from playground.contract import Sampler, knob
from playground.engine import sampling


class TopA(Sampler):
    """Truncate to tokens with at least a times the square of the highest probability.

    Where the model is certain, the threshold is close to a; where it is not, the threshold falls with the square,
    faster than that of min-p, so that uncertain positions keep more tokens. a = 0 keeps all; the most probable token
    always stays. BlinkDL 2022, RWKV-LM.
    """

    name, title, paper, sheet = "top_a", "Top-a", "BlinkDL 2022", "sampling/sampling-baselines"
    guarantee = ("collapses",)
    reads_text = False

    a: float = knob(0.2, 0.0, 1.0, step=0.01, help="factor of the squared highest probability; 0 keeps all tokens")

    def apply(self, scores, histories):
        return sampling.floor(scores, self.a * scores.softmax(-1).amax(-1, keepdim=True) ** 2)
