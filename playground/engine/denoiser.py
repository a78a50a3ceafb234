"""A masked diffusion model: a canvas with masks in, logits for every position out, with full attention.

The weights are those of a Llama, Qwen2 or Qwen3 network of the library, run layer by layer here, since the library's
own forward is causal. A forward may compute some positions only: the others take part with the key and value states
that an earlier forward left in `CanvasStates`. All caches of masked diffusion are choices of those positions.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.forward_lock import lock_for
from playground.engine.masked_models import masking_of
from playground.engine.tokens import Tokens
from playground.errors import Refusal


@dataclass
class CanvasStates:
    """Key and value states of a canvas by layer, each [kv_heads, positions, head_dim], keys rotated.

    present: positions that have states, bool [positions]; the others are not attended to. A forward over some
    positions replaces theirs.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    present: Tensor | None = None

    def drop(self, positions: Sequence[int]) -> None:
        """Make positions invisible until they are computed again."""
        self.present[list(positions)] = False

    def write(self, layer: int, at: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store states of the positions `at`, and return those of all present ones."""
        if layer == len(self.keys):
            shape = (keys.shape[0], len(self.present), keys.shape[2])
            self.keys.append(keys.new_zeros(shape))
            self.values.append(values.new_zeros(shape))
        self.keys[layer][:, at], self.values[layer][:, at] = keys, values
        return self.keys[layer][:, self.present], self.values[layer][:, self.present]


@dataclass(frozen=True)
class CanvasPositions:
    """Where the computed positions of a forward are, and what they see.

    at: the positions [n]; rotation: cosines and sines of their rotary embedding; allowed: bool [n, present], None for
    all.
    """

    at: Tensor
    rotation: tuple[Tensor, Tensor]
    allowed: Tensor | None


class CanvasNetwork:
    """A network that fills a canvas, in place of a Model for canvas decoders: what all of them have in common."""

    fills = True  # fills a canvas, does not continue text
    shifted = False  # the logits of a position predict its own token

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str = "",
        quantization: str = "none",
    ):
        config = network.config.get_text_config()
        self.network, self.tokenizer, self.name = network, tokenizer, name
        self.revision, self.quantization = revision, quantization
        self.context, self.vocabulary = config.max_position_embeddings, config.vocab_size
        self.depth, self.width = config.num_hidden_layers, config.hidden_size
        self.device, self.dtype = network.get_input_embeddings().weight.device, network.dtype
        self.parameters = network.num_parameters()
        self.tokens, self.lock = Tokens(tokenizer, self.vocabulary), lock_for(self.device)
        ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        self.end_ids = frozenset(id for id in (*ids, tokenizer.eos_token_id) if id is not None)

    def answer_length(self, prompt: list[int], most: int) -> int:
        """Positions to fill after a prompt: `most`, or as many as the context holds. Raises Refusal if none is left."""
        if len(prompt) >= self.context:
            raise Refusal(
                f"The prompt has {len(prompt):,} tokens, and {self.name} reads {self.context:,} with the answer: "
                "shorten it.",
                "prompt",
            )
        return min(most, self.context - len(prompt))

    def flops(self, rows: int, context: int, layers: int) -> float:
        """Estimated FLOPs: two per weight and row, plus attention to all positions; `context` are those not computed.
        """
        weights = 2.0 * self.parameters * layers / self.depth
        return rows * (weights + 4.0 * layers * self.width * (context + rows))


class MaskedDenoiser(CanvasNetwork):
    """A network that fills masked positions. Raises Refusal if the network cannot be one."""

    attention = "full"  # every position sees every other one

    def __init__(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, *loading: str):
        super().__init__(network, tokenizer, name, *loading)
        masking = masking_of(network.config)
        if masking is None:
            raise Refusal(f"{name} continues text and cannot fill masked positions: choose another model.", "model")
        self.mask_id, self.shifted = masking.mask_token_id, masking.shifted

    def answer_length(self, prompt: list[int], most: int) -> int:
        if self.shifted and not prompt:
            raise Refusal(f"{self.name} predicts a token from the one before it: write a prompt.", "prompt")
        return super().answer_length(prompt, most)

    def new_states(self, length: int) -> CanvasStates:
        """Empty states of a canvas of `length` positions, prompt included."""
        return CanvasStates(present=torch.zeros(length, dtype=torch.bool, device=self.device))

    def ranks(self, canvas: Sequence[int | None]) -> Tensor | None:
        """A number for each position, [len(canvas)]: a position sees those with its own or a lower one. None if all see
        all.
        """
        return None

    def sources(self, positions: Sequence[int]) -> list[int]:
        """The positions whose hidden states predict the given ones."""
        return [position - self.shifted for position in positions]

    @torch.inference_mode()
    def denoise(
        self,
        canvas: Sequence[int | None],
        wanted: Sequence[int] | None = None,
        computed: Sequence[int] | None = None,
        states: CanvasStates | None = None,
    ) -> Tensor:
        """Logits [len(wanted), V] in float32 or float64; None on the canvas is masked. The mask itself gets -inf.

        wanted: positions to predict, all by default; nothing predicts the first one of a shifted model, whose row is
        NaN. computed: positions that pass through the layers, ascending, all by default; the others take part as
        `states` has them. Raises ValueError if a wanted position is predicted by one that is not computed.
        """
        everything = range(len(canvas))
        computed = list(everything if computed is None else computed)
        wanted = list(everything if wanted is None else wanted)
        row_of = {position: row for row, position in enumerate(computed)}
        sources = self.sources(wanted)
        if missing := [position for position in sources if position >= 0 and position not in row_of]:
            raise ValueError(f"positions {missing} predict wanted ones and are not computed")
        with self.lock:
            hidden = self._hidden(canvas, computed, states or self.new_states(len(canvas)))
            rows = self._index(row_of.get(position, 0) for position in sources)
            logits = self.network.get_output_embeddings()(hidden[rows])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits[:, self.mask_id] = float("-inf")
        logits[[row for row, position in enumerate(sources) if position < 0]] = float("nan")
        return logits

    def _index(self, positions: Iterable[int]) -> Tensor:
        return torch.tensor(list(positions), dtype=torch.long, device=self.device)

    def _hidden(self, canvas: Sequence[int | None], computed: list[int], states: CanvasStates) -> Tensor:
        """Hidden states of the computed positions after the final norm, [n, hidden_size]."""
        ids = [self.mask_id if canvas[position] is None else canvas[position] for position in computed]
        at = self._index(computed)
        base = self.network.model
        hidden = base.embed_tokens(torch.tensor(ids, device=self.device))
        rotation = base.rotary_emb(hidden[None], at[None])
        states.present[at] = True
        place = CanvasPositions(at, rotation, self._allowed(canvas, at, states))
        for index, layer in enumerate(base.layers):
            mixed = self._attention(layer, index, layer.input_layernorm(hidden), place, states)
            hidden = hidden + mixed
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return base.norm(hidden)

    def _allowed(self, canvas: Sequence[int | None], at: Tensor, states: CanvasStates) -> Tensor | None:
        """Which present positions each computed one sees, bool [computed, present]; None for all."""
        ranks = self.ranks(canvas)
        if ranks is None:
            return None
        allowed = ranks[states.present][None] <= ranks[at][:, None]
        return None if bool(allowed.all()) else allowed

    def _attention(
        self, layer: nn.Module, index: int, hidden: Tensor, place: CanvasPositions, states: CanvasStates
    ) -> Tensor:
        part = layer.self_attn
        queries, keys, values = (
            project(hidden).view(len(hidden), -1, part.head_dim).transpose(0, 1)  # [heads, n, head_dim]
            for project in (part.q_proj, part.k_proj, part.v_proj)
        )
        if hasattr(part, "q_norm"):
            queries, keys = part.q_norm(queries), part.k_norm(keys)
        keys, values = states.write(index, place.at, rotated(keys, *place.rotation), values)
        groups = len(queries) // len(keys)
        mixed = scaled_dot_product_attention(
            rotated(queries, *place.rotation)[None],
            keys.repeat_interleave(groups, 0)[None],
            values.repeat_interleave(groups, 0)[None],
            attn_mask=place.allowed,
            scale=part.scaling,
        )
        return part.o_proj(mixed[0].transpose(0, 1).flatten(1))


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of states [heads, n, head_dim]; cos and sin [1, n, head_dim]."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin
