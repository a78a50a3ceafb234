"""AdaDec: adaptive decoding guided by uncertainty."""
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from playground.algorithms.sampling.token_readings import TokenReading
from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import ranked
from playground.events import Event, Figure, Note
from strategies.sampling.adadec.entropy_threshold import learn

NEVER = 4.0  # threshold that disables lookahead


@dataclass
class Rollout:
    """A candidate and its greedy continuation."""

    node: int = ROOT  # its last token, in the tree of all rollouts
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Log-probability per token, in nats."""
        return sum(self.logps) / len(self.logps)

    def append(self, token: int, logp: float, tree: TokenTree) -> None:
        self.node = tree.add(token, self.node, confidence=math.exp(logp))
        self.tokens.append(token)
        self.logps.append(logp)


class AdaDec(Decoder):
    """Decode greedily at low entropy; at high entropy, roll out each candidate for a few tokens and commit the best.

    If the entropy of a row, before any sampler, reaches `tau` nats, each of the `width` most probable tokens is
    continued greedily for `depth` tokens, all of them in one forward per step. The candidate with the largest
    log-probability per token of its rollout, itself included, is committed; its rollout is discarded. A rollout ends at
    an end token and is scored by its tokens so far, even under a grammar by their probabilities among all tokens. The
    authors end rollouts at the end of a function body; here only end tokens do. `fit` learns tau for a model from
    texts. He et al. 2025, arXiv 2506.08980.
    """

    name, title, paper, sheet = "adadec", "AdaDec", "2506.08980", "sampling/adadec"
    guarantee, refuses = ("heuristic", "collapses"), ("drawing",)

    tau: float = knob(
        1.0, 0.0, NEVER, step=0.05, help="minimum entropy in nats to look ahead; 0: always, 4: never"
    )
    width: int = knob(3, 1, 8, step=1, help="candidates")
    depth: int = knob(5, 0, 12, step=1, help="tokens generated after each candidate")

    @classmethod
    def fit(cls, readings: Iterable[TokenReading]) -> dict[str, float]:
        """Fit `tau`, the entropy above which the model's first choice is more often wrong than right in given texts.

        Raises Refusal if the texts do not determine it.
        """
        return {"tau": min(NEVER, learn(readings).tau)}

    def decode(self, lm: Lane) -> Iterator:
        rows = yield lm.prefill()
        while True:
            entropy = rows.entropy()
            yield Figure(
                "scalar",
                "entropy",
                {"x": lm.generated, "series": {"entropy, nats": entropy}, "lines": {"tau": self.tau}},
            )
            if entropy >= self.tau and self.tau < NEVER:
                rollouts = yield from self._look_ahead(lm, rows)
                yield from _events(lm, rollouts, entropy)
                yield lm.keep(lm.choose(rows, _best(rollouts).tokens[0]))
            else:
                yield lm.keep(lm.pick(rows))
            rows = yield lm.extend()

    def _look_ahead(self, lm: Lane, rows) -> Iterator:
        """The rollouts of all candidates, the most probable candidate first."""
        tree, rollouts = TokenTree(source=self.name), []
        logp, tokens = ranked(rows.allowed_logp(), self.width)
        for value, token in zip(logp.tolist(), tokens.tolist()):
            if value > -math.inf:
                rollouts.append(Rollout())
                rollouts[-1].append(token, value, tree)
        for _ in range(min(self.depth, lm.context - len(lm.tokens))):
            growing = [rollout for rollout in rollouts if not lm.ends(rollout.tokens[-1])]
            if not growing:
                break
            _extend(growing, (yield lm.extend(tree)), tree)
        return rollouts


def _extend(rollouts: list[Rollout], rows, tree: TokenTree) -> None:
    """Append one greedy token to each rollout."""
    for rollout in rollouts:
        token = rows.best(rollout.node)
        rollout.append(token, float(rows.allowed_logp(rollout.node)[token]), tree)


def _best(rollouts: list[Rollout]) -> Rollout:
    """The rollout with the largest score; ties go to the more probable candidate."""
    return max(rollouts, key=lambda rollout: rollout.score)


def _events(lm: Lane, rollouts: list[Rollout], entropy: float) -> Iterator[Event]:
    """The rollouts, their scores, and whether the committed token differs from the first choice."""
    first, best = rollouts[0], _best(rollouts)
    labels = ["".join(map(lm.piece, rollout.tokens)) for rollout in rollouts]
    values = [math.exp(rollout.score) for rollout in rollouts]
    yield Figure("bars", "candidates: mean probability per token", {"labels": labels, "values": values})
    outcome = "first choice confirmed" if best is first else "first choice replaced"
    yield Figure("spans", "pauses", {"spans": [[lm.generated, lm.generated + 1, outcome, entropy]]})
    if best is not first:
        yield Note(
            f"{lm.piece(best.tokens[0])!r} in place of {lm.piece(first.tokens[0])!r}: its rollout has "
            f"{best.score:.2f} nats per token against {first.score:.2f}."
        )
