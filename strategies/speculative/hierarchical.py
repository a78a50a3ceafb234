"""Hierarchical speculation: the draft model is itself sped up by speculation, for targets with costly verification."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import draft_distribution, new_tree, purpose
from playground.contract import Drafter, knob, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import first_largest
from playground.events import Figure


class Hierarchical(Drafter):
    """The draft model is sped up by prompt lookup: it verifies looked-up tokens, and the target verifies the result.

    With quantised weights, a forward over many tokens takes clearly longer than one over a single token, so the target
    should verify few but good draft tokens. The inner draft consists of tokens that followed the last n-gram earlier in
    the text. The draft model reads it in one forward, takes a token from each row, and follows the inner draft as long
    as they agree, until it has at least `least` tokens. The result is exactly the draft model's own chain, in fewer
    forwards. The paper verifies a tree from a trained head, greedily; here prompt lookup replaces the head, and
    sampling works as well. Load the models in nf4 for the paper's setting. ahead = 0 makes it a plain draft model,
    least = 0 is plain decoding. Zhang et al. 2025, arXiv 2505.22179.
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

    _lookup = None

    def propose(self, lm, budget) -> Iterator:
        if self._lookup is None:  # kept, because its index grows with the text
            self._lookup = make("prompt_lookup", n_max=self.n_max, occurrence="latest", variant="vllm")
        chain, inner, leaf, gained = new_tree(lm, self), new_tree(lm, self), ROOT, []
        while leaf is not None and len(chain) < min(self.least, budget):
            node, length = leaf, len(chain)
            for token in self._lookup.look_up(lm.tokens + chain.tokens, min(self.ahead, budget - length - 1)):
                node = inner.add(token, node)
            rows = yield lm.stream("draft").extend(inner)
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

    def _follow(self, lm, inner, rows, leaf: int, chain: TokenTree) -> int | None:
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
