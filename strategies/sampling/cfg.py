"""Classifier-free guidance."""
from collections.abc import Iterator

from playground.contract import Sampler, knob
from playground.events import Event, Figure, Note


class CFG(Sampler):
    """Amplify the effect of the prompt: move the log-probabilities away from those without it, or with a negative
    prompt.

    The score is ln n + scale * (ln p - ln n), where p has read the prompt and n only its last token or, if there is a
    negative prompt, the prompt with that instruction before it. One more forward per token. Useful for a model that
    follows its prompt too loosely; a large scale causes exaggeration and repetition. scale = 1 changes nothing, scale =
    0 is n alone. The choice stays argmax unless another sampler draws. There is no plausibility constraint. Sanchez et
    al. 2023, arXiv 2306.17806, as in the transformers library.
    """

    name, title, paper, sheet = "cfg", "Classifier-free guidance", "2306.17806", "sampling/guidance"
    stage, draws, streams, guarantee = "mix", False, ("negative",), ("collapses",)

    scale: float = knob(1.5, 0.0, 5.0, step=0.1, help="strength of the guidance; 1 changes nothing")
    negative: str = knob(
        "", multiline=True, help="instruction to move away from; if empty, from the model without a prompt"
    )

    def instructions(self):
        return {"negative": self.negative} if self.negative.strip() else {}

    @property
    def unprompted(self):
        return () if self.negative.strip() else ("negative",)

    def mix(self, rows):
        guided, away = rows["target"].log_softmax(-1), rows["negative"].log_softmax(-1)
        return away + self.scale * (guided - away)

    def observe(self, rows, token, position) -> Iterator[Event]:
        mixed = self.mix({name: row[None] for name, row in rows.items()})[0]
        named = {"with the prompt": rows["target"], "moved away from": rows["negative"], "guided": mixed}
        series = {name: float(row.softmax(-1)[token]) for name, row in named.items()}
        yield Figure("scalar", "probability of the chosen token", {"x": position, "series": series})
        best, first = int(mixed.argmax()), int(rows["target"].argmax())
        if best != first:
            yield Note(f"The guidance ranks {self.piece(best)!r} above {self.piece(first)!r}.")
