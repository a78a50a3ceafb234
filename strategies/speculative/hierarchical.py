"""Hierarchical speculation: the draft model is itself sped up by speculation, for targets with costly verification."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import draft_distribution, new_tree, purpose
from playground.algorithms.speculative.successor_tree import LikelySuccessors, TreeShape
from playground.contract import Drafter, Lane, knob, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import first_largest
from playground.events import Figure


class Hierarchical(Drafter):
    """The draft model is itself sped up by speculation: it verifies an inner draft, and the target verifies the result.

    With quantised weights, a forward over many tokens takes clearly longer than one over a single token, so the target
    should verify few but good draft tokens. The draft model reads an inner draft in one forward, takes a token from
    each row, and follows the inner draft as long as they agree, until it has at least `least` tokens. The result is
    exactly the draft model's own chain, in fewer forwards. With `lookup` the inner draft is the tokens that followed
    the last n-gram earlier in the text; with `tree` it is a tree of the `nodes` most probable paths through what the
    draft model predicted after each token before. The paper's tree comes from a trained head and is verified greedily;
    here nothing is trained, and sampling works as well. Load the models in nf4 for the paper's setting. ahead = 0, or
    nodes = 0, makes it a plain draft model, least = 0 is plain decoding. Zhang et al. 2025, arXiv 2505.22179.
    """

    name, title, paper, sheet = (
        "hierarchical",
        "Hierarchical speculation",
        "2505.22179",
        "speculative/spec-quantization",
    )
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)
    reconstruction, sure = True, "medium"

    least: int = knob(6, 0, 12, step=1, help="minimum draft tokens for the target; 0 is plain decoding")
    ahead: int = knob(4, 0, 8, step=1, help="looked-up tokens per draft forward; 0 drafts without lookup")
    n_max: int = knob(3, 1, 8, step=1, help="longest n-gram to look up, in tokens")
    inner_draft: str = knob("lookup", choices=("lookup", "tree"), help="where the inner draft comes from")
    nodes: int = knob(30, 0, 64, step=1, help="tree: inner draft tokens per draft forward")
    levels: int = knob(3, 1, 8, step=1, help="tree: its depth")
    width: int = knob(10, 1, 10, step=1, help="tree: children of a node")
    start: bool = knob(False, help="the draft model's first forward of a round reads no inner draft")

    _lookup = None

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._lookup is None:  # kept, because they grow with the text
            self._lookup = make("prompt_lookup", n_max=self.n_max, occurrence="latest", variant="vllm")
            self._successors = LikelySuccessors()
        chain, inner, leaf, gained = new_tree(lm, self), new_tree(lm, self), ROOT, []
        while leaf is not None and len(chain) < min(self.least, budget):
            length, read = len(chain), [leaf, len(inner)]
            if gained or not self.start:
                self._add_inner(lm, inner, leaf, chain, budget - length - 1)
            rows = yield lm.stream("draft").extend(inner)
            self._learn(lm, inner, rows, read)
            leaf = self._follow(lm, inner, rows, leaf, chain)
            gained.append(len(chain) - length)
        if len(chain):
            yield Figure(
                "bars",
                "draft tokens from each forward of the draft model",
                {"labels": [f"forward {i + 1}" for i in range(len(gained))], "values": gained},
            )
            yield Figure(
                "scalar",
                "draft tokens per round",
                {"x": lm.generated, "series": {"draft tokens": len(chain), "draft forwards": len(gained)}},
            )
        return chain

    def _add_inner(self, lm: Lane, inner: TokenTree, leaf: int, chain: TokenTree, room: int) -> None:
        """Add an inner draft of at most `room` levels below the leaf that the chain has reached."""
        if self.inner_draft == "tree":
            shape = TreeShape(self.nodes, max(0, min(self.levels, room)), self.width)
            return self._successors.grow(inner, leaf, (lm.tokens + chain.tokens)[-1], shape, lm.ends)
        for token in self._lookup.look_up(lm.tokens + chain.tokens, min(self.ahead, room)):
            leaf = inner.add(token, leaf)

    def _learn(self, lm: Lane, inner: TokenTree, rows, read: list[int]) -> None:
        """Note what the draft model predicts after the leaf and after the nodes it has just read."""
        if self.inner_draft == "tree":
            leaf, first = read
            nodes = [leaf, *range(first, len(inner))]
            tokens = [lm.tokens[-1] if node == ROOT else inner.tokens[node] for node in nodes]
            logits = rows.raw[[rows.row(node) for node in nodes]]
            self._successors.learn(tokens, logits, self.width)

    def _follow(self, lm: Lane, inner, rows, leaf: int, chain: TokenTree) -> int | None:
        """Add the draft model's own tokens to the chain, along the inner draft for as long as they agree.

        Returns the node of the last token, which the draft has not read yet; None if no token can follow.
        """
        while (q := draft_distribution(lm, inner, rows, leaf)) is not None:
            parent, draws = len(chain) - 1, lm.chain.draws
            token = lm.draw(q, rows.position(leaf), purpose(parent, 0)) if draws else int(first_largest(q))
            chain.add(token, parent, q if draws else None, float(q[token]))
            child = next((child for child in inner.children(leaf) if inner.tokens[child] == token), None)
            if child is None:
                return inner.add(token, leaf)
            leaf = child
        return None
