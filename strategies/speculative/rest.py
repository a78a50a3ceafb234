"""REST: continuations in a datastore as drafts."""
from collections.abc import Iterator
from dataclasses import dataclass, field

from playground.algorithms.fairy_tales import tales
from playground.algorithms.speculative.suffix_index import SuffixIndex, frequent_prefixes
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.errors import Refusal
from playground.events import Figure


@dataclass
class Retrieved:
    """Continuations of the text's last `length` tokens in the datastore: one token list per occurrence."""

    length: int = 0
    texts: list[list[int]] = field(default_factory=list)


class REST(Drafter):
    """Look up the last tokens in a datastore, and draft the most frequent continuations as a tree. No draft model.

    Suffixes of the text are looked up from `longest` tokens down to `shortest`; the first that occurs in the datastore
    selects the continuations, `length` tokens after each of its occurrences. They form a trie, whose `nodes` most
    frequent prefixes become the draft tree, so that one forward verifies several continuations. Effective if the
    datastore resembles the answer; by default it is the bundled fairy tales. nodes = 0 is plain decoding. The authors
    use gigabytes of chats or code, and at most 5000 occurrences. He et al. 2023, arXiv 2311.08252.
    """

    name, title, paper, sheet = "rest", "REST: retrieval from a datastore", "2311.08252", "speculative/rest"
    guarantee = ("collapses",)

    nodes: int = knob(64, 0, 64, step=1, help="maximum draft tokens per round; 0 is plain decoding")
    length: int = knob(10, 1, 20, step=1, help="tokens taken from each continuation")
    longest: int = knob(16, 1, 32, step=1, help="longest suffix of the text to look up, in tokens")
    shortest: int = knob(2, 1, 16, step=1, help="shortest suffix of the text to look up, in tokens")
    corpus: str = knob("", multiline=True, file=True, help="text of the datastore; empty for the bundled fairy tales")

    _datastore = None

    def check(self):
        if self.shortest > self.longest:
            raise Refusal(
                "shortest must not exceed longest, the longest suffix to look up: choose a smaller value.",
                "shortest",
            )

    def propose(self, lm: Lane, budget) -> Iterator:
        if not self.nodes:
            return TokenTree(self.name)
        if self._datastore is None:
            self._datastore = SuffixIndex()
            self._datastore.begin()
            self._datastore.add(lm.spell(self.corpus.strip() or tales()))
        found = self.look_up(lm.tokens, budget, lm.ends)
        yield from self._figures(lm, found)
        return self.grown(found.texts)

    def look_up(self, text, budget, ends) -> Retrieved:
        """Continuations, at most `budget` tokens long, of the longest suffix of a text that has any."""
        matches = list(self._datastore.occurrences(text[-self.longest:]))
        for length, places in reversed(matches[self.shortest - 1:]):
            texts = [self._datastore.continuation(place, min(self.length, budget), ends) for place in places]
            if any(texts):
                return Retrieved(length, list(filter(None, texts)))
        return Retrieved()

    def grown(self, texts) -> TokenTree:
        """A tree of the most frequent prefixes of these texts; siblings in descending order of frequency."""
        tree, nodes, counts = TokenTree(self.name), {(): ROOT}, {(): len(texts)}
        counts |= frequent_prefixes(texts, self.nodes)
        for prefix in list(counts)[1:]:
            parent = prefix[:-1]
            nodes[prefix] = tree.add(prefix[-1], nodes[parent], confidence=counts[prefix] / counts[parent])
        return tree

    def _figures(self, lm: Lane, found) -> Iterator:
        if found.length and lm.generated:
            span = [max(0, lm.generated - found.length), lm.generated, f"found {len(found.texts)} times",
                    len(found.texts)]
            yield Figure("spans", "matched suffixes", {"spans": [span]})
