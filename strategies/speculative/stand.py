"""STAND: what the model thought before after the same words as drafter."""
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

import torch

from playground.algorithms.speculative.drafting import purpose
from playground.algorithms.speculative.tree_template import template
from playground.contract import Drafter, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure


class Thoughts:
    """For every few tokens that were read, the likeliest next ones with their mean probability, and over how many rows.
    """

    def __init__(self):
        self.known: dict[tuple[int, ...], tuple[dict[int, float], int]] = {}

    def __deepcopy__(self, memo):
        copy = Thoughts()
        copy.known = dict(self.known)
        return copy

    def learn(self, context, p, orders, most) -> None:
        """`p` [V] is what the model thinks after a context: it counts as one row more for its last 1, 2, ... `orders`
        tokens.
        """
        top = p.topk(min(most, len(p)))
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
        return self.known[key][1] if key in self.known else 0

    def after(self, context, orders) -> tuple[dict[int, float], int]:
        """What is known of the longest ending of a context, its probabilities made to sum to 1, and that ending's
        length.
        """
        for n in range(min(orders, len(context)), 0, -1):
            found = self.known.get(tuple(context[-n:]))
            if found:
                likely = {token: p for token, p in found[0].items() if p > 0}
                total = sum(likely.values())
                return {token: p / total for token, p in likely.items()}, n
        return {}, 0

    def digest(self) -> str:
        return blake2b(repr(sorted(self.known.items())).encode(), digest_size=8).hexdigest()


class Stand(Drafter):
    """Remember what the model thought after every few tokens, with probabilities, and draw the next guesses from that.

    Reasoning repeats itself, within one answer and from one answer to the next. For the last 1 to `orders` tokens the
    mean of the model's likeliest probabilities is kept; guesses are drawn from that of the longest ending known,
    siblings without replacement, along a fixed tree of ranks, and judged against the probabilities they were drawn
    with. The paper adds Gumbel noise and takes the largest: the same law. It stays for further answers to the same
    prompt under the same toggles. The paper fits its tree to samples; ours is that of token recycling. nodes = 0 is
    plain decoding. Song et al. 2025, arXiv 2506.04708.
    """

    name, title, paper, sheet = "stand", "STAND: remembered probabilities", "2506.04708", "speculative/stand"
    drawn, guarantee, remembers, reconstruction, sure = "without_replacement", ("collapses",), True, True, "medium"

    nodes: int = knob(80, 0, 80, step=1, help="guesses in the tree; 0 is plain decoding")
    orders: int = knob(4, 1, 6, step=1, help="tokens of the longest ending that is remembered")
    stored: int = knob(10, 2, 32, step=1, help="likeliest tokens kept of each ending")
    stochastic: bool = knob(True, help="draw guesses; otherwise the likeliest ones are taken")
    share: bool = knob(True, help="remember across answers to the same prompt")

    _thoughts = None
    _overlap = None  # of the remembered and the true distribution at the last root

    def propose(self, lm, budget) -> Iterator:
        if self._thoughts is None:
            self._begin(lm)
        tree, hits = self._new_tree(lm), Counter()
        self._grow(lm, tree, budget, hits)
        yield Figure(
            "scalar",
            "endings that are remembered",
            {"x": lm.generated, "series": {"endings": len(self._thoughts.known)}},
        )
        if hits:
            lengths = sorted(hits)
            yield Figure(
                "bars",
                "nodes, by the length of the ending found",
                {"labels": [str(n) for n in lengths], "values": [hits[n] for n in lengths]},
            )
        if self._overlap is not None:
            yield Figure(
                "scalar",
                "what memory and model agree on",
                {"x": max(0, lm.generated - 1), "series": {"overlap": self._overlap}},
            )
        return tree

    def observe(self, tree, rows, verdict) -> None:
        before = rows.committed
        remembered, _ = self._thoughts.after(before, self.orders)
        p = self._final(rows, ROOT)
        self._overlap = sum(min(q, float(p[token])) for token, q in remembered.items()) if remembered else None
        for node in (ROOT, *verdict.kept):
            self._thoughts.learn(
                before[-self.orders :] + tree.prefix(node), self._final(rows, node), self.orders, self.stored
            )

    def _begin(self, lm) -> None:
        beside = [part for part in lm.assembly.parts() if part.name != self.name]
        about = (lm.tokens[:lm.prompt_length], self.orders, self.stored, beside)
        self._thoughts = lm.memory(self.name, Thoughts, *about) if self.share else Thoughts()

    def _new_tree(self, lm) -> TokenTree:
        return TokenTree(self.name, self.drawn if self._draws(lm) else "deterministic")

    def _draws(self, lm) -> bool:
        return self.stochastic and lm.chain.draws

    def _final(self, rows, node) -> torch.Tensor:
        """The model's distribution [V] after masks and samplers; where nothing is drawn, before the best is chosen."""
        return rows.stages_of([rows.row(node)])[-1].scores[0].softmax(-1).nan_to_num()

    def _grow(self, lm, tree, budget, hits) -> None:
        """Children along the paths of the template, as far as their endings are known."""
        widths = Counter(path[:-1] for path in template(self.nodes))
        nodes, like, text = {(): ROOT}, lm.target.seen.raw[0], lm.tokens[-self.orders:]
        for path, width in widths.items():
            if path in nodes and len(path) < budget and not (path and lm.ends(tree.tokens[nodes[path]])):
                likely, found = self._thoughts.after(text + tree.prefix(nodes[path]), self.orders)
                hits[found] += 1
                children = self._children(lm, tree, nodes[path], likely, width, like)
                nodes |= {(*path, rank): child for rank, child in enumerate(children)}

    def _children(self, lm, tree, parent, likely, width, like) -> list[int]:
        if not self._draws(lm):
            return [tree.add(token, parent, confidence=likely[token]) for token in list(likely)[:width]]
        q, position, children, rest = (
            self._spread(likely, like),
            len(lm.tokens) + len(tree.path(parent)),
            [],
            dict(likely),
        )
        while rest and len(children) < width:
            token = list(rest)[
                lm.draw(torch.tensor(list(rest.values()), dtype=q.dtype), position, purpose(parent, len(children)))
            ]
            children.append(tree.add(token, parent, q))
            del rest[token]
        return children

    def _spread(self, likely, like) -> torch.Tensor:
        """The same as a distribution over all tokens, [V]."""
        at = torch.tensor(list(likely), dtype=torch.long, device=like.device)
        return torch.zeros_like(like).index_put(
            (at,), torch.tensor(list(likely.values()), dtype=like.dtype, device=like.device)
        )
