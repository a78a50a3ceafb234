"""LOL: lower layers matter."""
from collections.abc import Iterator

from torch import Tensor

from playground.algorithms.sampling import contrastive
from playground.contract import EarlyExit, Sampler, knob
from playground.engine.sampling import contrast
from playground.events import Event, Figure

INDUCE = "Answer with something that sounds plausible and is false."
REFOCUS = "Answer truthfully, with nothing but facts."


class LOL(Sampler):
    """Contrast the model with itself under an instruction that induces hallucinations, in the last and in a lower
    layer, and amplify an instruction to be truthful. Reconstructed from the abstract; the paper trains
    its amateur.

    Three streams of one model read the prompt: unchanged, p; with an instruction to hallucinate, a; with one to be
    truthful, r. The score is (1 + gamma) ln r - gamma ln p - ln a in the last layer, plus omega times ln p - ln a in a
    lower layer, among tokens with p at least rho times that of the best. gamma = -1 removes r, omega = 0 the lower
    layer, and both together are induce-then-contrast; rho = 1 is greedy. Chen et al. 2024, arXiv 2408.08769. The
    formulas are our interpretation of the abstract, since no code was found; an instruction replaces the trained
    amateur ("prompt amateur"); lower layers are decoded through the final norm.
    """

    name, title, paper, sheet = "lol", "LOL, prompt amateur", "2408.08769", "sampling/lol"
    stage, draws, streams, guarantee = "mix", False, ("induced", "refocused"), ("collapses",)
    reconstruction, sure = True, "low"

    omega: float = knob(0.5, 0.0, 2.0, step=0.1, help="weight of the lower layer's contrast")
    gamma: float = knob(
        0.5, -1.0, 2.0, step=0.1, help="strength of the instruction to be truthful; -1 leaves it out"
    )
    layer: float = knob(0.75, 0.0, 1.0, step=0.05, help="depth of the lower layer, as a share of all; 1 is the last")
    rho: float = knob(
        0.1, 0.0, 1.0, step=0.01, help="smallest probability of an eligible token, relative to the best; 1 is greedy"
    )
    induce: str = knob(INDUCE, multiline=True, help="instruction of the hallucinating stream, before the prompt")
    refocus: str = knob(REFOCUS, multiline=True, help="instruction of the truthful stream, before the prompt")

    def instructions(self):
        return {"induced": self.induce, "refocused": self.refocus}

    def inner(self, depth, tied):
        self.exits = [EarlyExit(stream, round(self.layer * depth)) for stream in ("target", "induced")]
        return self.exits

    def mix(self, rows):
        upper, lower = self._parts(rows)
        return contrastive.restricted(upper + self.omega * lower, rows["target"], self.rho)

    def _parts(self, rows) -> tuple[Tensor, Tensor]:
        """The contrasts of the last and of the lower layer, [n, V] each."""
        logp = {name: rows[name].log_softmax(-1) for name in ("target", *self.streams, *self.exits)}
        refocused, (own, induced) = contrast(logp["refocused"], logp["target"], self.gamma), self.exits
        return refocused - logp["induced"], logp[own] - logp[induced]

    def observe(self, rows, token, position) -> Iterator[Event]:
        single = {name: row[None] for name, row in rows.items()}
        upper, lower = (float(part[0, token]) for part in self._parts(single))
        yield Figure(
            "scalar",
            "contrasts of the chosen token, nats",
            {"x": position, "series": {"last layer": upper, "lower layer": self.omega * lower}},
        )
        probabilities = {
            name: float(rows[stream].softmax(-1)[token])
            for name, stream in (("as asked", "target"), ("induced", "induced"), ("truthful", "refocused"))
        }
        yield Figure("scalar", "probability of the chosen token", {"x": position, "series": probabilities})
        yield from contrastive.contrast_events(
            rows["target"], rows["induced"], self.mix(single)[0], self.rho, position, self.piece
        )
