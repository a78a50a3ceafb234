"""DEL: which layers guess, and how far, is chosen anew every round."""
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from playground.algorithms.speculative.drafting import chain_until, new_tree
from playground.algorithms.speculative.speculation_math import block_efficiency
from playground.contract import Drafter, EarlyExit, knob
from playground.contract.token_tree import ROOT
from playground.events import Event, Figure


@dataclass
class ExitStatistics:
    """How often a layer would have guessed the model's own token lately, and how sure it was where it did and where it
    did not.
    """

    hits: float = 0.0
    misses: float = 0.0
    sure_hits: float = 0.0
    sure_misses: float = 0.0

    def add(self, right: list[bool], confidences: list[float], decay: float) -> None:
        """A round more; what was counted before it counts less by now."""
        self.hits = decay * self.hits + sum(right)
        self.misses = decay * self.misses + len(right) - sum(right)
        self.sure_hits = decay * self.sure_hits + sum(c for c, hit in zip(confidences, right) if hit)
        self.sure_misses = decay * self.sure_misses + sum(c for c, hit in zip(confidences, right) if not hit)

    @property
    def alpha(self) -> float | None:
        """Share of hits; None where nothing was seen."""
        seen = self.hits + self.misses
        return self.hits / seen if seen else None

    @property
    def threshold(self) -> float:
        """Halfway between the mean confidence of hits and of misses; below every confidence until both were seen."""
        return (self.sure_hits / self.hits + self.sure_misses / self.misses) / 2 if self.hits and self.misses else 0.0


def tokens_per_layer(alpha: float, guesses: int, layer: int, depth: int) -> float:
    """Expected tokens of a round for each layer that one row passes in it: `guesses` times `layer`, and all `depth` for
    the check.
    """
    return block_efficiency(alpha, guesses) / (depth + guesses * layer)


class DelExit(Drafter):
    """The model's own first layers guess, and how many of them is chosen every round by what each number would have
    guessed lately.

    Guessing and checking pass through every layer anyway, so the head can read them all once a round: where layer l's
    best token is the model's own, l would have guessed right. Counts of that fade by `decay` a round, and the layer
    with most expected tokens per executed layer guesses next. A chain ends after a guess that is less probable than
    halfway between what that layer's hits and misses were; that guess is still sent. Without `dynamic` it has exactly
    the best length. Only rows whose text stands are counted; the last 32 tokens of the prompt, which the authors count
    as well, are not, so the first round begins with what the first row shows. most = 0 is plain decoding. Worth its
    while with a model whose early layers were trained to be read. Entezari Zarch et al. 2025, arXiv 2504.05598.
    """

    name, title, paper, sheet = "del_exit", "DEL: dynamic exit layer", "2504.05598", "speculative/del"
    drawn, guarantee = "independent", ("collapses",)

    decay: float = knob(
        0.95, 0.0, 1.0, step=0.05, help="what earlier rounds count for, once more each round; 0: only the last one"
    )
    most: int = knob(18, 0, 24, step=1, help="guesses at most; 0 is plain decoding")
    stride: int = knob(
        1, 1, 8, step=1, help="every how many layers the model may be left; each costs a product with the head"
    )
    dynamic: bool = knob(
        True, help="end a chain where its layer gets unsure, and not at the length that was best so far"
    )

    def inner(self, depth, tied):
        self.depth = depth
        self.exits = [EarlyExit("target", layer) for layer in range(1, depth, self.stride)]
        return self.exits

    @cached_property
    def tallies(self) -> dict[int, ExitStatistics]:
        """By layer."""
        return {exit.layer: ExitStatistics() for exit in self.exits}

    def propose(self, lm, budget) -> Iterator:
        tree = new_tree(lm, self)
        # the row after the text is known, as after the prompt: its token costs nothing
        if not (self.most and self.exits and lm.target.behind()):
            return tree
        layer, length = self.plan()
        tally = self.tallies[layer]
        longest = min(budget, self.most if self.dynamic else length)
        yield from chain_until(
            lm, lm.exit(layer), tree, longest, lambda chain: self.dynamic and chain.confidence[-1] < tally.threshold
        )
        yield from self._told(lm, tree, layer)
        return tree

    def plan(self) -> tuple[int, int]:
        """Layer and number of guesses with most expected tokens per executed layer, of equals the lowest; one guess of
        the first layer before all counts.
        """
        known = {layer: tally.alpha for layer, tally in self.tallies.items() if tally.alpha is not None}
        plans = [(layer, guesses) for layer in known for guesses in range(self.most)]
        return max(
            plans,
            key=lambda plan: tokens_per_layer(known[plan[0]], plan[1], plan[0], self.depth),
            default=(self.exits[0].layer, 1),
        )

    def observe(self, tree, rows, verdict) -> None:
        """Compare what each layer would have guessed with the model's own best token, in all rows whose text stands."""
        at = [rows.row(node) for node in (ROOT, *verdict.kept)]
        own, self._right = rows.raw[at].argmax(-1), []
        for exit, tally in zip(self.exits, self.tallies.values()):
            best = rows.others[exit][at].softmax(-1).max(-1)
            right = (best.indices == own).tolist()
            tally.add(right, best.values.tolist(), self.decay)
            self._right.append([float(hit) for hit in right])

    def _told(self, lm, tree, layer: int) -> Iterator[Event]:
        """Which layers were right in the round before, what each promises by now, which of them guessed, and how sure
        it was.
        """
        labels, x = [f"layer {exit.layer}" for exit in self.exits], lm.generated
        places = [str(place + 1) for place in range(len(self._right[0]))]
        yield Figure(
            "matrix",
            "layers that would have guessed the model's own token",
            {"rows": labels, "columns": places, "values": self._right},
        )
        yield Figure(
            "bars", "expected tokens for the layers of a plain one", {"labels": labels, "values": self._promises()}
        )
        yield Figure(
            "scalar",
            "layers that guess",
            {"x": x, "series": {"layers": layer, "guesses": len(tree)}, "lines": {"all layers": self.depth}},
        )
        yield Figure(
            "bars",
            "confidence of each guess",
            {"labels": list(map(lm.piece, tree.tokens)), "values": list(tree.confidence)},
        )
        yield Figure(
            "scalar",
            "confidence below which a chain ends",
            {"x": x, "series": {"confidence": self.tallies[layer].threshold}},
        )

    def _promises(self) -> list[float]:
        """Of each layer at its best length."""
        return [
            self.depth
            * max(tokens_per_layer(tally.alpha or 0.0, guesses, layer, self.depth) for guesses in range(self.most))
            for layer, tally in self.tallies.items()
        ]
