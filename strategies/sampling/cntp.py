"""Cautious next token prediction."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from playground.algorithms.sampling.repetition import parse_marks
from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.contract.token_tree import ROOT
from playground.engine import sampling
from playground.errors import Refusal
from playground.events import Branches, Event, Figure


@dataclass(eq=False)
class Continuation:
    """One trial, and the log-probabilities of its sampled tokens, in nats."""

    leaf: Any  # its sequence
    logps: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logps) / len(self.logps))


class CNTP(Decoder):
    """Sample token by token while the entropy is low; otherwise sample several continuations up to the next punctuation
    mark, and keep the one with the lowest perplexity.

    The entropy of a row determines the number of trials: one up to `low` nats, the maximum from `high` on. Trials are
    sampled in parallel from the same position, each until a token that ends in a terminator, an end token, or `longest`
    tokens; the one with the lowest perplexity is committed. Entropy and perplexity are those of the distribution that
    tokens are sampled from. One trial, or temperature 0, is plain sampling. Short trials with a single confident token
    are often selected. The limit on a trial's length is ours. Wang et al. 2025, arXiv 2507.03038; the number of trials
    as in the released code, or as in the paper.
    """

    name, title, paper, sheet = "cntp", "Cautious next token", "2507.03038", "sampling/cntp"
    guarantee, several = ("heuristic", "collapses"), True

    trials: int = knob(10, 1, 32, step=1, help="maximum number of trials; 1 is plain sampling")
    low: float = knob(0.01, 0.0, 2.0, step=0.01, help="entropy in nats up to which there is one trial")
    high: float = knob(1.5, 0.1, 6.0, step=0.1, help="entropy in nats from which the number of trials is the maximum")
    count: str = knob(
        "released",
        choices=("released", "printed"),
        help="formula for the number of trials: the authors' code or the paper",
    )
    entropy: str = knob(
        "final", choices=("final", "raw"), help="of the distribution that tokens are sampled from, or of the raw logits"
    )
    longest: int = knob(64, 8, 256, step=1, help="maximum tokens of a trial")
    terminators: str = knob(
        "\\n . , ? ! : ; ) ] }", help="marks that end a trial, separated by spaces; \\n is a line break"
    )
    temperature: float = knob(1.0, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; 0 is greedy")

    def check(self) -> None:
        if self.low >= self.high:
            raise Refusal(
                f"low is {self.low:g} nats and high {self.high:g}: choose a low below high.", "low"
            )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        rows, sampled = (yield lm.prefill()), 0
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
                sampled += 1
                yield lm.keep(lm.pick(rows))
            else:
                trials = yield from self._trials(lm, count)
                best = min(trials, key=lambda trial: trial.perplexity)  # ties: the first
                sampled += sum(len(trial.logps) for trial in trials)
                yield from _events(lm, trials, best, sampled)
                yield lm.keep(best.leaf)
            rows = yield lm.extend()

    def _entropy(self, rows) -> float:
        return rows.entropy() if self.entropy == "raw" else float(sampling.entropy(rows.scores[rows.row(ROOT)]))

    def number(self, entropy: float) -> int:
        """Number of trials at an entropy in nats."""
        share = (entropy - self.low) / (self.high - self.low)
        if self.count == "printed":
            return max(1, min(self.trials, math.floor(share * self.trials)))
        return int(1 + (self.trials - 1) * min(max(share, 0.0), 1.0))

    def _trials(self, lm: Lane, count: int) -> Iterator:
        """Finished trials, extended together by one forward per token."""
        trials = [Continuation(leaf) for leaf in lm.fork(count)]
        while growing := [trial for trial in trials if not trial.ended]:
            rows = yield lm.extend([trial.leaf for trial in growing])
            choices = [lm.pick(row) for row in rows]
            yield lm.keep(choices)
            for trial, row, choice in zip(growing, rows, choices):
                trial.logps.append(math.log(float(row.distribution(ROOT)[choice.token])))
                trial.ended = (
                    bool(trial.leaf.reason)
                    or len(trial.logps) >= self.longest
                    or self.terminates(lm.piece(choice.token))
                )
        return trials

    def terminates(self, piece: str) -> bool:
        """Whether a token ends in a terminator, ignoring spaces, as ".", ")," and ". " do."""
        return piece.rstrip(" \t").endswith(parse_marks(self.terminators))


def _events(lm: Lane, trials: list[Continuation], best: Continuation, sampled: int) -> Iterator[Event]:
    """The trials with their perplexities, the span of the best, and the share of sampled tokens that were discarded."""
    texts = ["".join(map(lm.piece, trial.leaf.written[lm.generated:])) for trial in trials]
    yield Branches(scores={trial.leaf.number: -math.log(trial.perplexity) for trial in trials})
    yield Figure(
        "bars", "perplexity of the trials", {"labels": texts, "values": [trial.perplexity for trial in trials]}
    )
    end = best.leaf.generated
    spans = [[lm.generated, end, f"best of {len(trials)}", best.perplexity]]
    yield Figure("spans", "committed trials", {"spans": spans})
    yield Figure("scalar", "tokens discarded", {"x": end - 1, "series": {"share": max(0.0, 1 - end / sampled)}})
