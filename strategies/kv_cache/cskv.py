"""CSKV: old keys and values as low-dimensional codes of their channels."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.algorithms.kv_cache.quantization import Quantised, quantise
from playground.contract import LayerChoices, Quantises, ReadsParts, knob
from playground.errors import Refusal
from playground.events import Figure, Note

MOST = 6000  # tokens the factors are trained on
ALPHA, FLOOR = 0.5, 1e-6  # exponent of the mean activations in the initialisation; added to each mean
DESCENT = Descent("error of codes", steps=600, rate=1e-3, every=50)
BATCH = 512  # tokens of a training step
TINY = 1e-30

Rebuild = Callable[[Tensor], Callable[[int], Tensor]]
"""rebuild(codes [n, c])(position of the first) -> states [kv_heads, n, head_dim]"""


class CSKV(ReadsParts, Quantises):
    """Store old keys and values as short codes of their channels, and rebuild them for attention.

    The channels of all KV heads of a layer, before the rotary embedding, lie near a subspace of few dimensions. A code
    is the product of a state with a thin matrix; a second matrix rebuilds the state, and keys are rotated then. The
    last tokens are exact: a window that is full is closed and coded as a whole, so 0 to `window` - 1 tokens are exact.
    The prompt is read with exact states. `python -m playground fit cskv` starts from an activation-aware SVD of the
    projections and trains both matrices to rebuild the states of texts, in an order in which every number of leading
    dimensions is trained; the authors train one number. Codes are products with states instead of hidden states, which
    loses nothing at the optimum. Without a fit the matrices are a plain SVD of the projections. A share of 1 stores the
    states themselves. Every step rebuilds the cache, so this saves memory but no time; the matrices belong to the
    model and are not counted. Wang et al. 2024, arXiv 2409.10593.
    """

    name, title, paper, sheet = "cskv", "Fewer channels (CSKV)", "2409.10593", "kv-cache/cskv"
    guarantee = ("collapses",)
    fitted_to_target, prefers_trained = True, True

    key_share: float = knob(0.5, 0.05, 1.0, step=0.05, help="share of the channels that the code of a key has")
    value_share: float = knob(0.5, 0.05, 1.0, step=0.05, help="share of the channels that the code of a value has")
    window: int = knob(32, 4, 128, step=4, help="tokens that are coded together; before that they are exact")
    bits: str = knob("16", choices=("16", "8", "4", "2"), help="bits per number of a code; 16: as the model's states")

    def __post_init__(self):
        self._weights: dict[str, Tensor] = {}
        self._factors: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._errors: dict[str, dict[int, float]] = {"keys": {}, "values": {}}
        self._noted = False

    def check_target(self, model):
        if model.parts is not None and model.parts.norms_heads:
            raise Refusal(
                f"{self.title} reads keys as projected, which {model.name} normalises before the rotary embedding: "
                f"remove {self.title}, or choose another model.",
                self.name,
            )

    def begin_fitted(self, weights):
        self._weights = weights

    def begin(self, parts):
        self._parts = parts

    def quantise_count(self, part, exact):
        return exact - exact % self.window  # closed windows are multiples of it, so this is the open one's length

    def quantised_bits(self, part, full):
        width = self.code_size(part, full.heads, full.head)
        bits = full.bits if self.bits == "16" else int(self.bits) + 32 / (self.window if part == "keys" else width)
        return bits * width / (full.heads * full.head)

    def code_size(self, part: str, heads: int, head_dim: int) -> int:
        """Numbers of a code, given the KV heads and their size."""
        return max(1, int((self.key_share if part == "keys" else self.value_share) * head_dim + 1e-9)) * heads

    def quantise_layer(self, layer, part, rows, packed):
        heads, count, d = rows.shape
        first = packed.count if packed else 0
        states = self._unrotated(part, rows, first).transpose(0, 1).reshape(count, -1)
        down, up = self.factors(layer, part, self.code_size(part, heads, d))
        codes = self._coded(part, states @ down.to(states))
        made = ChannelCodes(codes, rows.dtype, lambda rebuilt: self._rotated(part, rebuilt @ up.to(rebuilt), d))
        read = made.unpack(first=first)
        self._errors[part][layer] = float((read - rows).norm() / rows.norm().clamp(min=TINY))
        return packed.concat(made) if packed else made

    def _coded(self, part: str, codes: Tensor) -> Tensor | Quantised:
        if self.bits == "16":
            return codes[None]
        axis, size = (1, self.window) if part == "keys" else (2, codes.shape[1])
        return quantise(codes[None], int(self.bits), axis, size)

    def _unrotated(self, part: str, rows: Tensor, first: int) -> Tensor:
        """States [kv_heads, n, d] as they were before the rotary embedding, of tokens from position `first` on."""
        if part == "values":
            return rows
        return self._parts.rotate_back(rows, torch.arange(first, first + rows.shape[1], device=rows.device))

    def _rotated(self, part: str, states: Tensor, d: int) -> Callable[[int], Tensor]:
        """States [n, kv_heads * d] as [kv_heads, n, d], keys rotated to positions from a given one on."""
        rows = states.view(len(states), -1, d).transpose(0, 1)
        if part == "values":
            return lambda first: rows
        return lambda first: self._parts.rotate(rows, torch.arange(first, first + len(states), device=rows.device))

    def factors(self, layer: int, part: str, size: int) -> tuple[Tensor, Tensor]:
        """Matrices from states to codes, [D, size], and back, [size, D]."""
        if (layer, part) not in self._factors:
            self._factors[layer, part] = self._all_factors(layer, part)
        down, up = self._factors[layer, part]
        if size == len(down):
            identity = torch.eye(size, dtype=down.dtype, device=down.device)
            return identity, identity
        return down[:, :size], up[:size]

    def _all_factors(self, layer: int, part: str) -> tuple[Tensor, Tensor]:
        """Both matrices of a layer with as many dimensions as channels, from `fit` or from the projection's SVD."""
        projections = self._parts.attention_projections(layer)
        weight = projections.key if part == "keys" else projections.value
        if self._weights:
            return tuple(self._weights[f"{part}.{name}"][layer].to(weight.device).float() for name in ("down", "up"))
        return svd_factors(weight.T.to(torch.promote_types(weight.dtype, torch.float32)))

    def explain(self, prompt, layers):
        if not self._noted and any(self._errors.values()):
            self._noted = True
            if not self._weights:
                yield Note("CSKV without tuning: the codes come from an SVD of the projections. `python -m playground "
                           "fit cskv` trains them for this model.")
            for part, errors in self._errors.items():
                if errors:
                    data = {"labels": [f"layer {layer}" for layer in errors], "values": list(errors.values())}
                    yield Figure("bars", f"relative error of rebuilt {part}", data)

    @classmethod
    def calibrate(cls, texts, seed: int):
        """Collect the states of the texts before the rotary embedding, and train the matrices to rebuild them."""
        inputs = ProjectionInputs(texts.parts)
        for ids in texts.texts:
            if inputs.tokens < MOST:
                texts.read(ids, inputs)
        states, start = {}, {}
        for part in ("keys", "values"):
            weights = [getattr(texts.parts.attention_projections(layer), part[:-1]).clone().float().T
                       for layer in range(texts.parts.depth)]
            hidden = [inputs.of(layer) for layer in range(texts.parts.depth)]
            scales = [(rows.abs().mean(0) + FLOOR) ** ALPHA for rows in hidden]
            each = [svd_factors(weight, scale) for weight, scale in zip(weights, scales)]
            start |= {f"{part}.{name}": torch.stack(both) for name, both in zip(("down", "up"), zip(*each))}
            states[part] = torch.stack([rows @ weight for rows, weight in zip(hidden, weights)])
        yield from descend(start, lambda step: loss_of(start, states, step, seed), DESCENT, texts)
        return {name: tensor.half() for name, tensor in start.items()}


def svd_factors(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Factors of a projection [m, D] by the SVD of its rows times `scale` [m], most important dimensions first.

    The first, [D, D], turns states into codes; the second, [D, D], rebuilds them.
    """
    scaled = weight if scale is None else weight * scale[:, None]
    squares, vectors = torch.linalg.eigh(scaled.T @ scaled)
    roots = squares.flip(0).clamp(min=0).sqrt().sqrt()  # of the singular values
    vectors = vectors.flip(1)
    return vectors / roots.clamp(min=1e-6 * float(roots.max()) + TINY), roots[:, None] * vectors.T


def loss_of(factors: dict[str, Tensor], states: dict[str, Tensor], step: int, seed: int) -> Tensor:
    """Mean squared error of rebuilt states, summed over layers and parts, with a random number of dimensions.

    The rotary embedding preserves it.
    """
    chance, total = torch.Generator().manual_seed(seed * DESCENT.steps + step), 0.0
    for part, rows in states.items():
        some = rows[:, torch.randint(rows.shape[1], (BATCH,), generator=chance)]
        size = int(torch.randint(max(1, rows.shape[2] // 16), rows.shape[2], (1,), generator=chance))
        rebuilt = some @ factors[f"{part}.down"][..., :size] @ factors[f"{part}.up"][:, :size]
        total = total + (rebuilt - some).square().mean((1, 2)).sum()
    return total


class ProjectionInputs(LayerChoices):
    """Runs everything and keeps the inputs of the projections."""

    def __init__(self, parts):
        self._parts, self._rows = parts, {}

    @property
    def tokens(self) -> int:
        return sum(map(len, self._rows.get(0, ())))

    def attends(self, layer: int, hidden: Tensor) -> bool:
        self._rows.setdefault(layer, []).append(self._parts.attention_input(layer, hidden).float())
        return True

    def of(self, layer: int) -> Tensor:
        """ProjectionInputs of a layer's projections, [tokens, width]."""
        return torch.cat([rows.clone() for rows in self._rows[layer]])


@dataclass(frozen=True)
class ChannelCodes:
    """Codes of the first tokens of a layer, [1, count, c], and how states follow from them."""

    codes: Tensor | Quantised
    dtype: torch.dtype  # of the states
    rebuild: Rebuild

    @property
    def count(self) -> int:
        return self.codes.count if isinstance(self.codes, Quantised) else self.codes.shape[1]

    @property
    def bytes(self) -> int:
        return self.codes.bytes if isinstance(self.codes, Quantised) else self.codes.nbytes

    def unpack(self, room: int = 0, first: int = 0) -> Tensor:
        """The rebuilt states, [kv_heads, count + room, d]; the last `room` of them are uninitialised.

        The first token has the position `first`.
        """
        codes = self.codes.unpack() if isinstance(self.codes, Quantised) else self.codes
        rebuilt = self.rebuild(codes[0])(first).to(self.dtype)
        return torch.cat([rebuilt, rebuilt.new_empty(len(rebuilt), room, rebuilt.shape[2])], 1) if room else rebuilt

    def concat(self, later: ChannelCodes) -> ChannelCodes:
        """These tokens followed by later ones."""
        if isinstance(self.codes, Quantised):
            return replace(self, codes=self.codes.concat(later.codes))
        return replace(self, codes=torch.cat([self.codes, later.codes], 1))
