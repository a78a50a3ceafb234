"""Cautious next token prediction."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from playground.algorithms.sampling.repetition import marks
from playground.contract import Decoder, Strategy, knob, make
from playground.contract.token_tree import ROOT
from playground.engine import sampling
from playground.errors import Refusal
from playground.events import Branches, Event, Figure


@dataclass(eq=False)
class Continuation:
    """One way on, and the log-probabilities, in nats, that its tokens were drawn with."""

    leaf: Any  # the sequence it grows on
    logps: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logps) / len(self.logps))


class CNTP(Decoder):
    """Draw token by token while the model is sure; where it is not, try several ways on up to the next punctuation
    mark, and keep the surest.

    The entropy of a row decides how many trials there are: one up to `low` nats, all of them from `high` on. Trials are
    drawn side by side from the same place, each until a token that ends in a terminator, the end, or `longest` tokens;
    the one with the lowest perplexity is kept whole. Entropy and perplexity are those of the distribution the tokens
    are drawn from. One trial, or temperature 0, is plain sampling. Short trials with one sure token often win. The cap
    on a trial is ours. Wang et al. 2025, arXiv 2507.03038; the number of trials as released, or as printed.
    """

    name, title, paper, sheet = "cntp", "Cautious next token", "2507.03038", "sampling/cntp"
    guarantee, several = ("heuristic", "collapses"), True

    trials: int = knob(10, 1, 32, step=1, help="trials where the model is least sure; 1 is plain sampling")
    low: float = knob(0.01, 0.0, 2.0, step=0.01, help="entropy in nats up to which there is one trial")
    high: float = knob(1.5, 0.1, 6.0, step=0.1, help="entropy in nats from which there are all trials")
    count: str = knob(
        "released",
        choices=("released", "printed"),
        help="the formula for the number of trials: of the authors' code, or of the paper",
    )
    entropy: str = knob(
        "final", choices=("final", "raw"), help="of the distribution tokens are drawn from, or of the model's own row"
    )
    longest: int = knob(64, 8, 256, step=1, help="tokens of a trial, at most")
    terminators: str = knob(
        "\\n . , ? ! : ; ) ] }", help="marks that end a trial, with spaces between them; \\n is a line break"
    )
    temperature: float = knob(1.0, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; 0 is greedy")

    def check(self) -> None:
        if self.low >= self.high:
            raise Refusal(
                f"Trials begin at {self.low:g} nats and are all there at {self.high:g}: choose a low below high.", "low"
            )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        rows, drawn = (yield lm.prefill()), 0
        while True:
            entropy = self._entropy(rows)
            count = self.number(entropy)
            yield Figure(
                "scalar",
                "entropy",
                {
                    "x": lm.generated,
                    "series": {"entropy, nats": entropy},
                    "lines": {"low": self.low, "high": self.high},
                },
            )
            yield Figure("scalar", "trials", {"x": lm.generated, "series": {"trials": count}})
            if count == 1:
                drawn += 1
                yield lm.keep(lm.pick(rows))
            else:
                trials = yield from self._tried(lm, count)
                best = min(trials, key=lambda trial: trial.perplexity)  # of equals the first
                drawn += sum(len(trial.logps) for trial in trials)
                yield from _told(lm, trials, best, drawn)
                yield lm.keep(best.leaf)
            rows = yield lm.extend()

    def _entropy(self, rows) -> float:
        return rows.entropy() if self.entropy == "raw" else float(sampling.entropy(rows.scores[rows.row(ROOT)]))

    def number(self, entropy: float) -> int:
        """Trials at an entropy in nats."""
        unsure = (entropy - self.low) / (self.high - self.low)
        if self.count == "printed":
            return max(1, min(self.trials, math.floor(unsure * self.trials)))
        return int(1 + (self.trials - 1) * min(max(unsure, 0.0), 1.0))

    def _tried(self, lm, count: int) -> Iterator:
        """Trials that have come to their end, all grown in one forward per token."""
        trials = [Continuation(leaf) for leaf in lm.fork(count)]
        while growing := [trial for trial in trials if not trial.ended]:
            rows = yield lm.extend([trial.leaf for trial in growing])
            choices = [lm.pick(row) for row in rows]
            yield lm.keep(choices)
            for trial, row, choice in zip(growing, rows, choices):
                trial.logps.append(math.log(float(row.chances(ROOT)[choice.token])))
                trial.ended = (
                    bool(trial.leaf.reason)
                    or len(trial.logps) >= self.longest
                    or self.terminates(lm.piece(choice.token))
                )
        return trials

    def terminates(self, piece: str) -> bool:
        """Whether a token ends in a terminator, spaces aside: ".", ")," and ". " do."""
        return piece.rstrip(" \t").endswith(marks(self.terminators))


def _told(lm, trials: list[Continuation], best: Continuation, drawn: int) -> Iterator[Event]:
    """The trials with their perplexities, where the text branched, and what share of all drawn tokens was for nothing.
    """
    texts = ["".join(map(lm.piece, trial.leaf.written[lm.generated:])) for trial in trials]
    yield Branches(scores={trial.leaf.number: -math.log(trial.perplexity) for trial in trials})
    yield Figure(
        "bars", "perplexity of the trials", {"labels": texts, "values": [trial.perplexity for trial in trials]}
    )
    end = best.leaf.generated
    yield Figure("spans", "kept trials", {"spans": [[lm.generated, end, f"best of {len(trials)}", best.perplexity]]})
    yield Figure("scalar", "tokens drawn for nothing", {"x": end - 1, "series": {"share": max(0.0, 1 - end / drawn)}})
