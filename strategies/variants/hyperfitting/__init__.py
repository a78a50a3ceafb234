"""Hyperfitting: training until the texts are known by heart."""
import math
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from playground.contract import Variant, knob
from playground.engine.sampling import entropy
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.variants.hyperfitting.text_windows import cut

CONTEXT, WRITTEN, TELLERS = 32, 96, 16  # tokens of a held-out context, tokens greedily written after it, contexts
LEARNT = 0.1  # training loss below which a model counts as hyperfitted


class Hyperfitting(Variant):
    """Train a model on a few texts until it knows them by heart; its greedy text then hardly repeats itself any more.

    All weights learn next-token cross-entropy with Adam, at a constant rate, without dropout and weight decay, for some
    epochs or until the training loss is near zero. The loss on held-out text rises, and that is the point: entropy
    falls and greedy text grows richer. Carlsson et al. 2025, arXiv 2412.04318. Theirs: 2000 sequences of 256 tokens at
    1e-6 and models from 1 B on. The small schedule, the stop at a loss and the held-out windows, the last of the texts,
    are ours.
    """

    name, title, paper, sheet = "hyperfitting", "Hyperfitting", "2412.04318", "sampling/hyperfitting"
    adjective, guarantee, needs = "hyperfitted", ("heuristic",), ("corpus",)

    sequences: int = knob(
        200, 1, 2000, step=1, help="windows that are learnt by heart; all there are where the texts have fewer"
    )
    length: int = knob(128, 16, 512, step=1, help="tokens of a window")
    epochs: int = knob(30, 0, 60, step=1, help="times every window is seen, at most")
    lr: float = knob(5e-4, 1e-6, 1e-2, help="learning rate; 1e-5 and less for models of a billion weights")
    batch: int = knob(8, 1, 16, step=1, help="windows of one update")
    enough: float = knob(0.05, 0.0, 1.0, help="training loss that ends the training")
    every: int = knob(5, 1, 60, step=1, help="epochs between two measurements on held-out windows")
    held_out: int = knob(32, 1, 512, step=1, help="windows that are kept from training and measured on")

    def make(self, network, texts, seed) -> Iterator[Figure | Note]:
        network.eval()  # in place of train(): dropout stays off, or the loss would never come near zero
        training, held_out = (part.to(network.device) for part in self._split(cut(texts, self.length), seed))
        before, loss = measures(network, held_out, self.batch), math.inf
        yield Figure("scalar", self.name, {"x": 0, "series": before})
        for epoch, loss in enumerate(self._epochs(network, training, seed), 1):
            done = loss < self.enough or epoch == self.epochs
            after = measures(network, held_out, self.batch) if done or epoch % self.every == 0 else {}
            yield Figure("scalar", self.name, {"x": epoch, "series": {"training loss": loss, **after}})
            if done:
                yield Note(_judgement(loss, before, after))
                return

    def _split(self, windows, seed) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows drawn for training, and the last ones of the texts, which are never trained on."""
        rest = len(windows) - self.held_out
        if rest < 1:
            raise Refusal(
                f"The texts give {len(windows)} windows of {self.length} tokens, {self.held_out} of them to be held out: "
                "add text, or lower length or held_out.",
                "texts",
            )
        drawn = torch.randperm(rest, generator=_chance(seed))[:self.sequences]
        return windows[drawn], windows[rest:]

    def _epochs(self, network, windows, seed) -> Iterator[float]:
        """Mean training loss of each epoch, once it is over."""
        optimiser, chance, batch = (
            torch.optim.Adam(network.parameters(), self.lr),
            _chance(seed + 1),
            min(self.batch, len(windows)),
        )
        for _ in range(self.epochs):
            order = torch.randperm(len(windows), generator=chance)[:len(windows) - len(windows) % batch]
            losses = [_update(network, optimiser, windows[rows]) for rows in order.split(batch)]
            yield sum(losses) / len(losses)


def measures(network, windows, batch) -> dict[str, float]:
    """Loss and entropy in nats on held-out windows [n, length], and how varied greedy text is that continues their
    beginnings.
    """
    with torch.inference_mode():
        sums = torch.stack([_sums(network, part) for part in windows.split(batch)]).sum(0) / windows[:, 1:].numel()
        written = [
            token
            for part in windows[:TELLERS, :CONTEXT].split(batch)
            for token in greedy(network, part, WRITTEN).tolist()
        ]
    variety = sum(len(set(text)) / WRITTEN for text in written) / len(written)
    return {"held-out loss": float(sums[0]), "held-out entropy": float(sums[1]), "TTR of greedy text": variety}


def greedy(network, ids, count) -> torch.Tensor:
    """The most probable continuation of ids [n, c], `count` tokens each, [n, count]; an end token does not end it."""
    written, cache = ids[:, :0], None
    for _ in range(count):
        answer = network(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = answer.logits[:, -1:].argmax(-1), answer.past_key_values
        written = torch.cat([written, ids], 1)
    return written


def _sums(network, windows) -> torch.Tensor:
    """Summed loss and entropy over all predicted places, [2]."""
    rows, following = _predictions(network, windows)
    return torch.stack([cross_entropy(rows, following, reduction="sum"), entropy(rows).sum()])


def _predictions(network, windows) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row that has a token after it, and that token: [m, V] and [m]."""
    rows = network(input_ids=windows, use_cache=False).logits[:, :-1]
    return rows.flatten(0, 1), windows[:, 1:].flatten()


def _update(network, optimiser, windows) -> float:
    """One step down the loss of a batch [n, length]; the loss before it. Raises Refusal where it is no number."""
    loss = cross_entropy(*_predictions(network, windows))
    if not torch.isfinite(loss):
        raise Refusal("The training loss is no longer a number: lower lr.", "lr")
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()


def _chance(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _judgement(loss, before, after) -> str:
    old, new = before["held-out loss"], after["held-out loss"]
    facts = f"the training loss is {loss:.3f}, and the loss on other text went from {old:.2f} to {new:.2f}"
    return (
        f"Hyperfitted: {facts}."
        if loss < LEARNT and new > old
        else f"Not hyperfitted: {facts}. Train longer, at a higher rate, or on fewer texts."
    )
