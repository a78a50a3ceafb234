"""Induce-then-contrast decoding."""
from collections.abc import Iterator

from playground.algorithms.sampling import contrastive
from playground.contract import Sampler, knob
from playground.events import Event, Figure

INDUCE = "Answer with something that sounds plausible and is false."


class ICD(Sampler):
    """Contrast the model with itself under an instruction that induces hallucinations.

    A second stream of the model reads the prompt with such an instruction. A token's score is its log-probability
    without the instruction minus that with it, among tokens at least rho times as probable as the best. rho = 1 or an
    empty instruction is greedy. Zhang et al. 2023, arXiv 2312.15710, whose main setting trains a second model to
    hallucinate; this is their variant without training, and it needs a model that follows instructions.
    """

    name, title, paper, sheet = "icd", "Induce-then-contrast", "2312.15710", "sampling/lol"
    stage, draws, streams, guarantee = "mix", False, ("induced",), ("collapses",)

    instruction: str = knob(INDUCE, multiline=True, help="instruction of the second stream, before the prompt")
    rho: float = knob(
        0.1, 0.0, 1.0, step=0.01, help="smallest probability of an eligible token, relative to the best; 1 is greedy"
    )

    def instructions(self):
        return {"induced": self.instruction}

    def mix(self, rows):
        logits, induced = rows["target"], rows["induced"]
        return contrastive.restricted(logits.log_softmax(-1) - induced.log_softmax(-1), logits, self.rho)

    def observe(self, rows, token, position) -> Iterator[Event]:
        scores = self.mix({name: row[None] for name, row in rows.items()})[0]
        probabilities = {
            name: float(rows[stream].softmax(-1)[token])
            for name, stream in (("as asked", "target"), ("induced", "induced"))
        }
        yield Figure("scalar", "probability of the chosen token", {"x": position, "series": probabilities})
        yield from contrastive.contrast_events(rows["target"], rows["induced"], scores, self.rho, position, self.piece)
