"""Power sampling."""
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from playground.algorithms.search.commit_path import FoundToken, adopt
from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import temperature
from playground.events import Event, Figure, Note


class DrawnToken(NamedTuple):
    """A token of a text, with its log-probabilities in nats."""

    token: int
    node: int  # its node in the tree of all texts
    before: FoundToken  # with the row that predicted it
    logp: float  # under the model
    logq: float  # under the proposal, the model at the low temperature


Text = list[DrawnToken]


class PowerSampling(Decoder):
    """Sample whole texts from the model's own law raised to a power, which favours texts that are probable as a whole.

    A low temperature sharpens each token by itself, and so prefers a token with many mediocre continuations to one with
    a single excellent one. Here the power 1 / temperature is that of the text: it is continued block by block at this
    temperature, and after each block it is cut at random places several times and written again from there. A
    Metropolis-Hastings rule decides which of the two texts stays. The law is exact in the limit of many steps. Without
    steps it is sampling at the temperature, and at 1 every proposal is accepted. Each step costs a text of half the
    length on average. Karan and Du 2025, arXiv 2510.14901; texts that end at different lengths are weighed by our
    correction, without which the law would be another.
    """

    name, title, paper, sheet = "power_sampling", "Power sampling", "2510.14901", "search/power-sampling"
    guarantee = ("heuristic", "collapses")
    new_in = "2026"
    refuses = ("sampler", "constraint", "cache_policy")  # the law is the model's own

    temperature: float = knob(0.25, 0.05, 1.0, step=0.05, help="the power is 1 / temperature; 1 is the model's own law")
    steps: int = knob(5, 0, 50, step=1, help="proposals after each block; 0 samples at the temperature")
    blocks: int = knob(4, 1, 16, step=1, help="blocks in which the text grows to its maximum length")

    def decode(self, lm: Lane) -> Iterator:
        texts = GrowingTexts(lm, self.temperature, (yield lm.prefill()))
        text, most, accepted, proposed = [], lm.remaining, 0, 0
        for block in range(1, self.blocks + 1):
            size = math.ceil(most * block / self.blocks)
            text = yield from texts.continued(text, size)
            for _ in range(self.steps):
                proposal, cut = yield from self._proposal(lm, texts, text, size)
                ratio = self.log_ratio(text, proposal, cut)
                moved, _ = lm.flip(min(1.0, math.exp(min(0.0, ratio))), lm.prompt_length + cut)
                yield from self._shown(lm, text, proposal, cut, proposed, moved)
                text, accepted, proposed = proposal if moved else text, accepted + moved, proposed + 1
            if lm.ends(text[-1].token):
                break
        yield Note(f"{accepted} of {proposed} proposals were accepted; {texts.drawn} tokens were sampled for "
                   f"{len(text)} of the text.")
        yield from adopt(lm, [drawn.before for drawn in text])

    def _proposal(self, lm: Lane, texts: "GrowingTexts", text: Text, size: int) -> Iterator:
        """The text written again from a place that is drawn uniformly, and that place."""
        cut = lm.draw(torch.full((len(text),), 1 / len(text), dtype=torch.float64), lm.prompt_length, "cut")
        return (yield from texts.continued(text[:cut], size)), cut

    def log_ratio(self, text: Text, proposal: Text, cut: int) -> float:
        """Logarithm of the ratio of Metropolis and Hastings for two texts that are equal up to a cut.

        The target's ratio, times that of proposing the way back. A cut is drawn among the tokens of a text, so a longer
        text is less often cut at this place.
        """
        def weight(way: Text) -> float:
            return sum(drawn.logp / self.temperature - drawn.logq for drawn in way[cut:]) - math.log(len(way))

        return weight(proposal) - weight(text)

    def _shown(self, lm: Lane, text: Text, proposal: Text, cut: int, step: int, moved: bool) -> Iterator[Event]:
        current, other = (sum(drawn.logp for drawn in way) for way in (text, proposal))
        series = {"text": other if moved else current, "other": current if moved else other}
        yield Figure("scalar", "log-probability of the text, nats", {"x": step + 1, "axis": "steps", "series": series})
        ways = {"dropped" if moved else "kept": (text, current), "accepted" if moved else "rejected": (proposal, other)}
        spelt = {name: lm.text_of([drawn.token for drawn in way[cut:]]) for name, (way, _) in ways.items()}
        yield Figure("tree", "the last proposal, by log-probability", {
            "labels": [f"token {cut + 1}", *(f"{name}: {way}" for name, way in spelt.items())],
            "parents": [ROOT, 0, 0],
            "values": [0.0, current, other],
        })


class GrowingTexts:
    """Texts that share their beginnings in one tree, whose rows are read once."""

    def __init__(self, lm: Lane, cold: float, rows: Any):
        self._lm, self._cold, self._tree, self.drawn = lm, cold, TokenTree("power sampling"), 0
        self._rows = {ROOT: rows}
        self._children: dict[tuple[int, int], int] = {}  # node by parent and token

    def continued(self, text: Text, size: int) -> Iterator:
        """The text sampled on at the low temperature, up to `size` tokens or an end."""
        text = list(text)
        while len(text) < size and not (text and self._lm.ends(text[-1].token)):
            after = text[-1].node if text else ROOT
            if after not in self._rows:
                rows = yield self._lm.extend(self._tree)
                self._rows |= {rows.first + i: rows for i in range(len(rows.raw))}
            text.append(self._draw(after, len(text)))
        return text

    def _draw(self, after: int, place: int) -> DrawnToken:
        rows, lm = self._rows[after], self._lm
        raw = rows.raw[rows.row(after)][None]
        cold = temperature(raw, self._cold)
        token = lm.draw(cold.softmax(-1)[0], lm.prompt_length + lm.generated + place, "token")
        self.drawn += 1
        if (after, token) not in self._children:
            self._children[after, token] = self._tree.add(token, after)
        logp, logq = (float(scores.double().log_softmax(-1)[0, token]) for scores in (raw, cold))
        return DrawnToken(token, self._children[after, token], FoundToken(token, rows, after), logp, logq)
