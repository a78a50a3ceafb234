"""DySpec: draft trees that grow where the draft model is confident."""
from collections.abc import Iterator
from heapq import heappop, heappush

from playground.algorithms.speculative.drafting import add_distinct, draft_distribution, new_tree
from playground.algorithms.speculative.without_replacement import Ranking, RemainingTokens
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT
from playground.events import Figure


class DySpec(Drafter):
    """A draft model grows a tree without a fixed shape: the next draft token goes where it is most likely to be tested.

    A first child is tested if its parent is accepted, a later one if its earlier siblings are also rejected. The
    draft's probabilities estimate both. So the tree grows deep where the draft is confident and wide where it is not.
    Siblings are sampled without replacement, and whether one is sampled depends only on earlier samples, so the output
    distribution is exact. Under greedy decoding the most probable remaining token is taken. Mode `nodes` adds one draft
    token at a time, with a draft forward whenever the logits after its parent are missing; `threshold` adds, level by
    level, every token whose probability of being tested reaches the threshold. nodes = 0 is plain decoding. The paper
    drafts at temperature 0.6 for targets at 0 and 0.6; here the lane's own samplers apply first. Xiong et al. 2024,
    arXiv 2410.11744.
    """

    name, title, paper, sheet = "dyspec", "DySpec: dynamic trees", "2410.11744", "speculative/dyspec"
    needs, drawn, guarantee = ("draft",), "without_replacement", ("collapses",)

    nodes: int = knob(64, 0, 128, step=1, help="maximum draft tokens in the tree; 0 is plain decoding")
    mode: str = knob("nodes", choices=("nodes", "threshold"), help="grow token by token, or level by level")
    threshold: float = knob(
        0.016, 0.001, 0.3, step=0.001, help="mode threshold: smallest probability of being tested to add a token"
    )
    temperature: float = knob(1.0, 0.1, 1.5, step=0.05, help="of the draft model, after the lane's own samplers")

    def propose(self, lm: Lane, budget) -> Iterator:
        tree, chances = new_tree(lm, self), []
        yield from (self._level_by_level if self.mode == "threshold" else self._one_by_one)(lm, tree, budget, chances)
        if len(tree):
            labels = ["text so far", *map(lm.piece, tree.tokens)]
            data = {
                "labels": labels,
                "parents": [-1, *(parent + 1 for parent in tree.parents)],
                "values": [1.0, *chances],
            }
            yield Figure("tree", "probability that a draft token is tested, estimated by the draft", data)
        return tree

    def _one_by_one(self, lm: Lane, tree, budget, chances) -> Iterator:
        """Add the child most likely to be tested, repeatedly; appends that probability to `chances`."""
        # heap of possible children: -probability, age, parent, depth of the parent, remaining tokens at the parent
        waiting, rows, age = [(-1.0, 0, ROOT, 0, None)], {}, 0
        while waiting and len(tree) < self.nodes:
            chance, _, parent, depth, remaining = heappop(waiting)
            if depth >= budget:
                continue
            if parent not in rows:
                read = yield lm.stream("draft").extend(tree)
                rows |= dict.fromkeys(range(read.first, read.first + len(read.raw)), read)
            remaining = remaining or self._remaining(lm, tree, rows[parent], parent)
            if remaining is None:
                continue
            node, share = self._draw(lm, tree, remaining, parent, rows[parent])
            chances.append(-chance)
            for value, entry in (
                (chance * share, (node, depth + 1, None)),
                (chance * (1 - share), (parent, depth, remaining)),
            ):
                age += 1
                if value < 0 and (entry[2] is None or remaining.left > 0):
                    heappush(waiting, (value, age, *entry))

    def _level_by_level(self, lm: Lane, tree, budget, chances) -> Iterator:
        """Add children, level by level, whose probability of being tested reaches the threshold."""
        level = {ROOT: 1.0}
        for _ in range(budget if self.nodes else 0):
            read = yield lm.stream("draft").extend(tree)
            level = {
                child: value
                for parent, chance in level.items()
                for child, value in self._children(lm, tree, read, parent, chance, chances)
            }
            if not level or len(tree) >= self.nodes:
                break

    def _children(self, lm: Lane, tree, rows, parent, chance, chances) -> Iterator[tuple[int, float]]:
        """Add children to a node; yields each with the probability that its own children are tested."""
        remaining = self._remaining(lm, tree, rows, parent)
        while remaining and chance >= self.threshold and remaining.left > 0 and len(tree) < self.nodes:
            node, share = self._draw(lm, tree, remaining, parent, rows)
            chances.append(chance)
            yield node, chance * share
            chance *= 1 - share

    def _remaining(self, lm: Lane, tree, rows, parent) -> RemainingTokens | Ranking | None:
        """The tokens that may follow a node; None if there are none."""
        q = draft_distribution(lm, tree, rows, parent)
        if q is None:
            return None
        q = q if self.temperature == 1 else (q.log() / self.temperature).softmax(-1)
        return RemainingTokens(q) if lm.chain.draws else Ranking(q, self.nodes - len(tree))

    def _draw(self, lm: Lane, tree, remaining, parent, rows) -> tuple[int, float]:
        """Add a child; returns it and its share of the probability mass that remained at the parent."""
        left = remaining.left
        if lm.chain.draws:
            node = add_distinct(lm, tree, remaining, parent, rows.position(parent))
        else:
            token, chance = remaining.take()
            node = tree.add(token, parent, confidence=chance)
        return node, min(1.0, tree.confidence[node] / left)
