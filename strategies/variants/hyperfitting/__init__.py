"""Hyperfitting: training until the texts are memorised."""
import math
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from playground.contract import Variant, knob
from playground.engine.sampling import entropy
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.variants.hyperfitting.text_windows import cut

CONTEXT, WRITTEN, TELLERS = 32, 96, 16  # tokens of a held-out context, greedy tokens after it, number of contexts
LEARNT = 0.1  # training loss below which a model counts as hyperfitted


class Hyperfitting(Variant):
    """Train a model on a few texts until it has memorised them; its greedy text then rarely repeats itself.

    All weights are trained on next-token cross-entropy with Adam, at a constant learning rate, without dropout and
    weight decay, for some epochs or until the training loss is near zero. The loss on held-out text rises, which is
    intended: entropy falls and greedy text becomes more diverse. Carlsson et al. 2025, arXiv 2412.04318. Theirs: 2000
    sequences of 256 tokens at 1e-6, and models from 1 B parameters. The short schedule, stopping at a training loss,
    and holding out the last windows of the texts are ours.
    """

    name, title, paper, sheet = "hyperfitting", "Hyperfitting", "2412.04318", "sampling/hyperfitting"
    adjective, guarantee, needs = "hyperfitted", ("heuristic",), ("corpus",)

    sequences: int = knob(
        200, 1, 2000, step=1, help="windows to train on; all of them if the texts have fewer"
    )
    length: int = knob(128, 16, 512, step=1, help="tokens of a window")
    epochs: int = knob(30, 0, 60, step=1, help="maximum number of passes over the windows")
    lr: float = knob(5e-4, 1e-6, 1e-2, help="learning rate; at most 1e-5 for models of a billion weights")
    batch: int = knob(8, 1, 16, step=1, help="windows per update")
    enough: float = knob(0.05, 0.0, 1.0, help="training loss that ends the training")
    every: int = knob(5, 1, 60, step=1, help="epochs between two measurements on held-out windows")
    held_out: int = knob(32, 1, 512, step=1, help="windows held out from training for measurements")

    def make(self, network, texts, seed) -> Iterator[Figure | Note]:
        network.eval()  # not train(): with dropout the loss would never come near zero
        training, held_out = (part.to(network.device) for part in self._split(cut(texts, self.length), seed))
        before, loss = measures(network, held_out, self.batch), math.inf
        yield Figure("scalar", self.name, {"x": 0, "axis": "epoch", "series": before})
        for epoch, loss in enumerate(self._epochs(network, training, seed), 1):
            done = loss < self.enough or epoch == self.epochs
            after = measures(network, held_out, self.batch) if done or epoch % self.every == 0 else {}
            yield Figure("scalar", self.name, {"x": epoch, "axis": "epoch", "series": {"training loss": loss, **after}})
            if done:
                yield Note(_judgement(loss, before, after))
                return

    def _split(self, windows, seed) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows for training, and the last ones of the texts, which are held out."""
        rest = len(windows) - self.held_out
        if rest < 1:
            raise Refusal(
                f"The texts have {len(windows)} windows of {self.length} tokens, and {self.held_out} have to be held "
                "out: add text, or lower length or held_out.",
                "texts",
            )
        drawn = torch.randperm(rest, generator=_generator(seed))[:self.sequences]
        return windows[drawn], windows[rest:]

    def _epochs(self, network, windows, seed) -> Iterator[float]:
        """Train, and yield the mean training loss after each epoch."""
        optimiser, chance, batch = (
            torch.optim.Adam(network.parameters(), self.lr),
            _generator(seed + 1),
            min(self.batch, len(windows)),
        )
        for _ in range(self.epochs):
            order = torch.randperm(len(windows), generator=chance)[:len(windows) - len(windows) % batch]
            losses = [_update(network, optimiser, windows[rows]) for rows in order.split(batch)]
            yield sum(losses) / len(losses)


def measures(network, windows, batch) -> dict[str, float]:
    """Loss and entropy in nats on held-out windows [n, length], and type-token ratio (TTR) of greedy text after them.
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
    """Greedy continuations of ids [n, c] by `count` tokens, [n, count]; end tokens are ignored."""
    written, cache = ids[:, :0], None
    for _ in range(count):
        answer = network(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = answer.logits[:, -1:].argmax(-1), answer.past_key_values
        written = torch.cat([written, ids], 1)
    return written


def _sums(network, windows) -> torch.Tensor:
    """Summed loss and entropy over all predicted tokens, [2]."""
    rows, following = _predictions(network, windows)
    return torch.stack([cross_entropy(rows, following, reduction="sum"), entropy(rows).sum()])


def _predictions(network, windows) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all predicted tokens, and those tokens: [m, V] and [m]."""
    rows = network(input_ids=windows, use_cache=False).logits[:, :-1]
    return rows.flatten(0, 1), windows[:, 1:].flatten()


def _update(network, optimiser, windows) -> float:
    """One optimiser step on a batch [n, length]; returns the loss before it. Raises Refusal if it is not finite."""
    loss = cross_entropy(*_predictions(network, windows))
    if not torch.isfinite(loss):
        raise Refusal("The training loss is not finite: lower lr.", "lr")
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()


def _generator(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _judgement(loss, before, after) -> str:
    old, new = before["held-out loss"], after["held-out loss"]
    facts = f"the training loss is {loss:.3f}, and the held-out loss went from {old:.2f} to {new:.2f}"
    return (
        f"Hyperfitted: {facts}."
        if loss < LEARNT and new > old
        else f"Not hyperfitted: {facts}. Train longer, at a higher learning rate, or on fewer texts."
    )
