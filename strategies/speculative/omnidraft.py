"""OmniDraft: a draft model with tokens of its own."""
from collections.abc import Iterator
from hashlib import blake2b
from math import prod

from playground.algorithms.speculative.drafting import grow, independent, new_tree
from playground.contract import Drafter, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure

Run = tuple[int, ...]


class Spellings:
    """Tokens of the target by the run of tokens the draft writes for each, as partners of these."""

    def __init__(self):
        self.known: dict[Run, int] = {}

    def __len__(self) -> int:
        return len(self.known)

    def __deepcopy__(self, memo):
        copy = Spellings()
        copy.known = dict(self.known)
        return copy

    def beginnings(self, tokens, most) -> Iterator[tuple[int, int]]:
        """The token of each known beginning of these tokens, and the beginning's length, longest first."""
        for length in range(min(most, len(tokens)), 1, -1):
            if (token := self.known.get(tuple(tokens[:length]))) is not None:
                yield token, length

    def digest(self) -> str:
        return blake2b(repr(sorted(self.known.items())).encode(), digest_size=8).hexdigest()


class OmniDraft(Drafter):
    """A draft model of another family guesses: tokens both models have are taken over, and runs of its tokens become
    the one token they spell.

    Which runs those are is learned from the text: whenever the target writes a token for which the draft has several,
    the run is remembered for it. The draft chooses among tokens that have a partner, with the same masks and samplers
    as the target; then every run known at a place gives one guess more. The paper puts the merged guess in the place of
    its first token and compares p with a q that leaves out every other run with the same beginning, so its samples are
    exact only where there is none. Here it stands beside that token as a guess that was not drawn, so the text is exact
    whatever is remembered; greedily either may stand. depth = 0 is plain decoding, longest = 1 takes over common tokens
    alone, and with a draft that shares the target's tokens this is an ordinary chain. The training of the draft while
    it guesses, which brings most of the paper's gain, is left out. Ramakrishnan et al. 2025, arXiv 2507.02659; common
    tokens alone: Timor et al. 2025, arXiv 2502.05202.
    """

    name, title, paper, sheet = (
        "omnidraft",
        "OmniDraft: a draft with other tokens",
        "2507.02659",
        "speculative/omnidraft",
    )
    needs, translates, drawn, guarantee = ("draft",), True, "without_replacement", ("collapses",)
    remembers, reconstruction, sure = True, True, "medium"

    depth: int = knob(4, 0, 8, step=1, help="tokens the draft writes one after another; 0 is plain decoding")
    longest: int = knob(
        4,
        1,
        8,
        step=1,
        help="tokens of the draft that may become one of the target's; 1 takes over common tokens alone",
    )
    share: bool = knob(True, help="remember spellings across prompts")

    _stream = None

    def propose(self, lm, budget) -> Iterator:
        if self._stream is None:
            self._begin(lm)
        self._learn(lm.generated)
        run, depth = new_tree(lm, self), min(self.depth, budget, self._stream.room)
        yield from grow(
            lm, self._stream, run, max(0, depth), lambda rows, leaves, number: independent(lm, run, rows, leaves[0], 1)
        )
        tree = self.woven(run)
        yield from self._tell(lm, tree)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._told = [
            (rows.length - rows.sequence.start + i, self._runs[node])
            for i, node in enumerate(verdict.kept)
            if len(self._runs[node]) > 1
        ]
        self._tried += any(len(run) > 1 for run in self._runs)
        self._stood += bool(self._told)
        self._learn(rows.sequence.generated)

    def _begin(self, lm) -> None:
        self._stream = lm.stream("draft")
        self._spellings = lm.memory(self.name, Spellings, self._stream.model.name) if self.share else Spellings()
        self._learned = self._tried = self._stood = 0
        self._runs, self._told = [], []

    def _learn(self, generated) -> None:
        """Of what was written since: tokens of the target for which the draft has several."""
        for token, run in self._stream.spellings(self._learned):
            if 2 <= len(run) <= self.longest:
                self._spellings.known.setdefault(run, token)
        self._learned = generated

    def woven(self, run) -> TokenTree:
        """The tree of all readings of a chain: each token itself, and what every known run that begins there spells.

        Every reading goes on to the end of the chain: a drawn guess that were left out for what it is would bend the
        law. So would a run left out for a longer one: whether its node exists would depend on the tokens drawn behind
        it.
        """
        tree, self._runs, waiting = TokenTree(run.source, run.drawn), [], [(0, ROOT)]
        for at, parent in waiting:
            if at == len(run):
                continue
            waiting.append(
                (
                    at + 1,
                    self._add(
                        tree, run.tokens[at : at + 1], tree.add(run.tokens[at], parent, run.q[at], run.confidence[at])
                    ),
                )
            )
            for token, length in self._spellings.beginnings(run.tokens[at:], self.longest):
                sure = prod(run.confidence[at:at + length])
                waiting.append(
                    (
                        at + length,
                        self._add(tree, run.tokens[at : at + length], tree.add(token, parent, confidence=sure)),
                    )
                )
        return tree

    def _add(self, tree, spelled, node) -> int:
        self._runs.append(tuple(spelled))
        return node

    def _tell(self, lm, tree) -> Iterator:
        if self._told:
            yield Figure(
                "spans",
                "runs that became one token",
                {"spans": [[at, at + 1, self._joined(lm, run), len(run)] for at, run in self._told]},
            )
        if len(self._spellings):
            yield Figure(
                "scalar", "spellings that are known", {"x": lm.generated, "series": {"spellings": len(self._spellings)}}
            )
        if self._tried:
            yield Figure(
                "scalar",
                "rounds with a merged guess",
                {"x": lm.generated, "series": {"had one": self._tried, "it stood": self._stood}},
            )
        if any(len(run) > 1 for run in self._runs):
            labels = ["text so far", *(self._joined(lm, run) for run in self._runs)]
            yield Figure(
                "tree",
                "what the draft wrote for each guess",
                {
                    "labels": labels,
                    "parents": [-1, *(parent + 1 for parent in tree.parents)],
                    "values": [1.0, *tree.confidence],
                },
            )

    def _joined(self, lm, run) -> str:
        return " + ".join(map(lm.piece, run))
