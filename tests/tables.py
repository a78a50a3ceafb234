"""Models whose next-token distribution is a table, and enumerable random draws: with both, the output distribution of a
whole text is a sum.

A TableModel uses the real KV cache: it stores each token in place of its key and reads its context back through the
attention masks. A slot that is lost, stale or visible to the wrong row therefore changes the distribution.
"""
from __future__ import annotations

import copy
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from threading import Lock

import torch
from torch import Tensor

from playground.algorithms.speculative.without_replacement import RemainingTokens
from playground.bench.bookkeeping.generated_model import GeneratedParts
from playground.contract import Decoder, Sampler
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.rng import Draws
from playground.engine.attention.attention_mask import CAUSAL
from playground.engine.cache.kv_buffer import UNKNOWN, Capacity
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.row_numbers import row_numbers
from playground.engine.text.tokens import Tokens
from playground.events import Failed
from playground.grammar.matcher import GrammarEngine

# random outcomes of one distribution: a text of two or three tokens over a few letters stays far below
MOST_COURSES = 50_000
Text = tuple[int, ...]
Law = dict[Text, float]


class Letters:
    """The tokenizer of a table: token i is the i-th letter, or a longer piece; end tokens have no text."""

    begin = padding = None

    def __init__(self, letters: Sequence[str], ends: frozenset[int]):
        self.letters, self.ends = letters, ends

    def encode(self, text: str) -> list[int]:
        """Encode a text; letters without a token are skipped."""
        return [self.letters.index(letter) for letter in text if letter in self.letters]

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode(text)

    def spell(self, text: str) -> list[int]:
        return [token for token in self.encode(text) if token not in self.ends]

    def can_spell(self, text: str) -> bool:
        return bool(self.spell(text))

    def special_in(self, text: str) -> str:
        return ""

    def check_is_text(self, text: str, about: str) -> None:
        """Its end tokens have no names that a text could have."""

    def piece(self, token: int) -> str:
        return f"<{self.letters[token]}>" if token in self.ends else self.letters[token]

    def names(self) -> dict[int, str]:
        return dict(enumerate(self.letters))

    def thinking_tags(self) -> None:
        """No model of letters has any."""

    def pieces(self, ids: list[int]) -> list[str]:
        return [self.piece(token) for token in ids]

    def bytes(self, token: int) -> bytes:
        return b"" if token in self.ends else self.letters[token].encode()

    first_token_bytes = bytes

    def is_special(self, token: int) -> bool:
        return token in self.ends

    def check_constrainable(self, prompt: list[int]) -> None:
        """Its letters are the same at the start of a text."""

    def utf8_decoder(self) -> IncrementalDecoder:
        return getincrementaldecoder("utf-8")("replace")

    def has_text(self, ids: list[int]) -> bool:
        return any(token not in self.ends for token in ids)


class TableLayers:
    """Layers for multi-token prediction of a table: scores of the token after a token are random numbers."""

    count = 2

    def __init__(self, model: TableModel):
        self.model = model

    def new_cache(self) -> TableLayers:
        return self

    def crop(self, count: int) -> None:
        """There is nothing to keep."""

    def states(self, number: int, states: Tensor, tokens: list[int], first: int, cache: TableLayers) -> Tensor:
        return torch.stack([self.model.random(("layer", number, token)) for token in tokens])

    def logits(self, states: Tensor) -> Tensor:
        return states


@dataclass
class TableModel:
    """A test double for Model: the scores after a context are random numbers seeded by the context."""

    fills = has_encoder = False

    letters: Sequence[str] = "abc"
    ends: str = ""
    seed: int = 0
    spread: float = 1.5  # of the scores: 0 is a uniform model
    context: int = 256
    vocabulary: int = 0
    tokenizer: object = None  # a real one, for grammars
    rule: Callable[[Text], Tensor] | None = None  # scores [V] after a context, instead of random ones
    name: str = "table"
    forwards: int = 0
    known: dict[Text, Tensor] = field(default_factory=dict)

    lexical_units = 8  # as if it was tuned for it
    experts, mtp_count = 8, 2  # experts that a plan may choose among, without effect
    replay = launched_ahead = recurrence = None  # nothing is recorded, and no layer is recurrent
    forward_times = {(rows, 32): 2e-3 + 1e-4 * rows for rows in (1, 4, 16)}  # seconds, so that runs repeat
    row_numbers = staticmethod(row_numbers)
    revision, quantization, depth, device, dtype, parameters, tied, attends, splits = (
        "",
        "none",
        1,
        torch.device("cpu"),
        torch.float64,
        0,
        False,
        True,
        True,
    )

    def __post_init__(self):
        self.lock, self.thread = Lock(), ThreadPoolExecutor(1)
        self.end_ids = frozenset(self.letters.index(letter) for letter in self.ends)
        self.tokens = Letters(self.letters, self.end_ids)
        self.vocabulary = self.vocabulary or len(self.letters)
        if self.tokenizer:
            self.vocabulary = len(self.tokenizer)
            self.end_ids = frozenset([self.tokenizer.eos_token_id])
            self.tokens = Tokens(self.tokenizer, self.vocabulary)
            self.grammars = GrammarEngine(self.tokenizer, self.vocabulary, sorted(self.end_ids))

    def new_store(self, capacity: Capacity = UNKNOWN) -> KVCache:
        return KVCache(1, capacity=capacity)

    def flops(self, rows: int, context: int, layers: int, experts: int | None = None) -> float:
        return float(rows)

    def forward(self, works: list[ForwardInput], plan=None) -> tuple[list[Tensor], dict]:
        self.forwards += 1
        contexts = [self._contexts(work) for work in works]
        rows = [torch.stack([self.scores(context) for context in seen]) for seen in contexts]
        captured = {
            layer: torch.stack([self.state(layer, context) for seen in contexts for context in seen])
            for layer in (plan.capture if plan else ())
        }
        return [row[-1:] if work.last_only else row for work, row in zip(works, rows)], captured

    @property
    def mtp(self) -> TableLayers:
        return TableLayers(self)

    @property
    def width(self) -> int:
        return self.vocabulary

    @property
    def parts(self) -> GeneratedParts:
        """One layer that always runs: a compute policy decides nothing here."""
        return GeneratedParts(self.depth, heads=1, head_dim=1)

    def state(self, layer: int, context: Text) -> Tensor:
        """The input of a layer, [V]: before the only layer the last token, after it the scores themselves,
        which a head leaves as they are.
        """
        return self.scores(context) if layer else self.random(("embedding", context[-1]))

    @property
    def lm_head_weights(self) -> Tensor:
        """Its state is its scores, so its lm_head is the identity."""
        return torch.eye(self.vocabulary, dtype=self.dtype)

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows

    def rotate_back(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Ignores positions, so they may be renumbered."""
        return rows

    def embed(self, tokens: list[int]) -> Tensor:
        return torch.stack([self.random(("embedding", token)) for token in tokens])

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def read_out(self, hidden: Tensor, norm: bool = True) -> Tensor:
        return hidden

    def _contexts(self, work: ForwardInput) -> list[Text]:
        """The context of each row of a request, by the cache's masks."""
        segment = work.segment()
        written = torch.tensor(work.tokens, dtype=self.dtype)[None, :, None]
        held, _ = segment.write(0, written, written)
        tokens = list(map(int, held[0, :, 0].tolist()))
        seen = visible(segment.masks.of(0, None), segment.rows, held.shape[1]).tolist()
        return [tuple(compress(tokens, row)) for row in seen]

    def scores(self, context: Text) -> Tensor:
        """Scores [V] of the token after a context."""
        if context not in self.known:
            self.known[context] = self.rule(context) if self.rule else self.random(context)
        return self.known[context]

    def random(self, context: Text) -> Tensor:
        key = int.from_bytes(blake2b(repr((self.seed, context)).encode(), digest_size=7).digest(), "big")
        return (
            torch.randn(self.vocabulary, generator=torch.Generator().manual_seed(key), dtype=self.dtype) * self.spread
        )


def visible(mask: Tensor | str | None, rows: int, slots: int) -> Tensor:
    """The attention mask as [rows, slots], in any form the cache returns it."""
    if isinstance(mask, Tensor):
        return mask
    everything = torch.ones(rows, slots, dtype=torch.bool)
    return everything.tril() if mask == CAUSAL else everything


class Enumerating:
    """A test double for Draws: successive runs enumerate all outcomes. `weight` is the probability of the run."""

    def __init__(self):
        self._coins: dict[tuple, bool] = {}
        self._courses: list[list] = []  # [index of the chosen outcome, outcomes with their probabilities]
        self._at, self.weight = 0, 1.0

    def runs(self) -> Iterator[None]:
        """One iteration for each sequence of outcomes."""
        while True:
            self._at, self.weight, self._coins = 0, 1.0, {}
            yield
            while self._courses and self._courses[-1][0] + 1 == len(self._courses[-1][1]):
                self._courses.pop()
            if not self._courses:
                return
            self._courses[-1][0] += 1

    def pick(self, p: Tensor, purpose: str, position: int, lineage: int = 0) -> int:
        chances = (p / p.sum()).tolist()
        return self._choose([(token, chance) for token, chance in enumerate(chances) if chance > 0])

    def take(self, remaining: RemainingTokens, purpose: str, position: int) -> int:
        return remaining.take(lambda rest: self.pick(rest, purpose, position))

    def flip(self, probability: float, purpose: str, position: int, lineage: int = 0) -> tuple[bool, float]:
        sides = [((True, 0.0), probability), ((False, probability), 1 - probability)]
        return self._choose([side for side in sides if side[1] > 0])

    def coin(self, probability: float, purpose: str, history: Sequence[int], lineage: int = 0) -> bool:
        key = (purpose, tuple(history), lineage)
        if key not in self._coins:
            self._coins[key] = self.flip(probability, purpose, len(history))[0]
        return self._coins[key]

    def _choose(self, outcomes: list):
        if self._at == len(self._courses):
            self._courses.append([0, outcomes])
        index, known = self._courses[self._at]
        assert known == outcomes, "the same course of chance came to another fork"
        self._at += 1
        outcome, probability = outcomes[index]
        self.weight *= probability
        return outcome


def watch(
    assembly: Assembly, models: dict, prompt: list[int], limits: Limits, draws: Draws | Enumerating
) -> Iterator[Lane]:
    """Run one lane with `draws`, yielding it after each request."""
    assembly = copy.deepcopy(assembly)
    lane = Lane(
        prompt,
        models,
        assembly,
        limits,
        Silent(models["target"].tokens),
        {name: without_context(prompt) for name in assembly.prompts()},
    )
    lane.draws = draws
    runner = Runner(lane, assembly)
    while not runner.finished:
        failed = [event for event in runner.advance() if isinstance(event, Failed)]
        assert not failed, failed
        yield lane


class Idle(Decoder):
    """Writes nothing."""

    def decode(self, lm):
        yield from ()


def prepared(samplers: list[Sampler], models: dict, prompt: list[int]) -> list[Sampler]:
    """Samplers bound to a lane, after their setup."""
    return write(Assembly(Idle(), samplers), models, prompt, Limits(), Draws(0)).assembly.samplers


def without_context(prompt: list[int]) -> list[int]:
    """The prompt of auxiliary streams: its last token, as if all before it were context."""
    return prompt[-1:]


def write(assembly: Assembly, models: dict, prompt: list[int], limits: Limits, draws: Draws | Enumerating) -> Lane:
    """Run one lane to its end."""
    return deque(watch(assembly, models, prompt, limits, draws), maxlen=1).pop()


def law(config: LaneConfig | Assembly, models: dict[str, TableModel], prompt: list[int], length: int) -> Law:
    """Exact probability of every text of at most `length` tokens."""
    assembly = config if isinstance(config, Assembly) else assemble(config)
    draws, found = Enumerating(), defaultdict(float)
    for course, _ in enumerate(draws.runs()):
        assert course < MOST_COURSES, (
            "this distribution takes too long to enumerate: use fewer tokens, letters or draft tokens"
        )
        lane = write(assembly, models, prompt, Limits(max_new_tokens=length), draws)
        found[tuple(lane.tokens[len(prompt):])] += draws.weight
    return dict(found)


def product_law(
    model: TableModel,
    prompt: list[int],
    length: int,
    reshape: Callable[[Tensor, list[int]], Tensor] = lambda scores, history: scores,
) -> Law:
    """The same by the chain rule, without a lane: products of the model's rows after `reshape(scores [V], history)`."""
    found = {(): 1.0}
    for _ in range(length):
        found = {longer: p for text, q in found.items() for longer, p in _continued(model, prompt, text, q, reshape)}
    return found


def _continued(
    model: TableModel, prompt: list[int], text: Text, q: float, reshape: Callable
) -> Iterator[tuple[Text, float]]:
    if text and text[-1] in model.end_ids:
        yield text, q
        return
    history = [*prompt, *text]
    for token, p in enumerate(reshape(model.scores(tuple(history)), history).softmax(-1).tolist()):
        if p > 0:
            yield (*text, token), q * p


def distance(a: Law, b: Law) -> float:
    """Largest difference between the probabilities of one text under two distributions."""
    return max(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())
