"""DExperts: an expert and an anti-expert."""
from collections.abc import Iterator

from playground.algorithms.sampling import contrastive
from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED, top_p
from playground.events import Event, Figure

EXPERT = "Answer with short and simple words."
ANTI_EXPERT = "Answer with long and difficult words."


class DExperts(Sampler):
    """Steer a model by the difference between an expert and an anti-expert, prompted by two opposite instructions.

    The logits become z + alpha (expert - anti-expert), among the tokens in the nucleus of the unsteered model. Two more
    forwards per token. Useful where both directions of a property can be described, such as formal and casual. alpha =
    0 only applies the nucleus; so do two equal instructions, whose difference is zero. The choice stays argmax unless
    another sampler draws. Liu et al. 2021, arXiv 2105.03023, whose experts are small models trained on the two kinds of
    text; here the model itself is given two instructions, which needs a model that follows them.
    """

    name, title, paper, sheet = "dexperts", "DExperts, prompted", "2105.03023", "sampling/guidance"
    stage, draws, streams, guarantee = "mix", False, ("expert", "anti_expert"), ("collapses",)
    reconstruction, sure = True, "medium"

    alpha: float = knob(1.0, -5.0, 5.0, step=0.1, help="strength of the steering; 0 disables it, below 0 reverses it")
    p: float = knob(0.9, 0.0, 1.0, step=0.01, help="nucleus of the unsteered model; 1 keeps all tokens, 0 is greedy")
    expert: str = knob(EXPERT, multiline=True, help="instruction of the expert, before the prompt")
    anti_expert: str = knob(ANTI_EXPERT, multiline=True, help="instruction of the anti-expert, before the prompt")

    def instructions(self):
        return {"expert": self.expert, "anti_expert": self.anti_expert}

    def mix(self, rows):
        logits = rows["target"]
        steered = logits + self.alpha * (rows["expert"] - rows["anti_expert"])
        # tokens outside the nucleus get far lower scores but are not removed: a grammar may allow nothing else
        return steered.where(top_p(logits, self.p) > REMOVED, logits.log_softmax(-1) - contrastive.FAR)

    def observe(self, rows, token, position) -> Iterator[Event]:
        mixed = self.mix({name: row[None] for name, row in rows.items()})[0]
        named = {"unsteered": rows["target"], "expert": rows["expert"], "anti-expert": rows["anti_expert"],
                 "steered": mixed}
        series = {name: float(row.softmax(-1)[token]) for name, row in named.items()}
        yield Figure("scalar", "probability of the chosen token", {"x": position, "series": series})
