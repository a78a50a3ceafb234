"""OmniDraft: a draft model with a different vocabulary."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from playground.algorithms.speculative.drafting import grow, independent, new_tree
from playground.algorithms.speculative.learning.draft_training import ALL, LORA, DraftLesson, DraftTraining, untrainable
from playground.algorithms.speculative.shared_table import SharedTable
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure, Note

Run = tuple[int, ...]


class Spellings:
    """Target tokens by the run of draft-model tokens that spells them."""

    def __init__(self):
        self.known: SharedTable[Run, int] = SharedTable()

    def __len__(self) -> int:
        return len(self.known)

    def beginnings(self, tokens, most) -> Iterator[tuple[int, int]]:
        """The target token of each known prefix of these tokens, and the length of the prefix, longest first."""
        for length in range(min(most, len(tokens)), 1, -1):
            if (token := self.known.get(tuple(tokens[:length]))) is not None:
                yield token, length

    def digest(self) -> str:
        """Hash of the known spellings."""
        return blake2b(repr(sorted(self.known.items())).encode(), digest_size=8).hexdigest()


@dataclass
class DraftedChain:
    """A verified chain of draft tokens: what the draft is distilled on."""

    tokens: list[int]  # the text and the chain as the draft read them
    length: int  # of the chain
    target: Tensor  # [length, V], the target's logits before each token of the chain
    accepted: list[int]  # places in the chain of tokens that were merged into an accepted token

    @torch.inference_mode(False)
    def lesson(self, common: Tensor, weight: float) -> DraftLesson:
        """Reverse KL divergence of the draft from the target over common tokens, at all positions of the chain, and
        `weight` times the surprise of the draft at the tokens of accepted merged tokens.
        """
        ours, theirs = common.clone()
        own = torch.tensor(self.tokens[len(self.tokens) - self.length:], device=theirs.device)
        accepted = torch.tensor(self.accepted, dtype=torch.long, device=theirs.device)
        p = self.target.log_softmax(-1)[:, ours.to(self.target.device)].to(theirs.device).clone()

        def loss(rows: Tensor) -> Tensor:
            kept = rows.new_full(rows.shape, -torch.inf).index_copy(1, theirs, rows[:, theirs])
            q = kept.log_softmax(-1)
            surprise = -q.gather(1, own[:, None])[accepted].sum()
            q = q[:, theirs]
            return (q.exp() * (q - p)).sum(-1).mean() + weight * surprise

        start = len(self.tokens) - self.length
        return DraftLesson(self.tokens[:-1], list(range(start - 1, len(self.tokens) - 1)), loss)


class OmniDraft(Drafter):
    """Draft with a model of another family: tokens common to both vocabularies are used directly, and runs of draft
    tokens are merged into the target token they spell.

    The runs are learned from the text: if the target commits a token that the draft spells with several, the run is
    stored. The draft samples among tokens that the target also has, with the same masks and samplers as the target;
    every stored run at a position adds one merged draft token. The paper replaces the first token of the run by the
    merged one and compares p with a q that ignores other runs with the same prefix, so sampling is exact only if there
    are none. Here the merged token is a deterministic sibling of that first token, so the output is exact whatever is
    stored. Every few rounds the draft is distilled on the tokens that it drafted, accepted or not: the lane's own copy
    of it moves towards the target over the common tokens, and towards the runs that were accepted as merged tokens. It
    then reads the text again; what it was sampled from is what is verified, so the output stays exact. depth = 0 is
    plain decoding, longest = 1 uses common tokens only, lr = 0 leaves the draft as it is, and with a shared vocabulary
    that is an ordinary chain. The paper's optional head that ends a draft early is left out: specdec_plus_plus has it.
    Ramakrishnan et al. 2025, arXiv 2507.02659; common tokens only: Timor et al. 2025, arXiv 2502.05202.
    """

    name, title, paper, sheet = (
        "omnidraft",
        "OmniDraft: a draft with another vocabulary",
        "2507.02659",
        "speculative/omnidraft",
    )
    needs, translates, drawn, guarantee = ("draft",), True, "without_replacement", ("collapses",)
    remembers, reconstruction, sure = True, True, "medium"

    depth: int = knob(4, 0, 8, step=1, help="tokens drafted per round; 0 is plain decoding")
    longest: int = knob(
        4,
        1,
        8,
        step=1,
        help="maximum draft-model tokens merged into one target token; 1 uses common tokens only",
    )
    share: bool = knob(True, help="remember spellings, and what the draft learned, across prompts")
    lr: float = knob(3e-3, 0.0, 0.1, help="learning rate of the draft; 0 learns nothing")
    interval: int = knob(4, 1, 32, step=1, help="rounds per update of the draft")
    scope: str = knob(
        LORA,
        choices=(LORA, ALL),
        help="what is trained: low-rank additions to the draft's attention, or all its weights",
    )
    rank: int = knob(16, 1, 64, step=1, help="size of the low-rank additions")
    runs_weight: float = knob(0.2, 0.0, 1.0, step=0.05, help="weight of accepted runs in the training loss")

    _stream = None

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._stream is None:
            self._begin(lm)
            yield from self._begin_training(lm)
        self._learn(lm.generated)
        yield from self._distil(lm)
        run, depth = new_tree(lm, self), min(self.depth, budget, self._stream.room)
        yield from grow(
            lm, self._stream, run, max(0, depth), lambda rows, leaves, number: independent(lm, run, rows, leaves[0], 1)
        )
        tree, self._read = self.merged(run), self._stream.as_read(run.tokens)
        yield from self._figures(lm, tree)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._merged = [
            (rows.length - rows.sequence.start + i, self._runs[node])
            for i, node in enumerate(verdict.kept)
            if len(self._runs[node]) > 1
        ]
        self._drafted += any(len(run) > 1 for run in self._runs)
        self._accepted += bool(self._merged)
        if self._training and len(tree):
            self._chains.append(self._chain(tree, rows, verdict))
        self._learn(rows.sequence.generated)

    def _begin(self, lm: Lane) -> None:
        self._stream = lm.stream("draft")
        self._spellings = lm.memory(self.name, Spellings, self._stream.model.name) if self.share else Spellings()
        self._learned = self._drafted = self._accepted = 0
        self._runs, self._merged = [], []
        self._training, self._chains = None, []

    def _begin_training(self, lm: Lane) -> Iterator[Note]:
        """Recall what the draft learned before; a draft that cannot be trained is used as it is."""
        model = self._stream.model
        if self.lr and (why := untrainable(model, self.scope)):
            yield Note(f"{why} Here it drafts as it is.")
        elif self.lr:
            self._training = DraftTraining(lm, self.name, model, self.scope, self.rank, (), self.share)
            self._stream = lm.read_with("draft", self._training.model)

    def _distil(self, lm: Lane) -> Iterator[Figure]:
        """Update the draft on the chains of the last rounds, if there are enough."""
        if len(self._chains) < self.interval:
            return
        lessons = [chain.lesson(self._stream.common, self.runs_weight) for chain in self._chains]
        loss = self._training.learn(lessons, self.lr) / len(lessons)
        self._chains.clear()
        self._stream = lm.read_with("draft", self._training.model)
        yield Figure("scalar", "training loss of the draft", {"x": lm.generated, "series": {"loss": loss}})

    def _chain(self, tree, rows, verdict) -> DraftedChain:
        """The tokens that were drafted one by one, with the target's rows before them, and the accepted merges."""
        nodes = [ROOT]
        while following := [node for node in tree.children(nodes[-1]) if len(self._runs[node]) == 1]:
            nodes.append(following[0])
        places, at = [], 0
        for node in verdict.kept:
            size = len(self._runs[node])
            places += range(at, at + size) if size > 1 else ()
            at += size
        target = torch.stack([rows.raw[rows.row(node)] for node in nodes[:-1]])
        return DraftedChain(self._read, len(nodes) - 1, target, places)

    def _learn(self, generated) -> None:
        """Store the spellings of newly committed target tokens that the draft spells with several tokens."""
        for token, run in self._stream.spellings(self._learned):
            if 2 <= len(run) <= self.longest:
                self._spellings.known.setdefault(run, token)
        self._learned = generated

    def merged(self, run) -> TokenTree:
        """The tree of all segmentations of a chain: each token itself, and the target token of every known run there.

        Every segmentation continues to the end of the chain, because dropping a sampled token due to its value would
        bias the output. Preferring a longer run over a shorter one would do so too: whether the shorter one's node
        exists would depend on tokens sampled after it.
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
            for token, length in self._merges(run.tokens[at:]):
                sure = prod(run.confidence[at:at + length])
                waiting.append(
                    (
                        at + length,
                        self._add(tree, run.tokens[at : at + length], tree.add(token, parent, confidence=sure)),
                    )
                )
        return tree

    def _merges(self, tokens) -> list[tuple[int, int]]:
        """The target token of each known run at the beginning, and its length; of several runs with the same token, the
        shortest.

        Preferring the longer run would let the shorter run's node depend on later tokens.
        """
        lengths = dict(self._spellings.beginnings(tokens, self.longest))  # the last of each token, so the shortest
        lengths.pop(tokens[0], None)
        return list(lengths.items())

    def _add(self, tree, spelled, node) -> int:
        self._runs.append(tuple(spelled))
        return node

    def _figures(self, lm: Lane, tree) -> Iterator:
        if self._merged:
            yield Figure(
                "spans",
                "runs merged into one token",
                {"spans": [[at, at + 1, self._joined(lm, run), len(run)] for at, run in self._merged]},
            )
        if len(self._spellings):
            yield Figure(
                "scalar", "known spellings", {"x": lm.generated, "series": {"spellings": len(self._spellings)}}
            )
        if self._drafted:
            yield Figure(
                "scalar",
                "rounds with a merged draft token",
                {"x": lm.generated, "series": {"drafted": self._drafted, "accepted": self._accepted}},
            )
        if any(len(run) > 1 for run in self._runs):
            labels = ["text so far", *(self._joined(lm, run) for run in self._runs)]
            yield Figure(
                "tree",
                "draft-model tokens of each node",
                {
                    "labels": labels,
                    "parents": [-1, *(parent + 1 for parent in tree.parents)],
                    "values": [1.0, *tree.confidence],
                },
            )

    def _joined(self, lm: Lane, run) -> str:
        return " + ".join(map(lm.piece, run))
