"""Finch: after every chunk of the prompt, its question selects what stays of the chunk."""
from __future__ import annotations

import pytest
import torch
from pairs import network
from transformers import DynamicCache

from playground.contract import find, make
from playground.errors import Refusal
from support.budget_policies import best, roomy
from support.eviction import PROMPT, alone, course, models
from support.kv_caches import exact_softmax
from support.wrong_variants import variants_of

Finch = find("finch")
COLLAPSES = {"finch": roomy("finch", capacity=2048)}
QUESTION, CAPACITY, CHUNK = 4, 10, 8
KNOBS = {"capacity": CAPACITY, "question": QUESTION, "chunk": CHUNK}
CONTEXT = len(PROMPT) - QUESTION
DECODED = 5


class ByHand:
    """Reads chunks with the library's cache, from which slots are dropped; positions are those in the cache."""

    def __init__(self):
        self.model, self.cache = network("llama"), DynamicCache()
        self.model.set_attn_implementation("eager")
        self.held = [[[] for _ in range(2)] for _ in range(3)]  # true positions, by layer and head

    @torch.inference_mode()
    def feed(self, tokens: list[int], start: int):
        """Closed gaps: the newest slot before the rows is their neighbour, at whatever position both are."""
        with exact_softmax():
            return self.model(
                input_ids=torch.tensor([tokens]), position_ids=torch.arange(start, start + len(tokens))[None],
                past_key_values=self.cache, output_attentions=True,
                attention_mask=self.mask(len(tokens)),
            )

    def mask(self, rows: int) -> torch.Tensor:
        slots = self.cache.get_seq_length() + rows
        seen = torch.ones(rows, slots, dtype=torch.bool).tril(slots - rows)
        return torch.zeros(rows, slots, dtype=torch.float64).masked_fill(~seen, float("-inf"))[None, None]

    def scores(self, weights: torch.Tensor, slots: int, before: int) -> list[list[float]]:
        """Attention of the question to slots, times the number of tokens before each row, by KV head."""
        counts = torch.arange(before, before + QUESTION, dtype=torch.float64)[:, None]
        rows = weights[0, :, -QUESTION:, :slots] * counts
        return rows.unflatten(0, (2, 2)).sum((1, 2)).tolist()

    def drop(self, layer: int, kept: list[list[int]], end: int) -> None:
        """Keep slots of a layer; its keys move together, so that the last one is at position end - 1."""
        pool = self.cache.layers[layer]
        keys, values = [], []
        for head, slots in enumerate(kept):
            old = torch.arange(end - pool.keys.shape[2], end)[slots]
            new = torch.arange(end - len(slots), end)
            keys.append(turned(self.model, pool.keys[0, head, slots], new - old))
            values.append(pool.values[0, head, slots])
            self.held[layer][head] = [self.held[layer][head][slot] for slot in slots]
        pool.keys, pool.values = torch.stack(keys)[None], torch.stack(values)[None]

    def write(self) -> tuple[list[int], list]:
        read, done = 0, 0
        while read < len(PROMPT):
            last = len(PROMPT) - read <= CHUNK
            chunk = PROMPT[read:] if last else PROMPT[read:read + CHUNK]
            out = self.feed(chunk, read)
            read += len(chunk)
            logits, asked = out.logits[0, -1], out
            if not last:
                asked = self.feed(PROMPT[-QUESTION:], read)
                for pool in self.cache.layers:
                    pool.keys, pool.values = pool.keys[:, :, :-QUESTION], pool.values[:, :, :-QUESTION]
            for layer in range(3):
                self._settle(layer, asked.attentions[layer], read, done, last)
            done = read
        ids, live = [int(logits.argmax())], [self.live()]
        while len(ids) < DECODED:
            out = self.feed(ids[-1:], len(PROMPT) + len(ids) - 1)
            for layer in self.held:
                for head in layer:
                    head.append(len(PROMPT) + len(ids) - 1)
            ids.append(int(out.logits[0, -1].argmax()))
            live.append(self.live())
        return ids, live

    def _settle(self, layer: int, weights: torch.Tensor, read: int, done: int, last: bool) -> None:
        for head in self.held[layer]:
            head += range(done, read)
        slots = len(self.held[layer][0])
        share = (CAPACITY - QUESTION) * min(read, CONTEXT) // CONTEXT - (CAPACITY - QUESTION) * done // CONTEXT
        kept = []
        for head, received in zip(self.held[layer], self.scores(weights, slots, slots - QUESTION * last)):
            fresh = {slot: received[slot] for slot, p in enumerate(head) if done <= p < CONTEXT}
            safe = {slot for slot, p in enumerate(head) if p < done or p >= CONTEXT}
            kept.append(sorted(safe | best(fresh, share)))
        self.drop(layer, kept, read)

    def live(self):
        return [[set(head) for head in layer] for layer in self.held]


def turned(model, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Keys [n, d] rotated by so many positions [n]."""
    cos, sin = (table[0] for table in model.model.rotary_emb(keys[None], by[None]))
    low, high = keys.chunk(2, -1)
    return keys * cos + torch.cat([-high, low], -1) * sin


def check(cls: type) -> None:
    tokens, held = course(alone(cls(**KNOBS)), models())
    ids, live = ByHand().write()
    assert (tokens[:DECODED], held[:DECODED]) == (ids, live)


class WithoutNormalisation(Finch):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, key_positions, self.text_length)


class WithoutTheQuestion(Finch):
    """The last tokens of the chunk select."""

    def chunk_probe(self, text, read):
        return []

    def wants_attention(self, position, prompt):
        return True


class LeavesGaps(Finch):
    def _close_gaps(self, held, kept):
        pass


@pytest.mark.oracle("finch")
def test_text_and_cache_equal_the_librarys_chunk_by_chunk():
    check(Finch)


@pytest.mark.refuses("finch")
@pytest.mark.parametrize("wrong", variants_of(Finch, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_selection_is_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_no_more_than_the_capacity_and_a_chunk_is_ever_held():
    sizes = []

    class Listening(Finch):
        def retain(self, held):
            sizes.append(held.positions.shape[1])
            return super().retain(held)

    course(alone(Listening(**KNOBS)), models())
    assert max(sizes[:9]) <= CAPACITY + CHUNK


def test_a_question_without_room_for_a_context_is_refused():
    with pytest.raises(Refusal, match="raise capacity"):
        make("finch", capacity=8, question=8)
