"""DSpark: a block drafter whose guesses know the token before them, and how sure they are."""
from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from playground.algorithms.draft_heads.blocks.block_drafter import BlockDrafter
from playground.algorithms.draft_heads.blocks.block_network import DFlashNetwork, Reach, part
from playground.algorithms.draft_heads.blocks.block_training import DECAY, anchors_of, outputs
from playground.algorithms.draft_heads.feature_networks import soft_loss
from playground.algorithms.draft_heads.head_layers import HeadShape
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    embedded,
    trained,
)
from playground.algorithms.speculative.latency import at, seconds_by_rows
from playground.contract import Lane, knob
from playground.contract.token_tree import TokenTree
from playground.engine.host_copies import read_lists
from playground.errors import Refusal
from playground.events import Figure

RANK, MASK, KEPT = 64, 0, 10  # of a drafter that is trained here; ranks that are counted
MACHINE, ALL = "machine", "all"


class MarkovHead(Module):
    """From the token before a guess to a bias on its logits, through few numbers: plain, gated by the row, or with a
    state that is passed on. Parameter names are those of vLLM's `speculators`.
    """

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int, width: int, kind: str = "vanilla"):
        super().__init__()
        self.markov_w1, self.markov_w2 = Embedding(vocabulary, rank), Linear(rank, draft_vocabulary, bias=False)
        self.gate_proj = Linear(width + rank, rank) if kind == "gated" else None
        self.joint_proj = Linear(width + 2 * rank, 3 * rank) if kind == "rnn" else None

    def bias(self, vectors: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The bias [..., draft vocabulary], and the state to pass on, for vectors [..., rank] of the tokens before and
        rows [..., width].
        """
        if self.gate_proj is not None:
            vectors = self.gate_proj(torch.cat([hidden, vectors], -1)).sigmoid() * vectors
        if self.joint_proj is not None:
            state = torch.zeros_like(vectors) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, vectors, hidden], -1)).chunk(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            vectors = out.tanh()
        return self.markov_w2(vectors), state

    @classmethod
    def of(cls, weights: dict[str, Tensor], width: int) -> MarkovHead:
        kind = "gated" if "gate_proj.weight" in weights else "rnn" if "joint_proj.weight" in weights else "vanilla"
        (vocabulary, rank), drafted = weights["markov_w1.weight"].shape, len(weights["markov_w2.weight"])
        head = cls(vocabulary, drafted, rank, width, kind)
        head.load_state_dict(weights)
        return head


class ConfidenceHead(Module):
    """The logit that a draft token is accepted if those before it are, from its row and perhaps the token before."""

    def __init__(self, reads: int):
        super().__init__()
        self.proj = Linear(reads, 1)

    def forward(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        return self.proj(torch.cat([hidden, vectors], -1)[..., :self.proj.in_features])[..., 0]


class DSparkNetwork(DFlashNetwork):
    """DFlash with the two heads; a published drafter may lack either."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None

    def begin(self, vocabulary: int) -> None:
        """Add heads that change nothing yet."""
        width = self.fc.out_features
        self.markov_head = MarkovHead(vocabulary, vocabulary, RANK, width)
        self.confidence_head = ConfidenceHead(width + RANK)
        torch.nn.init.normal_(self.markov_head.markov_w1.weight, std=0.1)
        torch.nn.init.zeros_(self.markov_head.markov_w2.weight)

    def vectors(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What the heads know of tokens [...] before the guesses of rows [..., width]."""
        return hidden[..., :0] if self.markov_head is None else self.markov_head.markov_w1(tokens)

    def corrected(
        self, base: Tensor, vectors: Tensor, hidden: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits with the bias of the tokens before, and the state to pass on."""
        if self.markov_head is None:
            return base, None
        bias, state = self.markov_head.bias(vectors, hidden, state)
        return base + bias, state

    @classmethod
    def of(cls, weights):
        heads = ("markov_head", "confidence_head")
        network = super().of({name: tensor for name, tensor in weights.items() if name.split(".")[0] not in heads})
        markov, confidence = (part(weights, head) for head in heads)
        if markov:
            network.markov_head = MarkovHead.of(markov, network.fc.out_features)
        if confidence:
            reads, width = confidence["proj.weight"].shape[1], network.fc.out_features
            if reads not in (width, width + (markov["markov_w1.weight"].shape[1] if markov else 0)):
                raise ValueError("a confidence head that reads something else")
            network.confidence_head = ConfidenceHead(reads)
            network.confidence_head.load_state_dict(confidence)
        return network


class DSpark(BlockDrafter):
    """DFlash guesses a block in one forward, so its guesses do not know each other: here a small table adds to the
    logits of each guess what usually follows the token before it.

    The table is a product of two thin matrices, and reading it costs no layer, so the block is still one forward. A
    second head says how likely each guess is to be accepted if those before it are. The product of these chances is how
    likely a guess counts at all. With `verify = machine` as many are verified as bring the most expected tokens per
    second on this machine, by forwards that are measured before the first round. The cut knows the guesses and nothing
    that the target draws, so the text stays exact. Choosing for one text alone is our special case of the paper's
    scheduler for many. depth = 0 is plain decoding. DeepSeek-AI and Peking University 2026.
    """

    name, title, paper, sheet = "dspark", "DSpark", "DeepSeek-AI 2026", "draft-heads/dspark"
    guarantee, new_in = ("collapses",), "2026"

    verify: str = knob(
        ALL, choices=(ALL, MACHINE), help="all guesses, or as many as pay on this machine by their confidence"
    )

    def __post_init__(self):
        super().__post_init__()
        self._seconds: dict[int, float] | None = None  # of a forward, by rows

    @classmethod
    def untrained(cls, width, depth):
        layers = cls.state_layers(cls(), depth)
        return DSparkNetwork(HeadShape.like(width), len(layers) * width, [Reach()]).state_dict()

    def beginning(self, lm):
        network = self.build(super().beginning(lm))
        network.begin(lm.vocabulary)
        return network.state_dict()

    @classmethod
    def build(cls, weights):
        return DSparkNetwork.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the two heads on the drafter of `dflash`, which stays as it is; returns all weights. Raises Refusal."""
        begun = texts.fitted("dflash")
        if begun is None:
            raise Refusal(
                "dspark is trained on top of dflash, which has not been fitted to this model: fit dflash first.", "name"
            )
        torch.manual_seed(texts.seed)
        network, layers = DSparkNetwork.of(begun), tuple(begun["layers"].tolist())
        network.begin(len(texts.lm_head))
        found = partial(guesses, network, texts, layers=layers, block=int(begun["block_size"]))
        losses = partial(_losses, network, found)
        yield from trained(network, texts, losses, HeadTraining(epochs=3, rate=2e-3))
        counts = RankCounts(int(begun["block_size"]) - 1, KEPT)
        with torch.no_grad():
            for batch in texts.held_out():
                for depth, guess in enumerate(found(batch)):
                    logits = guess.logits(network)
                    counts.add(depth, (logits > logits.gather(1, guess.labels[:, None])).sum(1))
        yield counts.note()
        return begun | network.state_dict()

    def propose(self, lm: Lane, budget: int) -> Iterator:
        if self.verify == MACHINE and self._seconds is None and self.depth:
            self._seconds = seconds_by_rows((yield lm.forward_times()))
        return (yield from super().propose(lm, budget))

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree = yield from super().drafted(lm, budget)
        if not len(tree) or self.network.confidence_head is None:
            return tree
        reached = list(accumulate(tree.confidence, mul))
        count = len(tree) if self.verify == ALL else self.worth(reached, lm.target.behind())
        yield Figure(
            "bars", "chance that each draft token is reached and accepted, by the head",
            {"labels": list(map(lm.piece, tree.tokens)), "values": reached},
        )
        series = {"drafted": len(tree), "verified": count}
        yield Figure("scalar", "draft tokens of a round", {"x": lm.generated, "series": series})
        return tree.only(list(range(count)))

    def worth(self, reached: list[float], unread: int) -> int:
        """How many draft tokens bring the most expected tokens per second, if token i counts with the chance
        reached[i]; `unread` tokens of the text are read in any case.
        """
        expected = [1.0, *(1.0 + total for total in accumulate(reached))]
        rates = [tokens / at(self._seconds, unread + count) for count, tokens in enumerate(expected)]
        return rates.index(max(rates))

    def draft(self, lm, hidden, rows, tree):
        network, state = self.network, None
        block, base = lm.tokens[-lm.target.behind():], network.read_out(hidden, lm.read_out)
        for row in range(rows.stop):
            before = torch.tensor(self.before(block, row), device=hidden.device)
            vectors = network.vectors(before, hidden[row])
            logits, state = network.corrected(base[row], vectors, hidden[row], state)
            if row in rows:
                block.append(self._add(tree, logits, hidden[row], vectors))
                if lm.ends(block[-1]):
                    break
        yield from ()

    def _add(self, tree: TokenTree, logits: Tensor, hidden: Tensor, vectors: Tensor) -> int:
        """Add the best token, with the chance that it is accepted, or else its probability; returns it."""
        network = self.network
        chance, best = logits.softmax(-1).max(-1)
        if network.confidence_head is not None:
            chance = network.confidence_head(hidden, vectors).sigmoid()
        token, share = read_lists(network.target_ids(best), chance)
        tree.add(token, len(tree) - 1, confidence=share)
        return token


class Guess(NamedTuple):
    """What a training knows of the guesses of one row of all blocks, where the target wrote the token."""

    base: Tensor  # logits of the block alone, [n, V]
    hidden: Tensor  # [n, width]
    before: Tensor  # tokens, [n]
    labels: Tensor  # the right tokens, [n]
    teacher: Tensor  # the target's distributions, [n, V]

    def logits(self, network: DSparkNetwork) -> Tensor:
        return network.corrected(self.base, network.vectors(self.before, self.hidden), self.hidden)[0]


@torch.no_grad()
def guesses(
    network: DSparkNetwork, texts: HeadTexts, batch: HeadBatch, layers: tuple[int, ...], block: int
) -> Iterator[Guess]:
    """Row by row, after the true tokens."""
    anchors = anchors_of(batch)
    ids = torch.full((len(batch.ids), len(anchors), block), MASK)
    ids[..., 0] = batch.ids[:, anchors]
    states = torch.cat([batch.states[layer] for layer in layers], -1)
    found = outputs(network, states, embedded(texts, ids), anchors)
    for k in range(1, block):
        inside = anchors + k < batch.ids.shape[1]
        places = anchors[inside] + k
        written = batch.written[:, places]
        hidden = found[:, inside, k][written]
        teacher = linear(batch.states[texts.depth][:, places - 1][written], texts.lm_head).softmax(-1)
        before, labels = (batch.ids[:, each][written] for each in (places - 1, places))
        yield Guess(linear(hidden, texts.lm_head), hidden, before, labels, teacher)


def _losses(network: DSparkNetwork, found, batch: HeadBatch) -> list[Tensor]:
    """Of each row: how far its distribution is from the target's, and its confidence from the share that both have in
    common, which is how often the guess is accepted.
    """
    losses = []
    for k, guess in enumerate(found(batch)):
        logits = guess.logits(network)
        common = torch.minimum(logits.softmax(-1), guess.teacher).sum(-1).detach()
        sure = network.confidence_head(guess.hidden, network.vectors(guess.before, guess.hidden))
        unsure = binary_cross_entropy_with_logits(sure, common) if len(sure) else sure.sum()
        losses.append(math.exp(-k / DECAY) * (soft_loss(logits, guess.teacher) + unsure))
    return losses
