"""Token recycling: earlier candidate tokens as drafter."""
from collections.abc import Iterator
from hashlib import blake2b

from playground.algorithms.speculative.shared_table import SharedTable
from playground.algorithms.speculative.tree_template import template
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import largest
from playground.events import Figure


class Successors:
    """For each token read, the most probable next tokens in its latest row, best first."""

    def __init__(self):
        self.known: SharedTable[int, tuple[int, ...]] = SharedTable()

    def learn(self, tokens, rows, k) -> None:
        """Store the top k of `rows`, logits [n, V] after n tokens. The last row of a repeated token counts."""
        top = largest(rows, min(k, rows.shape[1])).indices.tolist()
        for token, successors in zip(tokens, top):
            self.known[token] = tuple(successors)

    def grow(self, tree, token, paths, ends) -> None:
        """Add the template's paths after a token, as far as successors are known. End tokens get no children."""
        nodes = {(): ROOT}
        for *parent, rank in paths:
            above = nodes.get(tuple(parent))
            successors = () if above is None else self.known.get(token if above == ROOT else tree.tokens[above], ())
            if rank < len(successors):
                node = tree.add(successors[rank], above)
                if not ends(successors[rank]):
                    nodes[(*parent, rank)] = node

    def digest(self) -> str:
        return blake2b(repr(sorted(self.known.items())).encode(), digest_size=8).hexdigest()


class TokenRecycling(Drafter):
    """Every forward yields candidate tokens that were not chosen. Store them per token and build the next draft tree
    from them.

    The memory holds, for each token, the k most probable next tokens in its latest row, regardless of context. Rows of
    rejected draft tokens are stored as well, and the memory persists across prompts. The draft tree follows a static
    template of ranks. A token never read has no successors here; the released code drafts token 0. Trees smaller than
    the paper's are our addition. Luo et al. 2024, arXiv 2408.08696.
    """

    name, title, paper, sheet = "token_recycling", "Token recycling", "2408.08696", "speculative/token-recycling"
    guarantee, remembers = ("collapses",), True

    nodes: int = knob(80, 0, 80, step=1, help="draft tokens in the tree; 0 is plain decoding")
    k: int = knob(8, 1, 8, step=1, help="successors stored per token; 1 makes the tree a chain")

    def propose(self, lm: Lane, budget) -> Iterator:
        self._memory = lm.memory(self.name, Successors, self.k)
        tree = TokenTree(self.name)
        self._memory.grow(tree, lm.tokens[-1], [path for path in template(self.nodes) if len(path) <= budget], lm.ends)
        yield Figure(
            "scalar",
            "successors",
            {"x": lm.generated, "series": {"tokens with known successors": len(self._memory.known)}},
        )
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._memory.learn([rows.committed[-1], *tree.tokens], rows.raw, self.k)
