"""SpecDec++: guess on while all guesses will probably stand."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import accumulate
from operator import mul

from playground.algorithms.speculative.acceptance_head import AcceptanceHead, Guesses, Reliability, Training, learn
from playground.algorithms.speculative.drafting import chain_until, new_tree
from playground.contract import Drafter, knob
from playground.events import Figure, Note

DRAWN, BEST = "drawn", "best"  # tokens of a lane; each kind has a head of its own


class SpecDecPlusPlus(Drafter):
    """A draft model guesses on for as long as all its guesses will probably stand, and asks the target once that gets
    doubtful.

    The chance that nothing is refused is the product of each guess's own chance; where one minus it exceeds h the chain
    ends. That a constant h is near the best rule is the paper's result. `head` takes the chances from a small head on
    the draft's hidden states, learnt for one draft and one target (`python -m playground fit specdec_plus_plus` learns
    it for others than the bundled pair). It sees a guess one pass later, when the draft has read it, so the last guess
    is sent unjudged. `proxy` needs no training: the draft's own probability of the guess, corrected by how often such
    guesses stood so far, or as it is.

    h = 1 is a chain of fixed length, most = 0 plain decoding. The stop goes by what was guessed and sent, never by what
    was taken back, so the law stays the target's. Lanes that draw have one head and those that take the best token
    another, for what stands under the one rule need not under the other; theirs is of the first kind. A head learns
    with refusals counting six times, and what that does to its odds is put right afterwards, so that it speaks of
    chances; theirs leaves it to h. Huang et al. 2024, arXiv 2405.19715.
    """

    name, title, paper, sheet = "specdec_plus_plus", "SpecDec++", "2405.19715", "speculative/specdec-plus-plus"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)
    reconstruction, sure = True, "medium"

    h: float = knob(0.3, 0.0, 1.0, step=0.05, help="chance of some refusal above which the chain ends; 1: never")
    least: int = knob(2, 1, 4, step=1, help="guesses made in any case")
    most: int = knob(20, 0, 32, step=1, help="guesses at most; 0 is plain decoding")
    predictor: str = knob(
        "proxy",
        choices=("proxy", "head"),
        help="who says a guess's chance: the draft's own probability, or a head trained for both models",
    )
    estimate: str = knob(
        "corrected",
        choices=("corrected", "draft"),
        help="proxy: the draft's own probability, corrected by what stood or not",
    )
    late: bool = knob(True, help="proxy: judge a guess only once the next is made, as the head has to")

    def __post_init__(self):
        self._head, self._chain = None, None
        # of the last chain, by node: chance by the head, and whether it stood where that was tested
        self._said, self._stood = {}, {}

    @property
    def trained(self):
        return "set predictor to proxy, which needs no training" if self.predictor == "head" else ""

    @property
    def reads_hidden(self):
        return ("draft",) if self.predictor == "head" else ()

    @classmethod
    def train(cls, drawn: list[Guesses], best: list[Guesses], seed: int) -> Iterator[Figure | Note]:
        """Learn a head from guesses that were drawn and one from best guesses, text by text; returns the weights of
        both by name.
        """
        weights = {}
        for rule, texts in ((DRAWN, drawn), (BEST, best)):
            yield Note(
                f"The head for lanes whose tokens are {'drawn by chance' if rule == DRAWN else 'the best ones'}:"
            )
            weights |= {
                f"{rule}.{name}": tensor for name, tensor in (yield from learn(texts, Training(), seed)).items()
            }
        return weights

    def propose(self, lm, budget) -> Iterator:
        yield from self._came(lm)
        self._begin(lm)
        tree = yield from chain_until(
            lm, lm.stream("draft"), new_tree(lm, self), min(self.most, budget), partial(self._ends, lm)
        )
        self._chain = tree
        if len(tree):
            yield from self._told(lm, tree)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        for test in verdict.tests:
            self._stood[test.node] = test.kept
            if self.predictor == "proxy" or test.node in self._said:
                self._reliability.learn(self._claimed(tree)[test.node], test.kept)

    @cached_property
    def _reliability(self) -> Reliability:
        return Reliability()

    def _begin(self, lm) -> None:
        self._said, self._stood = {}, {}
        if self.predictor == "head" and not self._head:
            rule = f"{DRAWN if lm.chain.draws else BEST}."
            weights = {
                name.removeprefix(rule): tensor
                for name, tensor in lm.fitted[self.name].items()
                if name.startswith(rule)
            }
            self._head = AcceptanceHead.of(weights).to(lm.stream("draft").model.device)

    def _ends(self, lm, tree) -> bool:
        if self.predictor == "head":
            self._judge(lm, len(tree) - 2)
        return self._doubtful(tree)

    def _judge(self, lm, node) -> None:
        """Ask the head about the guess the draft has read last, whose row the newest guess was drawn from; the root is
        no guess.
        """
        if node >= 0:
            rows = lm.stream("draft").seen
            self._said[node] = float(self._head.chances(rows.hidden[rows.row(node)]))

    def _claimed(self, tree) -> dict[int, float]:
        """What is said of each guess before anything is known of it, by node."""
        return self._said if self.predictor == "head" else dict(enumerate(tree.confidence))

    def _chances(self, tree) -> list[float]:
        """That each guess stands; of one that the head has not seen, 1."""
        if self.predictor == "head":
            return [self._said.get(node, 1.0) for node in range(len(tree))]
        return [self._reliability.chance(q) if self.estimate == "corrected" else q for q in tree.confidence]

    def survival(self, chances: list[float]) -> list[float]:
        """After each guess, the chance that all so far stand; of the last one nothing is known yet where it is judged
        late.
        """
        known = [*chances[:-1], 1.0] if self.late or self.predictor == "head" else chances
        return list(accumulate(known, mul))

    def _doubtful(self, tree) -> bool:
        return len(tree) >= self.least and 1 - self.survival(self._chances(tree))[-1] > self.h

    def _told(self, lm, tree) -> Iterator[Figure]:
        """How the chance fell guess by guess, how many guesses that made, and how far what is said can be trusted."""
        falls = self.survival(self._chances(tree))
        yield Figure(
            "bars",
            "chance that all guesses so far stand",
            {"labels": list(map(lm.piece, tree.tokens)), "values": falls},
        )
        series, lines = {"all stand": falls[-1]}, {"1 - h": 1 - self.h}
        yield Figure(
            "scalar", "predicted chance that all guesses stand", {"x": lm.generated, "series": series, "lines": lines}
        )
        yield Figure(
            "scalar",
            "length of the chain",
            {"x": lm.generated, "series": {"guesses": len(tree)}, "lines": {"at most": self.most}},
        )
        if any(self._reliability.seen):
            yield self._reliability.figure(
                "what the head said" if self.predictor == "head" else "the draft's own probability"
            )

    def _came(self, lm) -> Iterator[Figure]:
        """What was predicted of each guess of the last chain that was tested, next to what came."""
        judged = [node for node in self._stood if self.predictor == "proxy" or node in self._said]
        if judged:
            chances = self._chances(self._chain)
            columns = [f"{node + 1} {lm.piece(self._chain.tokens[node])}" for node in judged]
            values = [[chances[node] for node in judged], [float(self._stood[node]) for node in judged]]
            yield Figure(
                "matrix",
                "the last chain: predicted, and what came",
                {"rows": ["predicted", "stood"], "columns": columns, "values": values},
            )
