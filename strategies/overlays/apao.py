"""Where beam search dropped the right answer."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch

from playground.algorithms.overlays.token_figures import bars, over_tokens, shaded
from playground.contract import ReadsAnotherText, WatchesBeams, knob
from playground.errors import Refusal
from playground.events import Branches, Commit, Note


class Survivors(NamedTuple):
    """The beams after one step: their texts, and their summed log-probabilities in nats."""

    texts: list[list[int]]
    sums: list[float]
    ranks: list[float]  # by which the search chooses: the sums, perhaps divided by a power of the length


class Apao(WatchesBeams, ReadsAnotherText):
    """Show where beam search dropped the beginning of a known right answer, and by how much.

    The answer is read token by token. Its prefix survives a step if one of the beams begins with it; the colour is its
    rank among them, and full once it is gone. A search error is an answer that would have ranked above the text that
    was found, a model error one that would not. Figures show the sums of log-probabilities against those of the best
    and of the last beam, each token's loss, and the weight of each prefix in APAO's loss: its mean loss over the sum of
    these, the release's default. This is the diagnosis alone, ours; APAO itself trains another model, decoded by the
    same search. Yu et al. 2026, arXiv 2603.02730.
    """

    name, title, paper, sheet = "apao", "Dropped prefixes (APAO)", "2603.02730", "overlays/apao"
    new_in, reconstruction, sure = "2026", True, "medium"
    decoders = ("beam_search",)

    answer: str = knob(" a king", help="the right answer, as it follows the prompt, with a leading space if it has one")

    _found = _written = None
    _steps = ()

    def check(self) -> None:
        if not self.answer:
            raise Refusal("There is no right answer to follow: write the text that should follow the prompt.", "answer")

    def continuation(self, text, model):
        self._found = text
        ended = text.tokens[-1:] if text.tokens[-1] in text.ends else []
        return [*model.tokens.spell(self.answer)[:model.context - text.start - len(ended)], *ended]

    def begin(self, text, model):
        self._text, self._losses = text, []
        self._right = text.tokens[text.start:]

    def watch(self, event):
        if self._written is None:
            self._written, self._steps = {0: []}, []  # tokens by sequence, and the beams after each step
        if isinstance(event, Commit):
            self._written.setdefault(event.sequence, []).extend(event.ids)
        if isinstance(event, Branches):
            for child, parent in event.born:
                self._written[child] = list(self._written.get(parent, []))
            if event.scores:
                sums = event.sums or event.scores
                texts = [list(self._written[number]) for number in event.scores]
                ranks = [*event.scores.values()]
                self._steps.append(Survivors(texts, [sums[number] for number in event.scores], ranks))

    def read_logits(self, first, logits):
        logp = logits.double().log_softmax(1)
        for at in range(max(first, self._text.start - 1), min(first + len(logp), len(self._text.tokens) - 1)):
            self._losses.append(-float(logp[at - first, self._text.tokens[at + 1]]))

    def draw(self):
        if not (self._losses and self._steps):
            return
        sums = (-torch.tensor(self._losses, dtype=torch.float64)).cumsum(0).tolist()
        depths = range(1, min(len(self._right), len(self._steps)) + 1)
        alive = [any(text[:depth] == self._right[:depth] for text in self._steps[depth - 1].texts) for depth in depths]
        dropped = alive.index(False) + 1 if False in alive else 0
        yield shaded("rank of the right prefix among the beams, 1 is dropped", *self._colours(sums, dropped))
        ranges = [self._steps[depth - 1].sums for depth in depths]
        beams = {"last beam": list(map(min, ranges)), "best beam": list(map(max, ranges))}
        yield from over_tokens("log-probability of prefixes, nats", {"right prefix": sums[:len(depths)], **beams})
        names = [f"{place}: {self._text.piece(token)}" for place, token in enumerate(self._right, 1)]
        yield bars("loss of each token of the right answer, nats", names, self._losses)
        yield bars("weight of each prefix in APAO's loss", names, prefix_weights(self._losses))
        yield Note(self._verdict(sums, dropped))

    def _colours(self, sums: list[float], dropped: int) -> tuple[list[float], list[str]]:
        """The share of the beams that rank above the right prefix, and words, for each token of the text found."""
        values, labels = [], []
        for depth in range(1, self._found.generated + 1):
            if dropped and depth >= dropped:
                values.append(1.0)
                labels.append(
                    self._dropped_in_words(sums, dropped) if depth == dropped else "the right prefix was gone"
                )
            elif depth > min(len(self._right), len(self._steps)):
                values.append(math.nan)
                labels.append("")
            else:
                beams = self._steps[depth - 1].sums
                above = sum(other > sums[depth - 1] + 1e-9 for other in beams)
                values.append(above / len(beams))
                labels.append(f"the right prefix is number {above + 1} of {len(beams)} beams")
        return values, labels

    def _dropped_in_words(self, sums: list[float], dropped: int) -> str:
        below = min(self._steps[dropped - 1].sums) - sums[dropped - 1]
        piece = self._text.piece(self._right[dropped - 1])
        return f"the right prefix was dropped here, at “{piece}”: {below:.2f} nats below the last of the beams"

    def _verdict(self, sums: list[float], dropped: int) -> str:
        found = self._found.tokens[self._found.start:]
        if found[:len(self._right)] == self._right:
            return "Beam search kept the right answer: it is the text."
        if self._right[:len(found)] == found:
            return "Beam search wrote the beginning of the right answer: raise the number of tokens."
        where = f"dropped the right answer at token {dropped}" if dropped else "kept the right answer among its beams"
        ranked = self.ranked(sums[-1])
        best = max(self._steps[-1].ranks)
        kind = "a search error: it would have ranked above the text" if ranked > best + 1e-9 else (
            "a model error: the model itself ranks the text above it")
        return f"Beam search {where}. This is {kind} ({ranked:.3f} against {best:.3f})."

    def ranked(self, total: float) -> float:
        """What the search would have ranked the right answer by, given the sum of its log-probabilities."""
        last = self._steps[-1]
        place = last.ranks.index(max(last.ranks))
        length = len(last.texts[place])
        if length < 2 or not last.sums[place] or last.sums[place] == last.ranks[place]:
            return total
        exponent = math.log(last.sums[place] / last.ranks[place]) / math.log(length)
        return total / len(self._right) ** exponent


def prefix_weights(losses: list[float]) -> list[float]:
    """The weight of each prefix: its mean loss per token, over the sum of these; even if all are 0."""
    means = [sum(losses[:length]) / length for length in range(1, len(losses) + 1)]
    return [mean / sum(means) if sum(means) else 1 / len(means) for mean in means]
