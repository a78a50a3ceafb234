"""VED: a search over a catalogue that spends its budget where value and entropy are high."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from playground.algorithms.search.commit_path import FoundToken, adopt
from playground.algorithms.search.explored_prefixes import Explored
from playground.algorithms.search.rewards import Rewarded, classifier_knob, reward_knob
from playground.contract import Lane, RewardedText, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import on_device
from playground.errors import Refusal
from playground.events import Figure, Note

MOST_TOKENS = 20_000  # of all items
SHOWN = 40  # prefixes in the picture of the tree
ROUNDING = 1e-12  # of a priority that equals the mean of its depth
DEFAULT = "cake|beer|date|bean|peas"


@dataclass(eq=False)
class ItemPrefix:
    """A prefix of items: what may follow it, its value V and entropy H, and its visits."""

    node: int  # in the tree of all prefixes read; that of its parent if its last token needs no reading
    token: int
    parent: "ItemPrefix | None"
    following: dict  # by token, what may follow it; empty for a complete item
    logp: float = 0.0  # of its tokens among the valid ones, in nats
    model_logp: float = 0.0  # of its tokens under the unmodified model
    shares: dict[int, float] = field(default_factory=dict)  # log-probability of each valid token, among these
    raw: dict[int, float] = field(default_factory=dict)  # the same among all tokens
    rows: object = None  # among these is the row after it, once it was read
    state: Tensor | None = None
    value: float = 0.0
    entropy: float = 0.0
    visits: int = 1
    children: dict[int, "ItemPrefix"] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def complete(self) -> bool:
        return not self.following

    @property
    def is_tip(self) -> bool:
        """Whether nothing was added to it yet, and no item is complete here."""
        return not (self.complete or self.children)

    @property
    def unexpanded(self) -> list[int]:
        return [token for token in self.following if token not in self.children]

    @property
    def path(self) -> list["ItemPrefix"]:
        return [*(self.parent.path if self.parent else []), self]


class VED(Rewarded):
    """Choose among the items of a catalogue: a small beam search first, then a search that returns to prefixes with a
    high value and a high entropy until a budget of tokens is spent.

    The items form a trie, and the model's distribution is renormalised over the tokens that continue some item. A
    prefix has the priority G = V + entropy_weight * H: V is the reward of the prefix, H the entropy of what may follow.
    Each walk goes down from the prompt by G + exploration * sqrt(ln(N + 1) / (n + 1)), N and n the visits of the root
    and of the prefix; it stops where adding a new continuation scores highest, which is allowed if G is at least the
    mean of its depth. Complete items are ranked by V, ties by probability. budget 1 is the beam search. Jiang et al.
    2026, arXiv 2602.10699; where a walk stops is our reading, and V is the process reward of this project, not a value
    head trained for one catalogue.
    """

    name, title, paper, sheet = "ved", "VED (V-STAR)", "2602.10699", "search/v-star-ved"
    guarantee, several, whole_answers, refuses = ("heuristic",), True, True, ("sampler", "constraint")
    reconstruction, sure = True, "low"

    items: str = knob(DEFAULT, multiline=True, file=True, help="the catalogue: items separated by | or one per line")
    reward: str = reward_knob()
    classifier: str = classifier_knob()
    width: int = knob(2, 1, 16, step=1, help="beams of the first search")
    budget: float = knob(3.0, 1.0, 16.0, step=0.5, help="tokens read, as a multiple of those of the first search")
    entropy_weight: float = knob(0.1, 0.0, 1.0, step=0.05, help="weight of the entropy in the priority")
    exploration: float = knob(1.0, 0.0, 3.0, step=0.1, help="weight of rarely visited prefixes; 0 follows the priority")
    gate: bool = knob(True, help="add continuations only to prefixes of at least the mean priority of their depth")
    draws: bool = knob(True, help="sample the continuation that is added; otherwise the most probable one")
    space: bool = knob(True, help="add a space before each item, as answers usually begin with one")

    def check(self) -> None:
        super().check()
        if len(self._texts()) < 2:
            raise Refusal("There is nothing to choose: give at least two different items, separated by |.", "items")

    def decode(self, lm: Lane) -> Iterator:
        rows = yield lm.prefill()
        self._explored, self._spent, self._means = Explored(TokenTree(self.name)), 0, {}
        root = ItemPrefix(ROOT, -1, None, self._trie(lm))
        yield from self._read(lm, [root], rows)
        yield from self._beam(lm, root)
        allowed, first = int(self.budget * self._spent), {tuple(self._tokens(leaf)) for leaf in leaves(root)}
        yield Note(f"The beam search read {self._spent} tokens and found {len(first)} items; the budget is {allowed}.")
        yield from self._search(lm, root, allowed)
        found = sorted(leaves(root), key=lambda leaf: (-leaf.value, -leaf.logp))
        yield from self._compared(lm, found, first)
        yield from adopt(lm, [FoundToken(each.token, each.parent.rows, each.parent.node) for each in found[0].path[1:]])

    def _beam(self, lm: Lane, root: ItemPrefix) -> Iterator:
        """Keep the `width` most probable prefixes of each length, complete items among them."""
        beam = [root]
        while any(not prefix.complete for prefix in beam):
            offers = [(prefix.logp, prefix, None) for prefix in beam if prefix.complete]
            offers += [(p.logp + share, p, token) for p in beam for token, share in p.shares.items()]
            kept = sorted(offers, key=lambda offer: -offer[0])[:self.width]
            beam = [p if token is None else self._child(lm, p, token) for _, p, token in kept]
            yield from self._read(lm, [prefix for (_, _, token), prefix in zip(kept, beam) if token is not None])
            yield self._tree(lm, root)

    def _search(self, lm: Lane, root: ItemPrefix, allowed: int) -> Iterator:
        """Add one continuation after another, as long as what is left suffices to complete the best prefix without any.
        """
        while (prefix := self._walk(root)) is not None:
            left, tips = allowed - self._spent, [each for each in prefixes(root) if each.is_tip]
            tip = max(tips, key=self._priority, default=None)
            token = self._added(lm, prefix)
            if tip and left == height(tip.following, lm.ends):
                yield from self._finish(lm, tip)
                return
            if left < (0 if lm.ends(token) else 1 + height(prefix.following[token], lm.ends)):
                return
            for each in prefix.path:
                each.visits += 1
            yield from self._read(lm, [self._child(lm, prefix, token)])
            yield self._tree(lm, root)

    def _walk(self, root: ItemPrefix) -> ItemPrefix | None:
        """The prefix that gets another continuation; None if no prefix may get one."""
        opened = self._opened_prefixes(root)
        if root not in opened and not any(child in opened for child in root.children.values()):
            return None
        prefix = root
        while True:
            options = [child for child in prefix.children.values() if child in opened]
            best = max(options, key=lambda child: self._score(root, child, child.visits), default=None)
            if self._may_expand(prefix) and (
                best is None or self._score(root, prefix, 0) > self._score(root, best, best.visits)
            ):
                return prefix
            prefix = best

    def _score(self, root: ItemPrefix, prefix: ItemPrefix, visits: int) -> float:
        return self._priority(prefix) + self.exploration * math.sqrt(math.log(root.visits + 1) / (visits + 1))

    def _priority(self, prefix: ItemPrefix) -> float:
        return prefix.value + self.entropy_weight * prefix.entropy

    def _opened_prefixes(self, root: ItemPrefix) -> set:
        """Prefixes that may get a continuation, or lead to one that may."""
        found: dict[int, list[float]] = {}
        for each in prefixes(root):
            found.setdefault(each.depth, []).append(self._priority(each))
        self._means = {depth: sum(values) / len(values) for depth, values in found.items()}
        return {ancestor for each in prefixes(root) if self._may_expand(each) for ancestor in each.path}

    def _may_expand(self, prefix: ItemPrefix) -> bool:
        return bool(prefix.unexpanded) and self._passes(prefix)

    def _added(self, lm: Lane, prefix: ItemPrefix) -> int:
        """The token of the new continuation."""
        rest = prefix.unexpanded
        shares = torch.tensor([prefix.shares[token] for token in rest], dtype=torch.float64).softmax(0)
        if not self.draws:
            return rest[int(shares.argmax())]
        return rest[lm.draw(shares, len(lm.tokens) + prefix.depth, f"continuation {self._spent} {prefix.visits}")]

    def _finish(self, lm: Lane, prefix: ItemPrefix) -> Iterator:
        """Complete a prefix by its most probable continuations."""
        while not prefix.complete:
            child = self._child(lm, prefix, max(prefix.shares, key=prefix.shares.get))
            yield from self._read(lm, [child])
            prefix = child

    # --- the catalogue ---

    def _texts(self) -> list[str]:
        lines = self.items.replace("|", "\n").splitlines()
        return list(dict.fromkeys(text.strip() for text in lines if text.strip()))

    def _trie(self, lm: Lane) -> dict:
        """What may follow, by token, of all items; each ends with an end token, if the model has one."""
        end, trie, count = sorted(lm.end_ids)[:1], {}, 0
        for text in self._texts():
            spelt = (lm.spell(f" {text}") if self.space else []) or lm.spell(text)
            count += len(spelt)
            if not spelt:
                raise Refusal(f"This model has no tokens for the item {text!r}: choose another word.", "items")
            if len(spelt) > lm.remaining:
                raise Refusal(
                    f"The item {text!r} has {len(spelt)} tokens, but only {lm.remaining} fit: raise the length.",
                    "items",
                )
            place = trie
            for token in [*spelt, *end]:
                place = place.setdefault(token, {})
        if count > MOST_TOKENS:
            raise Refusal(
                f"The items have {count:,} tokens, and the maximum is {MOST_TOKENS:,}: give fewer or shorter ones.",
                "items",
            )
        return trie

    # --- prefixes ---

    def _child(self, lm: Lane, prefix: ItemPrefix, token: int) -> ItemPrefix:
        """A continuation of a prefix that was read. An end token needs no reading."""
        ends = lm.ends(token)
        node = prefix.node if ends else self._explored.place(token, prefix.node)
        child = ItemPrefix(
            node,
            token,
            prefix,
            prefix.following[token],
            prefix.logp + prefix.shares[token],
            prefix.model_logp + prefix.raw[token],
            state=prefix.state if ends else None,
        )
        prefix.children[token] = child
        return child

    def _read(self, lm: Lane, prefixes: list[ItemPrefix], rows=None) -> Iterator:
        """Read new prefixes in one forward, and compute their values and entropies."""
        unread = [prefix for prefix in prefixes if prefix.parent is None or not lm.ends(prefix.token)]
        if unread and rows is None:
            self._spent += len(unread)
            rows = yield lm.extend(self._explored.tree)
        for prefix in unread:
            prefix.state = None if rows.hidden is None else rows.hidden[rows.row(prefix.node)]  # a new node's
            prefix.rows = rows
        self._read_shares(unread, rows)
        scores = yield from self.rewards(lm, [self._rewarded(lm, prefix) for prefix in prefixes])
        for prefix, score in zip(prefixes, scores):
            prefix.value = score

    def _read_shares(self, prefixes: list[ItemPrefix], rows) -> None:
        """The distributions over valid tokens after prefixes, in one transfer; a complete item has none."""
        pairs = [(rows.row(prefix.node), token) for prefix in prefixes for token in prefix.following]
        if pairs:
            places, tokens = on_device(list(zip(*pairs)), rows.raw.device)
            read = rows.logp[places, tokens].cpu().double()
            for prefix, raw in zip(prefixes, read.split([len(prefix.following) for prefix in prefixes])):
                if prefix.following:
                    self._distribute(prefix, raw)

    def _distribute(self, prefix: ItemPrefix, raw: Tensor) -> None:
        """Set the distribution of a prefix, by log-probabilities of what may follow, and its entropy in nats."""
        valid, shares = list(prefix.following), raw.log_softmax(0)
        prefix.raw, prefix.shares = dict(zip(valid, raw.tolist())), dict(zip(valid, shares.tolist()))
        prefix.entropy = float(-(shares.exp() * shares).nan_to_num().sum())

    def _rewarded(self, lm: Lane, prefix: ItemPrefix) -> RewardedText:
        return RewardedText(lm.tokens + self._tokens(prefix), prefix.model_logp, prefix.state)

    def _tokens(self, prefix: ItemPrefix) -> list[int]:
        return [each.token for each in prefix.path[1:]]

    # --- what is shown ---

    def _tree(self, lm: Lane, root: ItemPrefix) -> Figure:
        """The prefixes found so far, the first ones first, coloured by value."""
        shown = prefixes(root)[:SHOWN]
        numbers = {id(each): number for number, each in enumerate(shown)}
        labels = [
            "the prompt" if each.parent is None else f"{lm.piece(each.token)} V {each.value:.2f} H {each.entropy:.2f} "
            f"n {each.visits}{'' if each.complete or self._passes(each) else ' below the mean'}"
            for each in shown
        ]
        parents = [ROOT if each.parent is None else numbers[id(each.parent)] for each in shown]
        values = [each.value for each in shown]
        return Figure("tree", "prefixes by value", {"labels": labels, "parents": parents, "values": values})

    def _passes(self, prefix: ItemPrefix) -> bool:
        return not self.gate or self._priority(prefix) >= self._means.get(prefix.depth, -math.inf) - ROUNDING

    def _compared(self, lm: Lane, found: list[ItemPrefix], first: set) -> Iterator:
        """The items found, best first, and which of them the beam search had."""
        rows = [
            f"{lm.text_of(self._tokens(leaf)).strip()}{'' if tuple(self._tokens(leaf)) in first else ' (new)'}"
            for leaf in found
        ]
        ranks = sorted(range(len(found)), key=lambda place: -found[place].logp)
        table = [[leaf.value, leaf.logp, 1 + ranks.index(place)] for place, leaf in enumerate(found)]
        columns = ["V", "log p among the items", "rank by probability"]
        yield Figure("matrix", "items found, best first", {"rows": rows, "columns": columns, "values": table})
        yield Note(f"{len(found)} items were found with {self._spent} tokens read; {rows[0]!r} has the highest value.")


def prefixes(prefix: ItemPrefix) -> list[ItemPrefix]:
    """A prefix and all below it that were found, shortest first."""
    found, waiting = [], [prefix]
    while waiting:
        found.append(waiting.pop(0))
        waiting += found[-1].children.values()
    return found


def leaves(root: ItemPrefix) -> list[ItemPrefix]:
    """The complete items found."""
    return [prefix for prefix in prefixes(root) if prefix.complete]


def height(following: dict, ends) -> int:
    """Longest number of tokens, without the end token, until an item is complete."""
    return max((0 if ends(token) else 1 + height(rest, ends) for token, rest in following.items()), default=0)
