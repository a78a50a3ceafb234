"""Hierarchical speculation: a guess of guesses, for targets that check long trees slowly."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import guess_row, new_tree, purpose
from playground.contract import Drafter, knob, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure


class Hierarchical(Drafter):
    """The draft model has a drafter of its own: the text itself guesses, the draft model checks, the target checks what
    came of it.

    With quantised weights a pass of many rows takes clearly longer than one of a single row, so a target should check
    few guesses, and good ones. The inner guess is what followed the text's ending earlier on; the draft model reads it
    in one pass, takes a token from each row, and goes on along the guess for as long as it said the same, until at
    least `least` tokens stand. So they are exactly the draft model's own chain, made with fewer of its passes. The
    paper checks a tree of a trained head inside, and greedily; lookup stands in for it here, and drawing works as well.
    Load the models in nf4 for the paper's case. ahead = 0 makes it a plain draft model, least = 0 plain decoding. Zhang
    et al. 2025, arXiv 2505.22179.
    """

    name, title, paper, sheet = (
        "hierarchical",
        "Hierarchical speculation",
        "2505.22179",
        "speculative/spec-quantization",
    )
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)
    reconstruction, sure = True, "medium"

    least: int = knob(6, 0, 12, step=1, help="tokens the target gets to check, at least; 0 is plain decoding")
    ahead: int = knob(4, 0, 8, step=1, help="tokens looked up for one pass of the draft model; 0: it guesses alone")
    n_max: int = knob(3, 1, 8, step=1, help="longest ending of the text that is looked up, in tokens")

    def propose(self, lm, budget) -> Iterator:
        lookup = make("prompt_lookup", n_max=self.n_max, occurrence="latest", variant="vllm")
        chain, inner, leaf, gained = new_tree(lm, self), new_tree(lm, self), ROOT, []
        while leaf is not None and len(chain) < min(self.least, budget):
            node, stood = leaf, len(chain)
            for token in lookup.guess(lm.tokens + chain.tokens, min(self.ahead, budget - stood - 1)):
                node = inner.add(token, node)
            rows = yield lm.stream("draft").extend(inner)
            leaf = self._follow(lm, inner, rows, leaf, chain)
            gained.append(len(chain) - stood)
        if len(chain):
            yield Figure(
                "bars",
                "tokens of each pass of the draft model",
                {"labels": [f"pass {i + 1}" for i in range(len(gained))], "values": gained},
            )
            yield Figure(
                "scalar",
                "tokens to check",
                {"x": lm.generated, "series": {"tokens": len(chain), "passes of the draft": len(gained)}},
            )
        return chain

    def _follow(self, lm, inner, rows, leaf: int, chain: TokenTree) -> int | None:
        """Add the draft model's own token after each node, down the inner guess for as long as it says the same.

        Returns the node of the last one, which nobody has read yet; None where nothing can follow.
        """
        while (q := guess_row(lm, inner, rows, leaf)) is not None:
            place, draws = len(chain) - 1, lm.chain.draws
            token = lm.draw(q, rows.position(leaf), purpose(place, 0)) if draws else int(q.argmax())
            chain.add(token, place, q if draws else None, float(q[token]))
            child = next((child for child in inner.children(leaf) if inner.tokens[child] == token), None)
            if child is None:
                return inner.add(token, leaf)
            leaf = child
        return None
