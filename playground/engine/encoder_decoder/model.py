"""An encoder-decoder model in place of a causal one: a text is a source, the mark, and what the decoder wrote."""
from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from playground.engine.cache.kv_buffer import UNKNOWN, Capacity
from playground.engine.cache.kv_cache import KVCache
from playground.engine.encoder_decoder.configs import decoder_layers, start_ids
from playground.engine.encoder_decoder.source_reading import SourceReading
from playground.engine.encoder_decoder.source_tokens import SourceTokens
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import Call
from playground.engine.loading.load_check import Reference, largest_error, ordinary_tokens
from playground.engine.model import Model
from playground.errors import Refusal

SOURCE, BEGINNING, TARGET = 5, 2, 4  # tokens of the texts that a network is compared with the library on


class SourceImplementation:
    """Makes an encoder-decoder compute, and compares it with the library's own logits."""

    def __init__(self, model: EncoderDecoder):
        self._model = model

    def install(self) -> float:
        """Set what the model reads a text with; returns the tolerance of logits that should be the library's.

        Raises Refusal if they are not.
        """
        model = self._model
        start, begin = start_ids(model.network)
        model.tokens = SourceTokens(model.tokenizer, model.vocabulary, begin)
        model.reading = SourceReading(model.network, model.vocabulary, start)
        model.vocabulary += 1
        model.depth = decoder_layers(model.network.config)
        tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.15
        self._check(tolerance)
        return tolerance

    def _check(self, tolerance: float) -> None:
        """Raise Refusal unless this computes the library's own logits, whichever way it gets the tokens."""
        kind = self._model.network.config.model_type
        try:
            error = largest_error(self._numbers, self._model.new_store, self._reference())
        except Refusal:
            raise
        except Exception as reason:  # an architecture may fail in any way
            raise Refusal(
                f"{kind} models cannot be run here, because the transformers library does not run them on text alone "
                f"({type(reason).__name__}): choose another model.",
                "model",
            ) from None
        if not error < tolerance:
            raise Refusal(
                f"{kind} models cannot be run here, because their logits would differ from the transformers library's "
                f"by {error:.2g}: choose another model.",
                "model",
            )

    def _reference(self) -> Reference:
        """Two texts of one source, and the logits that the library computes of each without a cache."""
        ids = ordinary_tokens(self._model.network.config, SOURCE + BEGINNING - 1 + 2 * TARGET)
        source, ids = ids[:SOURCE], ids[SOURCE:]
        common, first, second = ids[:BEGINNING - 1], ids[1:][:TARGET], ids[1 + TARGET:]
        texts = [[*source, self._model.reading.mark, *common, *target] for target in (first, second)]
        return Reference(SOURCE + BEGINNING - 1, *texts, *(self._library_logits(text) for text in texts))

    def _library_logits(self, text: list[int]) -> Tensor:
        """Logits [n, V], 0 for rows of the source."""
        source, ids = torch.tensor(text, device=self._model.device).split([SOURCE, len(text) - SOURCE])
        written = self._model.reading.started(ids)[None]
        logits = self._model.network(
            input_ids=source[None],
            attention_mask=torch.ones_like(source)[None],  # without it, some networks leave out what they call padding,
            decoder_input_ids=written,
            decoder_attention_mask=torch.ones_like(written),  # their own start token among it
            use_cache=False,
        ).logits[0]
        return torch.cat([logits.new_zeros(SOURCE, logits.shape[1]), logits])

    def _numbers(self, works: list[ForwardInput]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """A forward without the mark's column, with 0 for rows of a source."""
        logits, captured = self._model.forward(works)
        return [rows[:, :-1].nan_to_num(0.0) for rows in logits], captured


class EncoderDecoder(Model):
    """A text-to-text network of the library. Prompts are its sources; its vocabulary has one id more, the mark.

    Raises Refusal if the network cannot be made to compute the library's own logits.
    """

    has_encoder = True

    implementations = SourceImplementation

    reading: SourceReading  # set when it is installed

    @property
    def attends(self) -> bool:
        return False  # attention runs inside the library

    def new_store(self, capacity: Capacity = UNKNOWN) -> KVCache:
        return KVCache(self.depth, self.device, capacity, whole_prompt=self.context)

    def _logits(self, positions: Tensor, wanted: Tensor | int, call: Call, inputs: dict[str, Tensor]) -> Tensor:
        if not call.plan.is_plain or "input_ids" not in inputs:
            raise Refusal(
                f"{self.name} is an encoder-decoder model, whose layers the playground runs whole and as they are: "
                "choose another strategy, or a causal model.",
                "model",
            )
        logits = self.reading(call.segments, inputs["input_ids"][0])
        return logits if isinstance(wanted, int) else logits[wanted]

    @cached_property
    def _encoder_weights(self) -> int:
        return sum(weight.numel() for weight in self.network.get_encoder().parameters())

    def flops(self, rows: int, context: int, layers: int, experts: int | None = None) -> float:
        """Estimated FLOPs: two per weight and row, plus attention; the first rows of a text are its source, which only
        the encoder reads, and the mark.
        """
        encoder = self._encoder_weights
        sourced = 0 if context else rows - 1
        attention = 4.0 * layers * self.width * (context + rows / 2)
        return 2.0 * (sourced * encoder + (rows - sourced) * (self.parameters - encoder)) + rows * attention
