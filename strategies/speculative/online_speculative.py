"""Online speculative decoding: the draft learns from its rejected tokens while the text is generated."""
from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import silu

from playground.algorithms.speculative.drafting import grow, independent, new_tree
from playground.algorithms.speculative.learning.draft_training import ALL, LORA, DraftLesson, DraftTraining, untrainable
from playground.algorithms.speculative.learning.query_kinds import QueryKinds
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT
from playground.errors import Refusal
from playground.events import Figure, Note

SHOWN = 4  # tokens of a corrected position
FORWARD_SHARE = 0.9  # of the forward divergence in the mixture of both
CORRECTION = "correction"


class CorrectedPosition(NamedTuple):
    """A position whose draft token was tested, as the draft and the target saw it."""

    hidden: Tensor  # [draft's hidden_size], input of the draft's lm_head
    logits: Tensor  # [V], of the draft without what it learned
    target: Tensor  # [V], logits of the target


class TestedPosition(NamedTuple):
    """A position whose draft token was tested, for a draft that is trained itself."""

    place: int  # of the last token that the draft read before
    target: Tensor  # [V], logits of the target


StoredPosition = CorrectedPosition | TestedPosition


class DraftCorrection(Module):
    """What a draft learned: its lm_head reads h + U SiLU(D h) in place of h, and U is zero at first.

    It is a few hundred kilobytes for any model, belongs to one visitor, and leaves the draft's own weights unchanged.
    """

    @torch.inference_mode(False)
    def __init__(self, width: int, rank: int):
        super().__init__()
        self.down, self.up = Linear(width, rank, bias=False), Linear(rank, width, bias=False)
        chance = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.down.weight.copy_(torch.randn(rank, width, generator=chance) * width**-0.5)
            self.up.weight.zero_()
        self.updates = 0
        self._optimizer = torch.optim.AdamW(self.parameters())

    def forward(self, hidden: Tensor) -> Tensor:
        """What is added to hidden states [n, width]."""
        return self.up(silu(self.down(hidden.float())))

    def to_device(self, device: torch.device) -> None:
        """Move the weights and the moments of the optimiser."""
        moments = self._optimizer.state_dict()
        self._optimizer = torch.optim.AdamW(self.to(device).parameters())
        self._optimizer.load_state_dict(moments)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def learn(self, positions: list[CorrectedPosition], lm_head: Tensor, rate: float, divergence: str) -> float:
        """One update on these positions; returns the loss before it. `lm_head` [V, width] is the draft's."""
        hidden, logits, target = (torch.stack(part).float() for part in zip(*positions))
        changed = logits + (self(hidden).to(lm_head.dtype) @ lm_head.T).float()
        loss = loss_of(changed, target, divergence)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.updates += 1
        return float(loss.detach())

    def digest(self) -> str:
        """Hash of the weights."""
        weights = (part.weight.detach().cpu().numpy().tobytes() for part in (self.down, self.up))
        return blake2b(b"".join(weights), digest_size=8).hexdigest()


class OnlineSpeculative(Drafter):
    """A draft model that learns while the text is generated: at every rejected draft token the target has already
    computed the right distribution, and the draft is trained on it.

    Each rejection stores the target's distribution at that position. After `interval` of them one step of AdamW lowers
    the divergence between it and the draft's, so the draft follows what this visitor asks for. Trained are all weight
    matrices of a small draft, as in the paper, low-rank additions to its attention (LoRA), or a correction in front of
    its lm_head, which needs neither a further forward nor a new KV cache. The lane reads with its own copy of the
    draft, and after an update the draft reads the text again. With several `kinds`, questions are routed: each trains
    and uses what was learned from those that resemble it. What was learned is kept for the visitor's next runs, is
    named by the digest in the header of a run, and is cleared by the button that forgets. The draft tokens are verified
    against the q they were drawn from, so the output distribution is the target's whatever was learned. The paper
    updates between requests; here updates happen within a text too. lr = 0 is a plain draft chain, depth = 0 plain
    decoding. Liu et al. 2024, arXiv 2310.07177; the router is ours.
    """

    name, title, paper, sheet = (
        "online_speculative", "Online speculative decoding", "2310.07177", "speculative/online-speculative"
    )
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)
    remembers, sure = True, "high"

    depth: int = knob(5, 0, 16, step=1, help="draft tokens per round; 0 is plain decoding")
    interval: int = knob(4, 1, 64, step=1, help="stored positions per update of the draft")
    lr: float = knob(3e-3, 0.0, 0.1, help="learning rate; 0 learns nothing")
    scope: str = knob(
        LORA,
        choices=(LORA, ALL, CORRECTION),
        help="what is trained: low-rank additions to the draft's attention, all its weight matrices, or a correction "
        "in front of its lm_head",
    )
    kinds: int = knob(1, 1, 8, step=1, help="kinds of questions that are learned apart; 1: all questions together")
    loss: str = knob(
        "forward",
        choices=("forward", "reverse", "both"),
        help="divergence that is lowered: of the target from the draft, of the draft from the target, or nine parts of "
        "the first and one of the second",
    )
    positions: str = knob(
        "rejected", choices=("rejected", "tested"), help="learn where a draft token was rejected, or wherever one was"
    )
    rank: int = knob(64, 1, 256, step=1, help="size of the correction, or of the low-rank additions")
    share: bool = knob(True, help="keep what was learned for the next runs")

    def __post_init__(self):
        self._correction: DraftCorrection | None = None
        self._training: DraftTraining | None = None
        self._hidden: dict[int, Tensor] = {}  # of the draft after each node of this round
        self._logits: dict[int, Tensor] = {}  # of the draft without the correction
        self._waiting: list[StoredPosition] = []
        self._tested = self._accepted = 0

    @property
    def reads_hidden(self):
        return ("draft",)

    def propose(self, lm: Lane, budget) -> Iterator:
        if not (self._correction or self._training):
            yield from self._begin(lm, lm.stream("draft").model)
        yield from self._learned(lm)
        tree, self._hidden, self._logits = new_tree(lm, self), {}, {}

        def level(rows, leaves, number):
            if self._correction:
                self._correct(rows, leaves[0])
            return independent(lm, tree, rows, leaves[0], 1)

        return (yield from grow(lm, lm.stream("draft"), tree, min(self.depth, budget), level))

    def observe(self, tree, rows, verdict) -> None:
        self._tested += len(verdict.tests)
        self._accepted += sum(test.kept for test in verdict.tests)
        path = [node for node in (ROOT, *verdict.kept) if tree.children(node)]
        rejected = [node for node in path if not set(tree.children(node)) & set(verdict.kept)]
        for node in rejected if self.positions == "rejected" else path:
            self._store(rows, node)

    def _begin(self, lm: Lane, model) -> Iterator[Note]:
        """Recall what was learned from questions of this kind."""
        kind = 0
        if self.kinds > 1:
            known = lm.memory(f"{self.name} kinds", QueryKinds, self.kinds) if self.share else QueryKinds()
            kind = known.route(lm.embed(lm.prompts["target"]), self.kinds)
            yield Note(f"This question is of kind {kind + 1} of {len(known)}; its draft learned from "
                       f"{known.counts[kind] - 1} questions before.")
        if self.scope != CORRECTION and (why := untrainable(model, self.scope)):
            yield Note(f"{why} Here only a correction in front of its lm_head is trained.")
        elif self.scope != CORRECTION:
            self._training = DraftTraining(lm, self.name, model, self.scope, self.rank, (kind,), self.share)
            lm.read_with("draft", self._training.model)
            return
        self._begin_correction(lm, model, kind)

    @torch.inference_mode(False)  # lanes run in inference mode, whose tensors cannot be trained through
    def _begin_correction(self, lm: Lane, model, kind: int) -> None:
        if model.lm_head_weights is None:
            raise Refusal(
                f"The lm_head of {model.name} is quantised, and the draft learns through it: load the draft model "
                "without quantisation.",
                self.name,
            )
        self._lm_head = model.lm_head_weights[:lm.vocabulary]
        about = (model.name, model.revision, model.quantization, self.rank, *([kind] if kind else []))

        def untrained() -> DraftCorrection:
            return DraftCorrection(model.width, self.rank)

        self._correction = lm.memory(self.name, untrained, *about) if self.share else untrained()
        self._correction.to_device(model.device)

    def _correct(self, rows, leaf: int) -> None:
        """Change the logits of a draft row by what was learned, before any mask or sampler."""
        row = rows.row(leaf)
        # logits are on the target's device, hidden states on the draft's
        self._hidden[leaf], self._logits[leaf] = rows.hidden[row], rows.raw[row].to(rows.hidden.device)
        rows.raw = rows.raw + self._change(rows.hidden).to(rows.raw)

    @torch.inference_mode()
    def _change(self, hidden: Tensor) -> Tensor:
        """What is added to the draft's logits, [n, V]."""
        return self._correction(hidden).to(self._lm_head.dtype) @ self._lm_head.T

    @torch.inference_mode(False)
    def _store(self, rows, node: int) -> None:
        """Remember the row that predicted the draft token after `node`: copies that outlive the forward's buffers."""
        if self._training:
            self._waiting.append(TestedPosition(rows.position(node) - 1, rows.raw[rows.row(node)].clone()))
            return
        logits, target = self._logits[node], rows.raw[rows.row(node)].to(self._logits[node].device)
        self._waiting.append(CorrectedPosition(self._hidden[node].clone(), logits.clone(), target.clone()))

    def _learned(self, lm: Lane) -> Iterator[Figure]:
        """Update the draft if enough positions were stored; yields the loss, and the last position before and after."""
        if self._tested:
            series = {"accepted / tested": self._accepted / self._tested}
            yield Figure("scalar", "acceptance of the draft in this text", {"x": lm.generated, "series": series})
        series, lines = {"positions": len(self._waiting)}, {"update": self.interval}
        yield Figure("scalar", "stored positions", {"x": lm.generated, "series": series, "lines": lines})
        if len(self._waiting) < self.interval or not self.lr:
            del self._waiting[:-self.interval]
            return
        last, before = self._waiting[-1], self._draft_distribution(lm, self._waiting[-1])
        loss = self._learn(lm)
        self._waiting.clear()
        yield Figure("scalar", "training loss of the draft", {"x": lm.generated, "series": {"loss": loss}})
        yield self._comparison(lm, last, before, self._draft_distribution(lm, last))

    def _learn(self, lm: Lane) -> float:
        """One update on the stored positions; returns the loss before it."""
        if self._correction:
            return self._correction.learn(self._waiting, self._lm_head, self.lr, self.loss)
        loss = self._training.learn([self._lesson(lm)], self.lr)
        lm.read_with("draft", self._training.model)
        return loss

    @torch.inference_mode(False)
    def _lesson(self, lm: Lane) -> DraftLesson:
        """The stored positions, all of this text, with the targets' distributions there."""
        places, targets = [one.place for one in self._waiting], torch.stack([one.target for one in self._waiting])

        def loss(rows: Tensor) -> Tensor:
            return loss_of(rows[:, :lm.vocabulary], targets.to(rows), self.loss)

        return DraftLesson(lm.tokens[:max(places) + 1], places, loss)

    @torch.no_grad()
    def _draft_distribution(self, lm: Lane, position: StoredPosition) -> Tensor:
        """q [V] at temperature 1, with what was learned so far."""
        if isinstance(position, TestedPosition):
            logits = self._training.logits(lm.tokens[:position.place + 1], [position.place])[0]
            return logits[:lm.vocabulary].softmax(-1)
        return (position.logits + self._change(position.hidden[None])[0].to(position.logits.dtype)).softmax(-1)

    def _comparison(self, lm: Lane, position: StoredPosition, before: Tensor, after: Tensor) -> Figure:
        p = position.target.softmax(-1)
        ids = p.topk(min(SHOWN, len(p))).indices
        values = [share[ids].tolist() for share in (p, before, after)]
        labels = {"rows": ["p", "q before", "q after"], "columns": list(map(lm.piece, ids.tolist()))}
        return Figure("matrix", "the last stored position before and after the update", {**labels, "values": values})


def loss_of(logits: Tensor, target: Tensor, divergence: str) -> Tensor:
    """Mean divergence [] of the draft's logits and the target's, [n, V] each, at temperature 1.

    Forward: the cross-entropy of the draft under the target. Reverse: KL(draft || target). Both: 0.9 and 0.1 of the KL
    divergences.
    """
    q, p = logits.log_softmax(-1), target.log_softmax(-1)
    reverse = (q.exp() * (q - p)).sum(-1).mean()
    if divergence == "reverse":
        return reverse
    if divergence == "forward":
        return -(p.exp() * q).sum(-1).mean()
    return FORWARD_SHARE * (p.exp() * (p - q)).sum(-1).mean() + (1 - FORWARD_SHARE) * reverse
