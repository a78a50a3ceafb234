"""RASD: draft tokens of a model and retrieved continuations in one tree."""
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from playground.algorithms.speculative.drafting import best_of_level, draft_distribution, grow, level_distributions
from playground.algorithms.speculative.suffix_index import SuffixIndex, frequent_prefixes
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import largest
from playground.errors import Refusal
from playground.events import Figure

SHOWN = 12  # first tokens of retrieved continuations that are listed
SOURCES = {(True, False): "drafted", (False, True): "retrieved", (True, True): "both"}


@dataclass
class Continuations:
    """Continuations of the text's last `length` tokens: one token list per occurrence, the earliest first."""

    length: int
    texts: list[list[int]]


class RASD(Drafter):
    """Retrieve continuations of the last tokens, prune those the draft model finds implausible, and verify them
    together with the draft's own tree.

    The draft grows a tree: the `width` most probable tokens after each of its `width` most probable paths, of which the
    `nodes` most probable remain. Continuations are looked up for the longest suffix of the text that occurs elsewhere
    in it or in a given corpus. Only those that start with one of the draft's `prune` most probable tokens are used, and
    of these the `retrieved` most frequent prefixes. They are merged into the draft's tree along common prefixes, so one
    forward verifies both. Draft tokens are deterministic, so the output is exact regardless of what is retrieved. nodes
    = retrieved = 0 is plain decoding, retrieved = 0 the draft's tree alone, nodes = prune = 0 retrieval alone. The
    paper uses EAGLE-2's tree, and its settings differ from these. Quan et al. 2025, arXiv 2503.03434.
    """

    name, title, paper, sheet = "rasd", "RASD: retrieved and drafted", "2503.03434", "speculative/rasd"
    needs, guarantee, reconstruction, sure = ("draft",), ("collapses",), True, "low"

    nodes: int = knob(16, 0, 60, step=1, help="nodes from the draft model in the tree; 0 for none")
    width: int = knob(3, 1, 10, step=1, help="tokens the draft adds to a path, and paths it extends per level")
    depth: int = knob(5, 0, 8, step=1, help="levels of the draft's tree")
    retrieved: int = knob(24, 0, 60, step=1, help="retrieved nodes in the tree; 0 disables retrieval")
    prune: int = knob(
        10, 0, 100, step=1, help="keep continuations that start with one of the draft's top tokens; 0 keeps all"
    )
    longest: int = knob(8, 1, 16, step=1, help="longest suffix of the text to look up, in tokens")
    shortest: int = knob(2, 1, 16, step=1, help="shortest suffix of the text to look up, in tokens")
    length: int = knob(10, 1, 20, step=1, help="tokens taken from each continuation")
    text: bool = knob(True, help="search this text itself")
    corpus: str = knob("", multiline=True, file=True, help="further texts to search, separated by empty lines")

    _stores = None

    def check(self):
        if self.shortest > self.longest:
            raise Refusal(
                "shortest must not exceed longest, the longest suffix to look up: choose a smaller value.",
                "shortest",
            )

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._stores is None:
            self._begin(lm)
        self._learn(lm.tokens)
        yield from self._show_sources(lm)
        tree, q = TokenTree(self.name), None
        if self.nodes:
            tree, q = yield from self._drafted(lm, min(self.depth, budget))
        found = self.find(lm.tokens, budget, lm.ends) if self.retrieved else Continuations(0, [])
        if found.texts and self.prune:
            q = q if q is not None else draft_distribution(lm, tree, (yield lm.stream("draft").extend()), ROOT)
            yield from self._show_first_tokens(lm, found, q)
        tree, self._sources = self.fused(tree, self.pruned(found.texts, q))
        yield from self._show_tree(lm, tree, found)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._accepted.update(self._sources[node] for node in verdict.kept)
        self._learn(rows.sequence.tokens)

    def _begin(self, lm: Lane) -> None:
        self._stores, self._learned = [SuffixIndex(), SuffixIndex()], 0
        self._sources, self._accepted = [], Counter()
        self._stores[0].begin()
        for passage in filter(None, map(str.strip, self.corpus.split("\n\n"))):
            self._stores[1].begin()
            self._stores[1].add(lm.spell(passage))

    def _learn(self, tokens) -> None:
        """Index the tokens committed since the last call."""
        if self.text:
            self._stores[0].add(tokens[self._learned:])
        self._learned = len(tokens)

    # --- the draft's tree ---

    def _drafted(self, lm: Lane, depth) -> Iterator:
        """The draft's most probable paths, and its next-token distribution [V]; None if no token can follow."""
        tree, chances, q_by_row = TokenTree(self.name), {ROOT: 1.0}, []

        def level(rows, leaves, number):
            leaves, q = level_distributions(lm, tree, rows, leaves)
            q_by_row.extend(q)
            added = best_of_level(tree, leaves, q, self.width)
            chances.update({node: chances[tree.parents[node]] * tree.confidence[node] for node in added})
            return sorted(added, key=lambda node: -chances[node])[:self.width]

        yield from grow(lm, lm.stream("draft"), tree, depth, level)
        top = sorted(range(len(tree)), key=lambda node: -chances[node])[:self.nodes]
        return tree.only(sorted(top)), q_by_row[0] if q_by_row else None

    # --- retrieval ---

    def find(self, tokens, budget, ends=lambda token: False) -> Continuations:
        """Continuations of the longest suffix of a text that occurs in an index and has any."""
        context, suffixes = tokens[-self.longest:], {}
        for store in self._stores:
            for length, places in store.occurrences(context):
                suffixes.setdefault(length, []).append((store, places))
        for length in sorted((length for length in suffixes if length >= self.shortest), reverse=True):
            texts = [
                text
                for store, places in suffixes[length]
                for place in places
                if (text := store.continuation(place, min(self.length, budget), ends))
            ]
            if texts:
                return Continuations(length, texts)
        return Continuations(0, [])

    def pruned(self, texts, q) -> list[list[int]]:
        """The most frequent prefixes of the continuations that start with one of the top tokens of q [V]."""
        if self.prune and q is not None:
            top = largest(q, min(self.prune, len(q)))
            plausible = {token for p, token in zip(top.values.tolist(), top.indices.tolist()) if p > 0}
            texts = [text for text in texts if text[0] in plausible]
        return sorted(map(list, frequent_prefixes(texts, self.retrieved)), key=len)

    def fused(self, tree, texts) -> tuple[TokenTree, list[str]]:
        """The draft's tree with these texts merged into it along common prefixes, and the source of each node."""
        known = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens))}
        drafted, looked_up = len(tree), set()
        for text in texts:
            node = ROOT
            for token in text:
                if (node, token) not in known:
                    known[node, token] = tree.add(token, node)
                node = known[node, token]
                looked_up.add(node)
        return tree, [SOURCES[node < drafted, node in looked_up] for node in range(len(tree))]

    # --- figures ---

    def _show_sources(self, lm: Lane) -> Iterator:
        if self._accepted:
            accepted = {source: self._accepted[source] for source in SOURCES.values()}
            yield Figure("scalar", "draft tokens accepted so far", {"x": lm.generated, "series": accepted})

    def _show_first_tokens(self, lm: Lane, found, q) -> Iterator:
        firsts = Counter(text[0] for text in found.texts)
        if q is None:
            return
        tokens = [token for token, _ in firsts.most_common(SHOWN)]
        labels = [f"{lm.piece(token)} (rank {int((q > q[token]).sum()) + 1})" for token in tokens]
        yield Figure("bars", "first retrieved tokens, by the draft", {"labels": labels, "values": q[tokens].tolist()})

    def _show_tree(self, lm: Lane, tree, found) -> Iterator:
        if found.texts and lm.generated:
            span = [
                max(0, lm.generated - found.length),
                lm.generated,
                f"found {len(found.texts)} times",
                len(found.texts),
            ]
            yield Figure("spans", "matched suffixes", {"spans": [span]})
        if len(tree):
            labels = [
                "text so far",
                *(f"{lm.piece(token)} ({source})" for token, source in zip(tree.tokens, self._sources)),
            ]
            yield Figure(
                "tree",
                "sources of the draft tokens",
                {
                    "labels": labels,
                    "parents": [-1, *(parent + 1 for parent in tree.parents)],
                    "values": [1.0, *tree.confidence],
                },
            )
