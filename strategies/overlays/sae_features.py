"""Features of a sparse autoencoder that are active at each token."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from playground.algorithms.adaptive_compute.policy_training import held_out_mean, next_token_loss
from playground.algorithms.overlays.layer_input import LayerInput
from playground.algorithms.overlays.sparse_autoencoder import (
    SparseAutoencoder,
    StateRows,
    principal_components,
    random_weights,
    train,
    unscaled,
)
from playground.algorithms.overlays.token_figures import bars, by_token, over_tokens, shaded
from playground.contract import LayerSteps, ReadsStates, knob
from playground.events import Note

NUMBERS = 2 ** 24  # of the states that are trained on
EXAMPLES = 16  # tokens at which a feature was most active, that name it
WORDS = 3  # tokens in a name
LISTED = 12  # features in the matrix
ANY = -1


class ReplacedInput(LayerSteps):
    """Puts something in place of the input of one layer."""

    def __init__(self, at: int, change: Callable[[Tensor], Tensor]):
        self._at, self._change = at, change

    def layer(self, layer, hidden, run):
        return run(self._change(hidden) if layer == self._at else hidden)


class SaeFeatures(ReadsStates):
    """Show which features of a sparse autoencoder are active at a token, in words.

    A sparse autoencoder writes a hidden state of one layer as a sum of few out of many directions, each used where it
    helps. `python -m playground fit sae_features` trains one on the middle layer of a model, in a minute, or reads a
    published one with `--from`. A feature is named by the tokens at which it was most active in the training texts, and
    by those it raises most through the lm_head. How much of the loss is recovered when the model goes on from the sum
    in place of the state stands beside as many principal components and an untrained dictionary. A token has the colour
    of the row that read it. Without a fit, random directions are drawn, which say nothing. The paper trains on head
    outputs of positive and negative prompts and compares codes; here it is the residual stream, with TopK, and no
    circuits are searched. A feature correlates with what it is named after; `switch_part` switches it off. O'Neill and
    Bui 2024, arXiv 2405.12522.
    """

    name, title = "sae_features", "Features of a sparse autoencoder"
    paper, sheet = "2405.12522", "overlays/sae-circuits"
    reconstruction, sure = True, "medium"
    fitted_to_target, prefers_trained, questions_per_task = True, True, 60

    feature: int = knob(ANY, ANY, 2 ** 20, step=1, help="feature that colours the text; -1: the strongest of a token")
    shown: int = knob(3, 1, 8, step=1, help="features on the card of a token")

    _text = _weights = None

    def begin_fitted(self, weights):
        self._weights, self._sae = weights, SparseAutoencoder.of(weights)
        self._layer = int(weights["layer"])

    def layers(self, depth):
        return (self._layer,)

    def begin(self, text, model):
        self._text, self._model, self._names = text, model, {}
        self._told = self._weights is not None
        if not self._told:
            self.begin_fitted(self.untrained(model.width))
        self._active: list[Tensor] = []  # [n, features]
        self._missed, self._varied = 0.0, 0.0

    def read_states(self, first, states):
        (rows,) = states.values()
        sae, rows = self._sae.to(rows.device), rows.float()
        active = sae.encode(rows)
        self._missed += float((sae.decode(active) - rows).square().sum())
        self._varied += float((rows - self._weights["mean"].to(rows)).square().sum())
        self._active.append(active.cpu())

    def draw(self):
        if not self._active or self._text.generated < 1:
            return
        if not self._told:
            yield Note("No autoencoder is fitted to this model: random directions are drawn, which say nothing. "
                       "`python -m playground fit sae_features` trains one.")
        active = torch.cat(self._active)[self._text.start:]
        shares = active / self._weights["largest"].clamp(min=1e-30)
        best = shares.topk(min(self.shown, shares.shape[1]), 1)
        colours = best.values[:, 0] if self.feature == ANY else shares[:, min(self.feature, shares.shape[1] - 1)]
        found = best.indices.tolist()
        yield shaded("activation over the largest in training texts", colours.tolist(),
                     [self._label(*each) for each in zip(found, active, shares)], self._switched(found, active))
        most = shares.mean(0).topk(min(LISTED, shares.shape[1])).indices.tolist()
        yield by_token("features by token, over their largest activation", [self._called(each) for each in most],
                       self._text.pieces(), shares[:, most].T.tolist())
        yield from over_tokens("features active at a token", {"features": (active > 0).sum(1).float().tolist()})
        yield from self._quality(active)

    def _label(self, features: list[int], active: Tensor, shares: Tensor) -> str:
        words = [
            f"{self._called(each)}: {active[each]:.2f}, {shares[each]:.0%} of its largest, raises {self._raised(each)}"
            for each in features if active[each] > 0
        ]
        return "; ".join(words) or "no feature is active"

    def _switched(self, found: list[list[int]], active: Tensor) -> list[list[str]]:
        """For each token its features as `switch_part` reads them; none where it cannot switch any."""
        if not self._told or self._model.parts is None or not self._layer:  # no layer writes the embeddings
            return []
        return [[f"feature {each}" for each in features if row[each] > 0] for features, row in zip(found, active)]

    def _called(self, feature: int) -> str:
        """The number of a feature with the tokens at which it was most active."""
        if feature not in self._names:
            tokens = [token for token in self._weights["examples"][feature].tolist() if token >= 0]
            distinct = sorted(set(tokens), key=lambda token: (-tokens.count(token), tokens.index(token)))[:WORDS]
            self._names[feature] = f"feature {feature} {self._quoted(distinct)}".rstrip()
        return self._names[feature]

    def _raised(self, feature: int) -> str:
        """The tokens whose logits the direction of a feature raises most, as far as the final norm tells."""
        head, parts = self._model.lm_head_weights, self._model.parts
        if head is None or parts is None or not head.shape[1] == parts.width == self._sae.decoder.shape[1]:
            return "unknown tokens"
        gamma = parts.norm_before(parts.depth)[0].float().to(head.device)
        direction = self._sae.decoder[feature].to(head.device) * gamma
        return self._quoted((head.float() @ direction).topk(min(WORDS, len(head))).indices.tolist())

    def _quoted(self, tokens: list[int]) -> str:
        return ", ".join(f"“{self._text.piece(token)}”" for token in tokens)

    def _quality(self, active: Tensor):
        recovered = self._weights["recovered"].tolist()
        labels = ["this autoencoder", "as many principal components", "an untrained dictionary"]
        known = [(label, value) for label, value in zip(labels, recovered) if value == value]
        if known:
            yield bars("loss recovered on held-out texts", *map(list, zip(*known)))
        yield Note(
            f"Layer {self._layer}: {(active > 0).sum(1).float().mean():.1f} of {active.shape[1]} features are active "
            f"at a token, and {self._missed / max(self._varied, 1e-30):.1%} of the variance is not explained here. A "
            "feature correlates with what it is named after; only switching it off shows what it does."
        )

    @classmethod
    def untrained(cls, width: int, seed: int = 0) -> dict[str, Tensor]:
        """Weights of an autoencoder of random directions."""
        states = StateRows(torch.empty(0, width), torch.zeros(width), 1.0)
        sae = unscaled(random_weights(width, seed), states)
        return {**sae.tensors(), **about(0, torch.zeros(width), len(sae.bias))}

    @classmethod
    def published(cls, sae: SparseAutoencoder, layer: int) -> dict[str, Tensor]:
        """The weights of an autoencoder that others trained; its features have numbers, and no names."""
        return {**sae.tensors(torch.float32), **about(layer, sae.centre, len(sae.bias))}

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train the autoencoder of the middle layer, and measure it on texts that it was not trained on."""
        layer = texts.parts.depth // 2
        rows, tokens = read_rows(texts, layer)
        states = StateRows.of(rows)
        sae = yield from train(states, seed, texts.phase("autoencoder"))
        largest, examples = most_active(sae, rows, tokens)
        control = unscaled(random_weights(rows.shape[1], seed + 1), states)
        recovered = list(loss_recovered(texts, layer, states, sae, control))
        yield Note("Loss recovered on held-out texts: {:.1%}; with as many principal components {:.1%}; with an "
                   "untrained dictionary {:.1%}.".format(*recovered))
        return {
            **sae.tensors(), **about(layer, states.mean, len(largest)), "largest": largest, "examples": examples,
            "recovered": torch.tensor(recovered),
        }


def about(layer: int, mean: Tensor, features: int) -> dict[str, Tensor]:
    """What an autoencoder is shown with, as far as it is known without texts."""
    return {
        "layer": torch.tensor(layer), "mean": mean, "largest": torch.ones(features),
        "examples": torch.full((features, 1), -1), "recovered": torch.full((3,), torch.nan),
    }


def read_rows(texts, layer: int) -> tuple[Tensor, Tensor]:
    """The input of a layer at every token of the texts that are trained on, [n, d], and the tokens, [n]."""
    rows, tokens = [], []
    for number, ids in enumerate(texts.texts):
        if number % 10 and sum(map(len, rows)) * texts.parts.width < NUMBERS:
            reading = LayerInput(layer)
            texts.read(ids, reading)
            rows.append(reading.rows)
            tokens += ids
    return torch.cat(rows), torch.tensor(tokens)


def most_active(sae: SparseAutoencoder, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The largest activation of each feature, and the tokens at which it was most active, [features, EXAMPLES]."""
    values, places = torch.zeros(len(sae.bias), 0), torch.zeros(len(sae.bias), 0, dtype=torch.long)
    for first in range(0, len(rows), 4096):
        active = sae.encode(rows[first:first + 4096]).T
        values = torch.cat([values, active], 1)
        places = torch.cat([places, torch.arange(first, first + active.shape[1]).expand(len(active), -1)], 1)
        best = values.topk(min(EXAMPLES, values.shape[1]), 1)
        values, places = best.values, places.gather(1, best.indices)
    return values[:, 0], torch.where(values > 0, tokens[places], -1)


def loss_recovered(texts, layer: int, states: StateRows, *saes: SparseAutoencoder) -> Iterator[float]:
    """Of the loss that the mean in place of a layer's input costs, the share that reconstructions avoid on held-out
    texts: that of the first autoencoder, of as many principal components as it has features active, and of the others.
    """
    def loss(change: Callable[[Tensor], Tensor]) -> float:
        steps = ReplacedInput(layer, change)
        return float(held_out_mean(texts, lambda batch: next_token_loss(texts.forward(batch.ids, steps), batch)))

    def through(sae: SparseAutoencoder) -> Callable[[Tensor], Tensor]:
        return lambda hidden: sae.decode(sae.encode(hidden.flatten(0, 1))).view_as(hidden)

    whole, none = loss(lambda hidden: hidden), loss(lambda hidden: states.mean.expand_as(hidden))
    project = principal_components(states, saes[0].most)
    ways = [through(saes[0]), lambda hidden: (hidden - states.mean) @ project + states.mean, *map(through, saes[1:])]
    for way in ways:
        yield (none - loss(way)) / (none - whole)
