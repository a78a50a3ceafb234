"""What a selective state space writes, keeps and forgets at each token."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus

from playground.algorithms.overlays.token_figures import SHOWN, bars, by_token, matrix, shaded
from playground.contract import ReadsStates, knob
from playground.errors import Refusal
from playground.events import Note

QUANTITIES = ("renewal", "change", "gate")
MEANS = {
    "renewal": "share of the state that is renewed",
    "change": "change of the state, 1 is another one",
    "gate": "how far the gate is open, over its largest",
}
PARTS = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D")  # of a Mamba mixer
QUARTILES = (0.25, 0.5, 0.75)
LONGEST = 1e6  # tokens; a half-life above is shown as this


class Selected(NamedTuple):
    """What a mixer computes of its rows before its state."""

    inputs: Tensor  # u, after the convolution, [n, D]
    delta: Tensor  # step sizes, [n, D]
    write: Tensor  # B, [n, N]
    read: Tensor  # C, [n, N]
    gate: Tensor  # [n, D]


@dataclass
class ScannedLayer:
    """The state of one layer [D, N] while its rows are scanned, and the numbers of the rows so far."""

    block: Any
    state: Tensor
    before: Tensor  # inputs of the convolution that its next window begins with, [kernel - 1, D]
    numbers: list[list[float]]  # renewal, change, gate, norm of the state, by row
    parts: list[Selected]


class SsmDynamics(ReadsStates):
    """Show what each token writes into the state of a selective state space (Mamba), and how long it stays there.
    No bundled model has such layers.

    Step sizes, B and C are computed again from the inputs of every mixer, and the state is scanned with them. Renewal
    is the mean of 1 - exp(delta A), the share of the state that a token replaces; change is the distance between the
    states before and after, over the sum of their norms. The half-life of a channel is ln 2 / mean(-delta A) tokens.
    The hidden attention of the last token says what of every earlier one is still in the state that it reads:
    absolute values, so parts that cancel count. The paper's criterion, whether token states vanish or diverge, is the
    sign of the eigenvalues of S_B S_C^T for a simplified layer without norm, gate and convolution; layers of this
    model have all three. Painted on the token that the row read. It correlates. Vo et al. 2025, arXiv 2410.03292,
    without its constrained training.
    """

    name, title, paper, sheet = "ssm_dynamics", "Token dynamics of a state space", "2410.03292", "overlays/ssm-dynamics"
    needs, sure = ("state_space",), "medium"

    quantity: str = knob("renewal", choices=QUANTITIES, help="what colours the text")

    _text = None

    def check_target(self, model):
        if not _blocks(model):
            raise Refusal(
                f"{self.title} reads the mixers of mamba and falcon_mamba models, and {model.name} has none: choose "
                "such a model.",
                self.name,
            )

    def layers(self, depth):
        return tuple(range(depth))

    def begin(self, text, model):
        self._text, self._layers = text, []
        for block in _blocks(model):
            weight, kernel = block.mixer.A_log, block.mixer.conv1d.kernel_size[0]
            state = torch.zeros_like(weight, dtype=torch.float64)
            before = state.new_zeros(kernel - 1, len(weight))
            self._layers.append(ScannedLayer(block, state, before, [], []))

    def read_states(self, first, states):
        for layer, scanned in enumerate(self._layers):
            self.scan(scanned, states[layer])

    def scan(self, layer: ScannedLayer, hidden: Tensor) -> None:
        """Let the state of a layer read rows [n, hidden_size], the layer's inputs."""
        rows = self.select(layer, hidden)
        keep = torch.exp(rows.delta[..., None] * self.decay(layer))  # [n, D, N]
        added = (rows.delta * rows.inputs)[..., None] * rows.write[:, None]
        for at in range(len(hidden)):
            before, layer.state = layer.state, keep[at] * layer.state + added[at]
            norms = float(before.norm()), float(layer.state.norm())
            change = float((layer.state - before).norm()) / max(sum(norms), 1e-30)
            renewal = float(1 - keep[at].mean())
            layer.numbers.append([renewal, change, float(silu(rows.gate[at]).mean()), norms[1]])
        layer.parts.append(rows)

    def decay(self, layer: ScannedLayer) -> Tensor:
        """A [D, N], which is negative."""
        return -torch.exp(layer.block.mixer.A_log.double())

    def select(self, layer: ScannedLayer, hidden: Tensor) -> Selected:
        """Inputs, step sizes, B and C of rows [n, hidden_size]."""
        mixer = layer.block.mixer
        new, gate = mixer.in_proj(layer.block.norm(hidden)).double().chunk(2, -1)
        window = torch.cat([layer.before, new])
        layer.before = window[len(window) - len(layer.before):]
        bias = None if mixer.conv1d.bias is None else mixer.conv1d.bias.double()
        mixed = conv1d(window.T[None], mixer.conv1d.weight.double(), bias, groups=window.shape[1])[0].T
        inputs = silu(mixed)
        sizes = [mixer.dt_proj.in_features, self.width(layer), self.width(layer)]
        parts = mixer.x_proj(inputs.to(hidden)).split(sizes, -1)
        norms = [getattr(mixer, f"{part}_layernorm", nn.Identity()) for part in ("dt", "b", "c")]
        steps, write, read = (norm(part) for norm, part in zip(norms, parts))
        return Selected(inputs, softplus(mixer.dt_proj(steps).double()), write.double(), read.double(), gate)

    def width(self, layer: ScannedLayer) -> int:
        """N, the size of the state of a channel."""
        return layer.block.mixer.A_log.shape[1]

    def draw(self):
        if self._text.generated < 1 or not self._layers[0].numbers:
            return
        numbers = torch.tensor([layer.numbers for layer in self._layers], dtype=torch.float64)  # [layers, tokens, 4]
        own, names = slice(self._text.start, None), [f"layer {layer}" for layer in range(len(self._layers))]
        chosen, name = numbers[:, own, QUANTITIES.index(self.quantity)], MEANS[self.quantity]
        largest = chosen.abs().max().clamp(min=1e-30) if self.quantity == "gate" else 1.0
        yield shaded(name, (chosen.mean(0) / largest).tolist(), self._labels(numbers[:, own]))
        yield by_token(f"{name}: by layer and token", names, self._text.pieces(), chosen.tolist())
        yield by_token("norm of the state after each token", names, self._text.pieces(), numbers[:, own, 3].tolist())
        count = min(SHOWN, self._text.generated)
        held = [hidden_attention(layer, self.decay(layer), count).abs().mean(1).tolist() for layer in self._layers]
        yield by_token("what the last token still reads of each", names, self._text.pieces()[-count:], held)
        lives = [self.half_lives(layer).flatten().quantile(torch.tensor(QUARTILES, dtype=torch.float64)).tolist()
                 for layer in self._layers]
        yield matrix("half-life of channels in tokens, by quartile", names, [f"{q:g}" for q in QUARTILES], lives)
        shares = [positive_share(layer) for layer in self._layers]
        yield bars("eigenvalues of S_B S_C^T with a positive real part", names, shares)
        size = sum(layer.state.numel() for layer in self._layers)
        yield Note(
            f"State: {size:,} numbers, however long the text. By the criterion of a simplified layer, token states "
            f"diverge in {sum(share > 0 for share in shares)} of {len(shares)} layers; norm, gate and convolution are "
            "left out there."
        )

    def _labels(self, numbers: Tensor) -> list[str]:
        return [
            f"renews {renewal:.2f} of the state; the state changes by {change:.2f}; gate {gate:+.2f} on average"
            for renewal, change, gate, _ in numbers.mean(0).tolist()
        ]

    def half_lives(self, layer: ScannedLayer) -> Tensor:
        """Tokens after which half of what a channel held is left, [D, N]."""
        delta = torch.cat([rows.delta for rows in layer.parts]).mean(0)
        return (math.log(2) / (-delta[:, None] * self.decay(layer))).clamp(max=LONGEST)


def hidden_attention(layer: ScannedLayer, decay: Tensor, count: int) -> Tensor:
    """How much of the input of each of the last `count` tokens the last one reads from the state, by channel: alpha
    [count, D], signed.
    """
    delta, write = (torch.cat([getattr(rows, name) for rows in layer.parts])[-count:] for name in ("delta", "write"))
    read = layer.parts[-1].read[-1]
    later = delta.flip(0).cumsum(0).flip(0) - delta  # sum of the step sizes after each token
    return ((later[..., None] * decay).exp() * delta[..., None] * write[:, None] * read).sum(-1)


def positive_share(layer: ScannedLayer) -> float:
    """The share of the eigenvalues of S_B S_C^T, the non-zero ones of S_C^T S_B, with a positive real part."""
    mixer, width = layer.block.mixer, layer.block.mixer.A_log.shape[1]
    rank = mixer.dt_proj.in_features
    write, read = mixer.x_proj.weight.double()[rank:].split(width)
    return float((torch.linalg.eigvals(write @ read.T).real > 0).double().mean())


def _blocks(model: Any) -> list[Any]:
    """The blocks of a model whose layers are all Mamba mixers; none of any other."""
    network = getattr(model, "network", None)
    found = [module for module in network.modules() if hasattr(module, "norm") and all(
        hasattr(getattr(module, "mixer", None), part) for part in PARTS)] if network else []
    return found if len(found) == model.depth else []
