"""STAND: remembered next-token distributions of n-grams as drafter."""
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import accumulate

import torch

from playground.algorithms.speculative.drafting import purpose
from playground.algorithms.speculative.shared_table import SharedTable
from playground.algorithms.speculative.tree_template import template
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import largest
from playground.events import Figure


class NGramDistributions:
    """For every n-gram read: the most probable next tokens with their mean probabilities, and the number of rows."""

    def __init__(self):
        self.known: SharedTable[tuple[int, ...], tuple[dict[int, float], int]] = SharedTable()

    def learn(self, context, p, orders, most) -> None:
        """Add the model's distribution p [V] after a context to the means of its last 1, 2, ... `orders` tokens."""
        top = largest(p, min(most, len(p)))
        fresh = dict(zip(top.indices.tolist(), top.values.tolist()))
        for n in range(1, min(orders, len(context)) + 1):
            key = tuple(context[-n:])
            self.known[key] = (
                self._mean(*self.known[key], p, fresh, most) if key in self.known else fresh,
                self.seen(key) + 1,
            )

    def _mean(self, old, count, p, fresh, most) -> dict[int, float]:
        tokens = list(dict.fromkeys([*old, *fresh]))
        now = dict(zip(tokens, p[tokens].tolist()))
        mean = {token: (count * old.get(token, 0.0) + now[token]) / (count + 1) for token in tokens}
        return dict(sorted(mean.items(), key=lambda item: -item[1])[:most])

    def seen(self, key) -> int:
        """Number of rows averaged for an n-gram."""
        return self.known[key][1] if key in self.known else 0

    def after(self, context, orders) -> tuple[dict[int, float], int]:
        """Probabilities, renormalised, after the longest known suffix of a context, and the length of that suffix."""
        for n in range(min(orders, len(context)), 0, -1):
            found = self.known.get(tuple(context[-n:]))
            if found:
                likely = {token: p for token, p in found[0].items() if p > 0}
                total = sum(likely.values())
                return {token: p / total for token, p in likely.items()}, n
        return {}, 0

    def digest(self) -> str:
        return blake2b(repr(sorted(self.known.items())).encode(), digest_size=8).hexdigest()


class ListedTokens:
    """A few tokens with their probabilities, sampled without replacement. On the host, which for ten tokens takes a
    fraction of the time of tensors.
    """

    def __init__(self, likely: dict[int, float]):
        self.p = dict(likely)  # of the remaining tokens, not renormalised

    def take(self, draw: Callable[[torch.Tensor], int]) -> int:
        """Sample a token with draw(distribution [n]) and remove it."""
        p = torch.tensor(list(self.p.values()), dtype=torch.float64)
        return self._remove(draw(p / p.sum()))

    def take_at(self, u: float) -> int:
        """Sample with a uniform number in [0, 1), by inverting the cumulative sum, and remove the token."""
        sums = list(accumulate(self.p.values()))
        return self._remove(min(bisect_right(sums, u * sums[-1]), len(sums) - 1))

    def _remove(self, index: int) -> int:
        token = list(self.p)[index]
        del self.p[token]
        return token


class Stand(Drafter):
    """Store the model's next-token distributions after every n-gram, and sample draft tokens from them.

    Reasoning texts repeat themselves, within an answer and across answers. For every n-gram of up to `orders` tokens,
    the mean of the model's largest probabilities is stored. Draft tokens are sampled from the entry of the longest
    known suffix, siblings without replacement, along a static tree, and verified against the probabilities they were
    sampled with. The paper takes the top values after adding Gumbel noise, which has the same distribution. Entries
    persist for further answers to the same prompt under the same toggles. The paper fits its tree to samples; here it
    is that of token recycling. nodes = 0 is plain decoding. Song et al. 2025, arXiv 2506.04708.
    """

    name, title, paper, sheet = "stand", "STAND: remembered probabilities", "2506.04708", "speculative/stand"
    drawn, guarantee, remembers, reconstruction, sure = "without_replacement", ("collapses",), True, True, "medium"

    nodes: int = knob(80, 0, 80, step=1, help="draft tokens in the tree; 0 is plain decoding")
    orders: int = knob(4, 1, 6, step=1, help="longest n-gram stored, in tokens")
    stored: int = knob(10, 2, 32, step=1, help="next tokens stored per n-gram")
    stochastic: bool = knob(True, help="sample draft tokens; otherwise take the most probable ones")
    share: bool = knob(True, help="remember across answers to the same prompt")

    _memory = None
    _overlap = None  # of the stored and the target's distribution at the last root

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._memory is None:
            self._begin(lm)
        tree, hits = self._new_tree(lm), Counter()
        self._grow(lm, tree, budget, hits)
        yield Figure(
            "scalar",
            "n-grams in memory",
            {"x": lm.generated, "series": {"n-grams": len(self._memory.known)}},
        )
        if hits:
            lengths = sorted(hits)
            yield Figure(
                "bars",
                "nodes, by the length of the matched n-gram",
                {"labels": [str(n) for n in lengths], "values": [hits[n] for n in lengths]},
            )
        if self._overlap is not None:
            yield Figure(
                "scalar",
                "overlap of stored and target distribution",
                {"x": max(0, lm.generated - 1), "series": {"overlap": self._overlap}},
            )
        return tree

    def observe(self, tree, rows, verdict) -> None:
        before = rows.committed
        stored, _ = self._memory.after(before, self.orders)
        p = self._final(rows, ROOT)
        self._overlap = sum(min(q, float(p[token])) for token, q in stored.items()) if stored else None
        for node in (ROOT, *verdict.kept):
            self._memory.learn(
                before[-self.orders :] + tree.prefix(node), self._final(rows, node), self.orders, self.stored
            )

    def _begin(self, lm: Lane) -> None:
        other_parts = [part for part in lm.assembly.parts() if part.name != self.name]
        about = (lm.tokens[:lm.prompt_length], self.orders, self.stored, other_parts)
        self._memory = lm.memory(self.name, NGramDistributions, *about) if self.share else NGramDistributions()

    def _new_tree(self, lm: Lane) -> TokenTree:
        return TokenTree(self.name, self.drawn if self._draws(lm) else "deterministic")

    def _draws(self, lm: Lane) -> bool:
        return self.stochastic and lm.chain.draws

    def _final(self, rows, node) -> torch.Tensor:
        """The target's distribution [V] after masks and samplers, also under greedy decoding."""
        return rows.stages_of([rows.row(node)])[-1].scores[0].softmax(-1).nan_to_num()

    def _grow(self, lm: Lane, tree, budget, hits) -> None:
        """Add children along the template's paths, as far as a suffix of each path is known."""
        widths = Counter(path[:-1] for path in template(self.nodes))
        nodes, like, text = {(): ROOT}, lm.target.seen.raw[0], lm.tokens[-self.orders:]
        for path, width in widths.items():
            if path in nodes and len(path) < budget and not (path and lm.ends(tree.tokens[nodes[path]])):
                likely, length = self._memory.after(text + tree.prefix(nodes[path]), self.orders)
                hits[length] += 1
                children = self._children(lm, tree, nodes[path], likely, width, like)
                nodes |= {(*path, rank): child for rank, child in enumerate(children)}

    def _children(self, lm: Lane, tree, parent, likely, width, like) -> list[int]:
        if not self._draws(lm):
            return [tree.add(token, parent, confidence=likely[token]) for token in list(likely)[:width]]
        q, position, children = self._spread(likely, like), len(lm.tokens) + len(tree.path(parent)), []
        remaining = ListedTokens(likely)
        while remaining.p and len(children) < width:
            token = lm.draw_remaining(remaining, position, purpose(parent, len(children)))
            children.append(tree.add(token, parent, q))
        return children

    def _spread(self, likely, like) -> torch.Tensor:
        """These probabilities as a distribution over the vocabulary, [V]."""
        at = torch.tensor(list(likely), dtype=torch.long, device=like.device)
        return torch.zeros_like(like).index_put(
            (at,), torch.tensor(list(likely.values()), dtype=like.dtype, device=like.device)
        )
