"""Lexical unit tuning: training a model to predict several tokens from placeholders."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from playground.contract import Variant, knob
from playground.errors import Refusal
from playground.events import Figure, Note

CERTAIN = 0.9  # probability of a prediction that counts as certain in the measurements


class PackedCuts(NamedTuple):
    """Windows with blocks of placeholders behind them: each block continues the window from one position."""

    ids: Tensor  # [windows, length + cuts * (k - 1)]
    positions: Tensor  # [length + cuts * (k - 1)]
    mask: Tensor  # bool, the same twice: which rows see which tokens
    labels: Tensor  # what the placeholders should predict, [windows, cuts, k - 1]
    places: Tensor  # positions of these labels in a window, [cuts, k - 1]


class LexicalUnitTuning(Variant):
    """Train a model to predict the next k tokens in one forward, from placeholders after the text, so that
    lexical_units can keep those it is certain of. Trained for minutes, the bundled model lost most of its score.

    A lexical unit is a run of tokens to which the model gives at least probability alpha. Windows of the texts are read
    with blocks of k - 1 padding tokens that continue them from random positions; the placeholders learn the tokens of
    the unit they are in, and with a small weight those after it, so that the model is not certain there. The ordinary
    loss on all tokens keeps what the model knew. All blocks of a window are read in one forward, with a mask in which a
    block sees only the text before it. Sun et al. 2024, arXiv 2405.15208, whose data recipe is known from summaries:
    random positions, the weight outside of units, and the packing are ours.
    """

    name, title, paper, sheet = "lexical_unit_tuning", "Lexical unit tuning", "2405.15208", "search/lexical-units"
    adjective, guarantee, needs = "lexical units", ("heuristic",), ("corpus",)
    reconstruction, sure = True, "low"

    k: int = knob(4, 2, 8, step=1, help="tokens predicted in one forward")
    alpha: float = knob(0.8, 0.1, 0.99, step=0.01, help="smallest probability of the tokens of a unit")
    outside: float = knob(0.2, 0.0, 1.0, step=0.05, help="weight of the tokens after a unit; 0 leaves them out")
    cuts: int = knob(8, 1, 32, step=1, help="positions per window from which placeholders continue")
    length: int = knob(128, 16, 512, step=1, help="tokens of a window")
    epochs: int = knob(3, 0, 30, step=1, help="passes over the windows")
    lr: float = knob(3e-4, 1e-6, 1e-2, help="learning rate")
    batch: int = knob(8, 1, 32, step=1, help="windows per update")
    held_out: int = knob(8, 1, 256, step=1, help="windows held out from training for measurements")

    def make(self, network, texts, seed) -> Iterator[Figure | Note]:
        network.eval()
        windows = self._windows(texts).to(network.device)
        chance = torch.Generator().manual_seed(seed)
        windows = windows[torch.randperm(len(windows), generator=chance).to(windows.device)]
        training, held_out = windows[self.held_out:], windows[:self.held_out]
        optimiser = torch.optim.AdamW(network.parameters(), self.lr)
        yield self._measured(network, held_out, 0)
        for epoch in range(1, self.epochs + 1):
            for rows in torch.randperm(len(training), generator=chance).split(self.batch):
                self._update(network, optimiser, training[rows.to(training.device)], chance)
            yield self._measured(network, held_out, epoch)
        network.config.lexical_units = self.k  # lexical_units refuses a model whose config does not say so
        yield Note(f"Decode it with lexical_units, k = {self.k}: other strategies decode it as before.")

    def _windows(self, texts) -> Tensor:
        size = self.length
        found = [text[at:at + size] for text in texts for at in range(0, len(text) - size + 1, size)]
        if len(found) <= self.held_out:
            raise Refusal(
                f"The texts have {len(found)} windows of {size} tokens, and {self.held_out} have to be held out: add "
                "text, or lower length or held_out.",
                "texts",
            )
        return torch.tensor(found)

    def _update(self, network, optimiser, windows: Tensor, chance: torch.Generator) -> None:
        """One optimiser step. Raises Refusal if the loss is not finite."""
        rows, ahead, packed = self._read(network, windows, chance)
        ordinary = cross_entropy(rows[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
        with torch.no_grad():
            weights = self._weights(rows, windows, packed)
        each = cross_entropy(ahead.flatten(0, 2), packed.labels.flatten(), reduction="none")
        loss = ordinary + (each * weights.flatten()).sum() / weights.sum().clamp(min=1)
        if not torch.isfinite(loss):
            raise Refusal("The training loss is not finite: lower lr.", "lr")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    def _read(self, network, windows: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor, PackedCuts]:
        """Logits of the windows [n, length, V] and of the placeholders [n, cuts, k - 1, V]."""
        starts = torch.randint(0, self.length - self.k, (self.cuts,), generator=chance)
        packed = pack(windows, starts, self.k, padding_of(network))
        rows = logits_of(network, packed)
        ahead = rows[:, self.length:].unflatten(1, (self.cuts, self.k - 1))
        return rows[:, :self.length], ahead, packed

    def _weights(self, rows: Tensor, windows: Tensor, packed: PackedCuts) -> Tensor:
        """1 for the labels within a unit, `outside` for those after it, [n, cuts, k - 1]."""
        p = rows[:, :-1].softmax(-1).gather(-1, windows[:, 1:, None])[..., 0]  # of the tokens from the second on
        sure = (p >= self.alpha)[:, packed.places - 1]
        return torch.where(sure.cumprod(-1).bool(), 1.0, self.outside)

    @torch.no_grad()
    def _measured(self, network, windows: Tensor, epoch: int) -> Figure:
        chance = torch.Generator().manual_seed(0)
        rows, ahead, packed = self._read(network, windows, chance)
        p, tokens = ahead.softmax(-1).max(-1)
        certain, right = p >= CERTAIN, tokens == packed.labels
        series = {
            "held-out loss": float(cross_entropy(rows[:, :-1].flatten(0, 1), windows[:, 1:].flatten())),
            "certain placeholders": float(certain.float().mean()),
            "of these right": float((certain & right).sum() / certain.sum().clamp(min=1)),
        }
        return Figure("scalar", self.name, {"x": epoch, "axis": "epoch", "series": series})


def padding_of(network) -> int:
    """The placeholder: the padding token, else an end token, else the first token."""
    config, end = network.config, network.config.eos_token_id
    ends = [end] if isinstance(end, int) else sorted(end or [0])
    return config.pad_token_id if config.pad_token_id is not None else ends[0]


def pack(windows: Tensor, starts: Tensor, k: int, padding: int) -> PackedCuts:
    """Windows [n, length] with k - 1 placeholders for each start, the last token that its block sees."""
    count, length = windows.shape
    ahead = torch.arange(1, k)
    places = (starts[:, None] + ahead + 1).to(windows.device)  # a placeholder predicts the token after its position
    block = windows.new_full((count, len(starts) * (k - 1)), padding)
    positions = torch.cat([torch.arange(length), (starts[:, None] + ahead).flatten()])
    owner = torch.arange(len(starts)).repeat_interleave(k - 1)
    seen = torch.arange(length)[None] <= starts[owner][:, None]  # of the window, by placeholder
    same = (owner[:, None] == owner[None]) & (positions[length:][:, None] >= positions[length:][None])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.cat(
        [torch.cat([causal, torch.zeros(length, len(owner), dtype=torch.bool)], 1), torch.cat([seen, same], 1)]
    )
    ids, device = torch.cat([windows, block], 1), windows.device
    return PackedCuts(ids, positions.to(device), mask.to(device), windows[:, places], places)


def logits_of(network, packed: PackedCuts) -> Tensor:
    """Logits of all rows, [n, length + cuts * (k - 1), V]."""
    dtype = network.get_input_embeddings().weight.dtype
    bias = torch.zeros(packed.mask.shape, dtype=dtype, device=packed.ids.device)
    bias = bias.masked_fill(~packed.mask, torch.finfo(dtype).min)
    count = len(packed.ids)
    return network(
        input_ids=packed.ids,
        position_ids=packed.positions.expand(count, -1),
        attention_mask=bias.expand(count, 1, -1, -1),
        use_cache=False,
    ).logits
