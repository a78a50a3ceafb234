"""RASD: what a draft model guesses and what a text already says, in one tree."""
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from playground.algorithms.speculative.drafting import best, grow, guess_row
from playground.algorithms.speculative.suffix_index import BREAK, Suffixes
from playground.contract import Drafter, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.errors import Refusal
from playground.events import Figure

SHOWN = 12  # first tokens of what was found that are named
SOURCES = {(True, False): "drafted", (False, True): "retrieved", (True, True): "both"}


@dataclass
class Continuations:
    """Continuations of the text's last `length` tokens, a token list for each occurrence, the earliest first."""

    length: int
    texts: list[list[int]]


class RASD(Drafter):
    """Look up how the text went on elsewhere after its last words, keep of that what the draft finds plausible, and
    check it beside the draft's guesses.

    The draft grows a tree: the `width` likeliest tokens after each of its `width` likeliest paths, of which the `nodes`
    likeliest stay. The longest ending of the text that occurs before, in this text or in a corpus that was given,
    yields continuations; those stay whose first token is among the draft's `prune` likeliest, and of their tokens those
    most often found. They are put into the draft's tree along the beginnings both share, so that one pass checks both.
    No guess is drawn, so the text is exact whatever is retrieved. nodes = retrieved = 0 is plain decoding, retrieved =
    0 the draft's tree alone, nodes = prune = 0 retrieval alone. The paper's tree is EAGLE-2's and its numbers are not
    ours. Quan et al. 2025, arXiv 2503.03434.
    """

    name, title, paper, sheet = "rasd", "RASD: retrieved and drafted", "2503.03434", "speculative/rasd"
    needs, guarantee, reconstruction, sure = ("draft",), ("collapses",), True, "low"

    nodes: int = knob(16, 0, 60, step=1, help="guesses of the draft in the tree; 0 leaves them out")
    width: int = knob(3, 1, 10, step=1, help="likeliest tokens the draft adds to a path, and paths it goes on with")
    depth: int = knob(5, 0, 8, step=1, help="tokens the draft guesses one after another")
    retrieved: int = knob(24, 0, 60, step=1, help="retrieved guesses in the tree; 0 looks nothing up")
    prune: int = knob(
        10, 0, 100, step=1, help="likeliest tokens of the draft one of which a continuation begins with; 0 keeps all"
    )
    longest: int = knob(8, 1, 16, step=1, help="last tokens of the text that are looked for at most")
    shortest: int = knob(2, 1, 16, step=1, help="and at least")
    length: int = knob(10, 1, 20, step=1, help="tokens taken of each continuation")
    text: bool = knob(True, help="look in this text itself")
    corpus: str = knob("", multiline=True, file=True, help="texts to look in besides, divided by empty lines")

    _stores = None

    def check(self):
        if self.shortest > self.longest:
            raise Refusal(
                "The shortest ending that is looked for is longer than the longest: take a smaller one.", "shortest"
            )

    def propose(self, lm, budget) -> Iterator:
        if self._stores is None:
            self._begin(lm)
        self._learn(lm.tokens)
        yield from self._tell_sources(lm)
        tree, q = TokenTree(self.name), None
        if self.nodes:
            tree, q = yield from self._drafted(lm, min(self.depth, budget))
        found = self.find(lm.tokens, budget, lm.ends) if self.retrieved else Continuations(0, [])
        if found.texts and self.prune:
            q = q if q is not None else guess_row(lm, tree, (yield lm.stream("draft").extend()), ROOT)
            yield from self._tell_found(lm, found, q)
        tree, self._sources = self.fused(tree, self.pruned(found.texts, q))
        yield from self._tell(lm, tree, found)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._stood.update(self._sources[node] for node in verdict.kept)
        self._learn(rows.sequence.tokens)

    def _begin(self, lm) -> None:
        self._stores, self._learned = [Suffixes(), Suffixes()], 0
        self._sources, self._stood = [], Counter()
        self._stores[0].begin()
        for passage in filter(None, map(str.strip, self.corpus.split("\n\n"))):
            self._stores[1].begin()
            self._stores[1].add(lm.spell(passage))

    def _learn(self, tokens) -> None:
        """What was committed since."""
        if self.text:
            self._stores[0].add(tokens[self._learned:])
        self._learned = len(tokens)

    # --- the draft's tree ---

    def _drafted(self, lm, depth) -> Iterator:
        """The draft's likeliest paths, and its distribution [V] of the next token; None where nothing can follow."""
        tree, chances, first = TokenTree(self.name), {ROOT: 1.0}, []

        def level(rows, leaves, number):
            made = []
            for leaf in leaves:
                q = guess_row(lm, tree, rows, leaf)
                first.append(q)
                made += best(tree, leaf, q, self.width) if q is not None else []
            chances.update({node: chances[tree.parents[node]] * tree.confidence[node] for node in made})
            return sorted(made, key=lambda node: -chances[node])[:self.width]

        yield from grow(lm, lm.stream("draft"), tree, depth, level)
        likeliest = sorted(range(len(tree)), key=lambda node: -chances[node])[:self.nodes]
        return tree.only(sorted(likeliest)), first[0] if first else None

    # --- what is retrieved ---

    def find(self, tokens, budget, ends=lambda token: False) -> Continuations:
        """What followed the longest ending of a text wherever it occurs; one at the very end of a store is followed by
        nothing.
        """
        context, endings = tokens[-self.longest:], {}
        for store in self._stores:
            for length, places in store.occurrences(context):
                endings.setdefault(length, []).append((store, places))
        for length in sorted((length for length in endings if length >= self.shortest), reverse=True):
            texts = [
                text
                for store, places in endings[length]
                for place in places
                if (text := self._after(store, place, budget, ends))
            ]
            if texts:
                return Continuations(length, texts)
        return Continuations(0, [])

    def _after(self, store, place, budget, ends) -> list[int]:
        """The tokens from a place on, up to the end of their text."""
        text = store.tokens[place:place + min(self.length, budget)]
        return text[
            : next((i + (token != BREAK) for i, token in enumerate(text) if token == BREAK or ends(token)), len(text))
        ]

    def pruned(self, texts, q) -> list[list[int]]:
        """The continuations that begin with one of the tokens q [V] finds likeliest, cut down to those beginnings most
        often found.
        """
        if self.prune and q is not None:
            likeliest = q.topk(min(self.prune, len(q)))
            plausible = {token for p, token in zip(likeliest.values.tolist(), likeliest.indices.tolist()) if p > 0}
            texts = [text for text in texts if text[0] in plausible]
        # in the order they were first found
        weights = Counter(tuple(text[:end]) for text in texts for end in range(1, len(text) + 1))
        heaviest = sorted(weights, key=lambda beginning: (-weights[beginning], len(beginning)))[:self.retrieved]
        return sorted(map(list, heaviest), key=len)

    def fused(self, tree, texts) -> tuple[TokenTree, list[str]]:
        """The draft's tree with all these texts in it, what they share with it held once, and where each node comes
        from.
        """
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

    # --- what is shown ---

    def _tell_sources(self, lm) -> Iterator:
        if self._stood:
            stood = {source: self._stood[source] for source in SOURCES.values()}
            yield Figure("scalar", "guesses that stood so far", {"x": lm.generated, "series": stood})

    def _tell_found(self, lm, found, q) -> Iterator:
        firsts = Counter(text[0] for text in found.texts)
        if q is None:
            return
        tokens = [token for token, _ in firsts.most_common(SHOWN)]
        labels = [f"{lm.piece(token)} (rank {int((q > q[token]).sum()) + 1})" for token in tokens]
        yield Figure("bars", "first retrieved tokens, by the draft", {"labels": labels, "values": q[tokens].tolist()})

    def _tell(self, lm, tree, found) -> Iterator:
        if found.texts and lm.generated:
            span = [
                max(0, lm.generated - found.length),
                lm.generated,
                f"found {len(found.texts)} times",
                len(found.texts),
            ]
            yield Figure("spans", "endings that were found", {"spans": [span]})
        if len(tree):
            labels = [
                "text so far",
                *(f"{lm.piece(token)} ({source})" for token, source in zip(tree.tokens, self._sources)),
            ]
            yield Figure(
                "tree",
                "where the guesses come from",
                {
                    "labels": labels,
                    "parents": [-1, *(parent + 1 for parent in tree.parents)],
                    "values": [1.0, *tree.confidence],
                },
            )
