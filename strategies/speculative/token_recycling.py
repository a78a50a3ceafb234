"""Token recycling: what the model considered before as drafter."""
from collections.abc import Iterator
from hashlib import blake2b

from playground.algorithms.speculative.tree_template import template
from playground.contract import Drafter, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure


class Successors:
    """For each token that was ever read, the tokens that last seemed likeliest to follow it, best first."""

    def __init__(self):
        self.known: dict[int, tuple[int, ...]] = {}

    def __deepcopy__(self, memo):
        copy = Successors()
        copy.known = dict(self.known)
        return copy

    def learn(self, tokens, rows, k) -> None:
        """`rows` are scores [n, V] after n tokens. They replace what was known; of a token that stands there twice the
        last row counts.
        """
        top = rows.topk(min(k, rows.shape[1])).indices.tolist()
        self.known.update(zip(tokens, map(tuple, top)))

    def grow(self, tree, token, paths, ends) -> None:
        """Add the paths after a token, as far as their tokens are known and none before the last ends the text."""
        nodes = {(): ROOT}
        for *parent, rank in paths:
            above = nodes.get(tuple(parent))
            followers = () if above is None else self.known.get(token if above == ROOT else tree.tokens[above], ())
            if rank < len(followers):
                node = tree.add(followers[rank], above)
                if not ends(followers[rank]):
                    nodes[(*parent, rank)] = node

    def digest(self) -> str:
        return blake2b(repr(sorted(self.known.items())).encode(), digest_size=8).hexdigest()


class TokenRecycling(Drafter):
    """Every pass shows which tokens nearly came next. Remember them for each token, and grow the next guesses out of
    them.

    The memory holds the k likeliest successors that the model last gave a token, whatever stood before it: refused
    guesses teach as much as kept ones, and what was learned stays from prompt to prompt. Guesses are looked up along a
    fixed tree of ranks. A token never read has no successors here, where the released code guesses token 0. Luo et al.
    2024, arXiv
    2408.08696; smaller trees than the paper's are our own choice.
    """

    name, title, paper, sheet = "token_recycling", "Token recycling", "2408.08696", "speculative/token-recycling"
    guarantee, remembers = ("collapses",), True

    nodes: int = knob(80, 0, 80, step=1, help="guesses in the tree; 0 is plain decoding")
    k: int = knob(8, 1, 8, step=1, help="successors kept of each token; 1 makes the tree a chain")

    def propose(self, lm, budget) -> Iterator:
        self._memory = lm.memory(self.name, Successors, self.k)
        tree = TokenTree(self.name)
        self._memory.grow(tree, lm.tokens[-1], [path for path in template(self.nodes) if len(path) <= budget], lm.ends)
        yield Figure(
            "scalar",
            "successors",
            {"x": lm.generated, "series": {"tokens whose successors are known": len(self._memory.known)}},
        )
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._memory.learn([rows.committed[-1], *tree.tokens], rows.raw, self.k)
