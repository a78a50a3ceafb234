"""What a checkpoint says of its network: sizes, tokens and ends."""
from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.expert_routing import expert_weights
from playground.engine.loading.mtp_layers import MtpLayers, count_of
from playground.engine.loading.stored_weights import is_plain, parameter_count
from playground.engine.text.generation_settings import (
    UNSTATED_CONTEXT,
    GenerationSettings,
    bounds_line,
    end_ids,
    stated_context,
)
from playground.engine.text.tokens import Tokens


class ModelFacts:
    """Facts of a causal network and its tokenizer, for which no forward is needed."""

    def __init__(
        self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, revision: str, quantization: str
    ):
        self.network, self.tokenizer = network.eval(), tokenizer
        self.name, self.revision, self.quantization = name, revision, quantization
        # what changed weights cost and lose (`training.weights`); empty for those of a checkpoint
        self.weights_card: dict[str, Any] = {}
        config = network.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.width: int = config.hidden_size
        self.tied: bool = bool(getattr(config, "tie_word_embeddings", False))  # lm_head and embeddings
        self.context: int = stated_context(config) or UNSTATED_CONTEXT
        self.device: torch.device = network.get_input_embeddings().weight.device
        self.dtype: torch.dtype = network.dtype
        self.parameters = parameter_count(network)
        self.expert_weights = expert_weights(network)
        self.tokens = Tokens(tokenizer, self.vocabulary)
        self.settings = GenerationSettings.of(network)  # that its author stored with it

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text, whichever file of the checkpoint names them."""
        return end_ids(self.network, self.tokens, self.tokenizer.eos_token_id)

    @property
    def context_stated(self) -> bool:
        """Whether the config says how many tokens the model can read; the playground sets a limit where it does not."""
        return stated_context(self.network.config.get_text_config()) is not None

    @property
    def bounds(self) -> str:
        """What ends and limits a text, and what the author of the checkpoint set, on one line."""
        return bounds_line(self.end_ids, self.tokens, self.context, self.settings, self.context_stated)

    @property
    def lm_head_weights(self) -> Tensor | None:
        """Weights of the lm_head, [V, hidden_size]; None if they are not a plain matrix, for example quantised.

        A copy where they are on another device than the inputs.
        """
        weight = getattr(self.network.get_output_embeddings(), "weight", None)
        plain = is_plain(weight) and weight.shape[1:] == (self.width,)
        if plain and weight.device != self.device:
            return self._copied_head
        return weight.detach() if plain else None

    @cached_property
    def _copied_head(self) -> Tensor:
        return self.network.get_output_embeddings().weight.detach().to(self.device)

    @cached_property
    def lexical_units(self) -> int:
        """Tokens that it was tuned to predict in one forward from placeholders, as its config says; 0 if it was not."""
        count = getattr(self.network.config, "lexical_units", 0)
        return count if isinstance(count, int) else 0

    @cached_property
    def mtp_count(self) -> int:
        """Layers for multi-token prediction that its checkpoint should have."""
        return count_of(self.network)

    @cached_property
    def mtp(self) -> MtpLayers:
        """Its layers for multi-token prediction; raises Refusal if there are none."""
        return MtpLayers.of(self.network, self.name)
