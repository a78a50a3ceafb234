"""Runs encoder-decoder networks of the transformers library over texts of a source, the mark, and the decoder's tokens.

The encoder reads a source once. Its KV cache slots hold the states that cross-attention reads, so they are filled by
the first forward and never grow; the slots after them hold those of the decoder's self-attention. To the library, every
row continues one straight text, as in `engine.attention.library_cache`.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from playground.engine.attention.library_cache import LibraryLayer, branches, check_unwatched
from playground.engine.attention.segment_attention import Segment, SlotStore
from playground.errors import Refusal


class SelfAttentionLayer(LibraryLayer):
    """One layer of the decoder's own cache: the slots after those of the source."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        source = self.branch.store.source
        return keys[:, :, source:], values[:, :, source:]

    def get_seq_length(self) -> int:
        return super().get_seq_length() - self.branch.store.source


class SourceLayer(DynamicLayer):
    """One layer of what cross-attention reads, which is complete."""

    def __init__(self, keys: Tensor, values: Tensor):
        """States [1, kv_heads, source, d]."""
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True


@dataclass(frozen=True)
class SourceReading:
    """Forwards of an encoder-decoder network. `mark` is the id that ends a source, `start` the one it stands for."""

    network: PreTrainedModel
    mark: int
    start: int

    def __call__(self, segments: list[Segment], ids: Tensor) -> Tensor:
        """Logits [rows, mark + 1] of the rows of all segments, whose token ids are [rows]; NaN for rows of a source,
        after which the network predicts nothing. Raises Refusal for what needs the playground's own attention.
        """
        parts = [self._segment(segment, own) for segment, own in zip(segments, ids.split([s.rows for s in segments]))]
        return torch.cat(parts)

    def _segment(self, segment: Segment, ids: Tensor) -> Tensor:
        check_unwatched(segment)
        store, begins = segment.store, not (segment.store.length or segment.first)
        if begins:
            store.source = self._source_of(ids)
        rest = Segment(store, segment.first + store.source, segment.rows - store.source) if begins else segment
        source, found = ids[:len(ids) - rest.rows], []
        for branch in branches(rest):
            own = ids[branch.first - segment.first:][:branch.rows]
            found.append(self._begin(branch, source, own) if begins and not found else self._go_on(branch, own))
        unknown = found[0].new_full((len(source), found[0].shape[1]), torch.nan)
        ruled_out = found[0].new_full((len(ids), 1), -torch.inf)  # the mark is never written
        return torch.cat([torch.cat([unknown, *found]), ruled_out], 1)

    def _source_of(self, ids: Tensor) -> int:
        """Tokens before the mark. Raises Refusal for a text without a source."""
        marks = (ids == self.mark).nonzero()
        if not len(marks) or not int(marks[0]):
            raise Refusal("An encoder-decoder model reads its whole prompt at once, and here is none: write a prompt, "
                          "or choose another strategy.", "prompt")
        return int(marks[0])

    def _begin(self, branch: Segment, source: Tensor, ids: Tensor) -> Tensor:
        """Read the source, and the first chain of the decoder; stores the states of both."""
        own, cross = DynamicCache(), DynamicCache()
        states = self.encode(source)
        logits = self._decode(ids, states, EncoderDecoderCache(own, cross), branch.store)
        whole = Segment(branch.store, 0, branch.end)
        for layer, (read, written) in enumerate(zip(cross.layers, own.layers)):
            whole.write(layer, *(torch.cat(pair, 2)[0] for pair in (
                (read.keys, written.keys), (read.values, written.values))))
        return logits

    def _go_on(self, branch: Segment, ids: Tensor) -> Tensor:
        """Read a chain of the decoder after what is stored."""
        store, states = branch.store, self._placeholder(branch.store.source)
        own, cross = DynamicCache(), DynamicCache()
        own.layer_class_to_replicate = cross.layer_class_to_replicate = None
        own.layers = SelfAttentionLayer.all_of(branch)
        cross.layers = [
            SourceLayer(keys.read(store.source)[None], values.read(store.source)[None])
            for keys, values in zip(store.keys, store.values)
        ]
        return self._decode(ids, states, EncoderDecoderCache(own, cross), store)

    def encode(self, source: Tensor) -> Tensor:
        """The encoder's states of a source, [1, source, hidden_size]."""
        every = torch.ones_like(source)[None]
        return self.network.get_encoder()(input_ids=source[None], attention_mask=every).last_hidden_state

    def _placeholder(self, source: int) -> Tensor:
        """In place of the encoder's states, of which every layer has its keys and values already."""
        embeddings = self.network.get_input_embeddings().weight
        return embeddings.new_zeros(1, source, embeddings.shape[1])

    def _decode(self, ids: Tensor, states: Tensor, cache: EncoderDecoderCache, store: SlotStore) -> Tensor:
        """Logits [rows, V] after a chain of the decoder. Reports its cross-attention where that is asked for."""
        report = store.on_cross_attention
        with self._weighing() if report else nullcontext():
            read = self.network(
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                attention_mask=states.new_ones(states.shape[:2], dtype=torch.long),
                decoder_input_ids=self.started(ids)[None],
                past_key_values=cache,
                use_cache=True,
                output_attentions=report is not None,
            )
        for layer, weights in enumerate(read.cross_attentions or () if report else ()):
            report(layer, weights[0].float())
        return read.logits[0]

    @contextmanager
    def _weighing(self) -> Iterator[None]:
        """Attention that returns its weights."""
        before = self.network.config._attn_implementation
        self.network.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.network.set_attn_implementation(before)

    def started(self, ids: Tensor) -> Tensor:
        """Ids as the decoder reads them, with the network's own start token for the mark."""
        return ids.masked_fill(ids == self.mark, self.start)
