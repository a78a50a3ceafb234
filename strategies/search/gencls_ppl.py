"""Labels by perplexity."""
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from playground.algorithms.search.commit_path import FoundToken, adopt
from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import merged
from playground.errors import Refusal
from playground.events import Event, Figure, Note

# of all labels, common prefixes counted once: each has a row of logits [V], all from one forward
MAX_LABEL_TOKENS = 512
READINGS = {"mean": "perplexity of the label", "sum": "probability", "whole": "perplexity of prompt and label"}


@dataclass
class Label:
    """A label's tokens and the cost of each in nats. The end token is included if it counts."""

    text: str
    found: list[FoundToken]
    costs: list[float]

    def reads(self, reading: str, before: tuple[float, int]) -> float:
        """Cost in nats: per token of the label, of the whole label, or per token of prompt and label.

        `before` is the cost of the prompt in nats, and its number of tokens.
        """
        cost, count = sum(self.costs), len(self.costs)
        whole = (before[0] + cost) / (before[1] + count)
        return {"mean": cost / count, "sum": cost, "whole": whole}[reading]


class LabelsByPerplexity(Decoder):
    """Classify by scoring a fixed set of labels after the prompt, all in one forward, and answer with the one that
    scores best.

    Three scores are shown, which differ if labels differ in length: the perplexity of the label (`mean`), its
    probability (`sum`), and the perplexity of prompt and label together (`whole`), for which the prompt is read again.
    With the end token counted, the sum is the probability of the label as the complete answer; without it a label never
    costs less than its own prefix. GenCLS++, He et al. 2025, arXiv 2504.19898, which does not specify its score; its
    gains come from training, which is not part of this.
    """

    name, title, paper, sheet = "gencls_ppl", "Labels by perplexity", "2504.19898", "search/gencls-ppl"
    guarantee, several, whole_answers, refuses = ("heuristic",), True, True, ("sampler", "constraint")
    reconstruction, sure = True, "medium"

    labels: str = knob("good|bad", help="the labels, separated by |")
    reading: str = knob(
        "mean",
        choices=tuple(READINGS),
        help="score that decides: perplexity of the label, its probability, or perplexity of prompt and label",
    )
    end: bool = knob(True, help="count the end token after a label as one of its tokens")
    space: bool = knob(True, help="add a space before each label, as answers usually begin with one")

    def check(self) -> None:
        if len(self._texts()) < 2:
            raise Refusal("There is nothing to choose: give at least two different labels, separated by |.", "labels")

    def decode(self, lm: Lane) -> Iterator:
        before = yield from self._prompt(lm)
        yield lm.prefill()
        spelt = [self._spelt(lm, text) for text in self._texts()]
        tree, paths = merged(spelt if self._closed(lm) else [tokens[:-1] for tokens in spelt], self.name)
        if len(tree) > MAX_LABEL_TOKENS:
            raise Refusal(
                f"The labels have {len(tree):,} tokens, and the maximum is {MAX_LABEL_TOKENS}: give fewer or shorter"
                " ones.",
                "labels",
            )
        rows = yield lm.extend(tree)
        labels = [self._label(lm, text, tokens, path, rows) for text, tokens, path in zip(self._texts(), spelt, paths)]
        yield from self._events(lm, labels, before)
        best = min(labels, key=lambda label: label.reads(self.reading, before))
        yield from adopt(lm, best.found)

    def _texts(self) -> list[str]:
        return list(dict.fromkeys(text.strip() for text in self.labels.split("|") if text.strip()))

    def _spelt(self, lm: Lane, text: str) -> list[int]:
        tokens = (lm.spell(f" {text}") if self.space else []) or lm.spell(text)
        if not tokens:
            raise Refusal(f"This model has no tokens for the label {text!r}: choose another word.", "labels")
        if len(tokens) > lm.remaining:
            raise Refusal(
                f"The label {text!r} has {len(tokens)} tokens, but only {lm.remaining} fit: raise the length.",
                "labels",
            )
        return tokens

    def _closed(self, lm: Lane) -> bool:
        """Whether the end token after a label counts."""
        return self.end and bool(lm.end_ids)

    def _label(self, lm: Lane, text: str, tokens: list[int], path: list[int], rows) -> Label:
        """A label and its costs, from the rows that predict its tokens; any of the model's end tokens may end it."""
        found = [FoundToken(token, rows, node) for token, node in zip(tokens, path)]
        costs = [-float(rows.logp[rows.row(node), token]) for token, _, node in found]
        if self._closed(lm):
            ends, last = sorted(lm.end_ids), rows.logp[rows.row(path[-1])]
            costs.append(-float(last[ends].logsumexp(0)))
            found.append(FoundToken(max(ends, key=lambda token: float(last[token])), rows, path[-1]))
        return Label(text, found, costs)

    def _prompt(self, lm: Lane) -> Iterator:
        """Cost in nats of the prompt's tokens after the first, and their number."""
        cost, count = 0.0, 0
        for request in lm.reading(lm.tokens[:-1]):
            piece = yield request
            following = torch.tensor(lm.tokens[1 + count:1 + count + len(piece.tokens)], device=piece.logits.device)
            cost -= float(piece.logits.log_softmax(-1).gather(1, following[:, None]).sum())
            count += len(piece.tokens)
        return cost, count

    def _events(self, lm: Lane, labels: list[Label], before: tuple[float, int]) -> Iterator[Event]:
        names = [label.text for label in labels]
        table = [
            [
                math.exp(label.reads("mean", before)),
                math.exp(-label.reads("sum", before)),
                math.exp(label.reads("whole", before)),
            ]
            for label in labels
        ]
        yield Figure(
            "matrix", "labels by three scores", {"rows": names, "columns": list(READINGS.values()), "values": table}
        )
        total = torch.tensor([-label.reads("sum", before) for label in labels], dtype=torch.float64).softmax(0)
        yield Figure("bars", "probability among the labels", {"labels": names, "values": total.tolist()})
        steps = [
            (f"{label.text}: {lm.piece(found.token)}", cost)
            for label in labels
            for found, cost in zip(label.found, label.costs)
        ]
        yield Figure(
            "bars",
            "-log p of each token of a label, nats",
            {"labels": [name for name, _ in steps], "values": [cost for _, cost in steps]},
        )
        winners = {reading: min(labels, key=lambda label: label.reads(reading, before)).text for reading in READINGS}
        agree = "All three scores agree" if len(set(winners.values())) == 1 else "The scores differ"
        yield Note(
            f"{agree}: " + ", ".join(f"{winners[reading]!r} by {READINGS[reading]}" for reading in READINGS) + "."
        )
