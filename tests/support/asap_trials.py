"""Runs of ASAp over small tables."""
from __future__ import annotations

import random
from collections import defaultdict, deque
from copy import deepcopy
from itertools import product
from math import exp

import torch
from tables import Enumerating, Law, TableModel
from toys import byte_tokenizer

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Silent
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.events import Commit, Event, Failed
from playground.trace import check
from strategies.constrained.asap.prefix_trie import NEVER, ROOT, PrefixTrie

TOKENIZER = byte_tokenizer(merges=0)  # a token is a byte, so every text has one spelling
END = TOKENIZER.eos_token_id
START = TOKENIZER.convert_tokens_to_ids("q")
Spelt = tuple[int, ...]


def ids(text: str) -> Spelt:
    return tuple(TOKENIZER.convert_tokens_to_ids(list(text)))


def under(constraint: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig("asap", knobs, [constraint])


def choosing(*options: str, **knobs) -> LaneConfig:
    return under(("choice", {"options": "|".join(options)}), **knobs)


def one_lane(config: LaneConfig, model: TableModel, draws, memory: Memory | None = None, length: int = 12) -> Lane:
    """Run one lane to its end, with a visitor's memory."""
    assembly = assemble(config)
    lane = Lane(
        [START], {"target": model}, assembly, Limits(max_new_tokens=length), Silent(model.tokens), memory=memory
    )
    lane.draws, runner = draws, Runner(lane, assembly)
    while not runner.finished:
        failed = [event.message for event in runner.advance() if isinstance(event, Failed)]
        if failed:
            raise Refusal(failed[0])
    return lane


def law(config: LaneConfig, model: TableModel, memory: Memory | None = None) -> Law:
    """Exact probability of every text, where each run begins with what the visitor's memory holds."""
    draws, found = Enumerating(), defaultdict(float)
    for _ in draws.runs():
        lane = one_lane(config, model, draws, deepcopy(memory))
        found[tuple(lane.main.written)] += draws.weight
    return dict(found)


def taught(config: LaneConfig, model: TableModel, draws) -> Memory:
    """The memory of a visitor who ran this once."""
    memory = Memory()
    one_lane(config, model, draws, memory)
    return memory


class Evenly:
    """Replaces Draws: samples uniformly among the allowed tokens, so that every prefix is reached."""

    def __init__(self):
        self.chance = random.Random(0)

    def pick(self, p: torch.Tensor, purpose: str, position: int, lineage: int = 0) -> int:
        return self.chance.choice(p.nonzero()[:, 0].tolist())


def trie_of(memory: Memory) -> PrefixTrie:
    [trie] = memory._things.values()
    return trie


def weights(model: TableModel, options: list[str], t: float = 1.0) -> Law:
    """P(option, end) of unconstrained sampling."""
    return {(*ids(option), END): exp(log_chance(model, (*ids(option), END), t)) for option in options}


def log_chance(model: TableModel, text: Spelt, t: float = 1.0) -> float:
    rows = [model.scores((START, *text[:i])) / t for i in range(len(text))]
    return sum(float(row.log_softmax(-1)[token]) for row, token in zip(rows, text))


def given_the_grammar(model: TableModel, options: list[str], t: float = 1.0) -> Law:
    """Q: the model's distribution given that the text is an option."""
    mass = weights(model, options, t)
    return {text: p / sum(mass.values()) for text, p in mass.items()}


def prefixes_of(trie: PrefixTrie) -> dict[int, Spelt]:
    found = {ROOT: ()}
    for node in range(1, len(trie)):
        found[node] = (*found[trie.parents[node]], trie.tokens[node])
    return found


COIN = ("regex", {"pattern": "0{5}|1[01]{4}"})


def coins(tosses: int = 5) -> TableModel:
    def scores(context: Spelt) -> torch.Tensor:
        row = torch.full((len(TOKENIZER),), NEVER, dtype=torch.float64)
        row[list(ids("01")) if len(context) <= tosses else [END]] = 0.0
        return row
    return TableModel(tokenizer=TOKENIZER, rule=scores)


def languages() -> list[list[str]]:
    """Random sets of texts of up to four of three letters; one text may be a prefix of another."""
    texts = ["".join(letters) for length in range(1, 5) for letters in product("abc", repeat=length)]
    return [random.Random(seed).sample(texts, 7) for seed in range(4)]


def table(seed: int) -> TableModel:
    """A model that writes three letters and the end at probabilities of its own in every place."""
    opinions, silent = (
        TableModel(tokenizer=TOKENIZER, seed=seed, spread=1.0),
        torch.ones(len(TOKENIZER), dtype=torch.bool),
    )
    silent[[*ids("abc"), END]] = False
    return TableModel(tokenizer=TOKENIZER, rule=lambda context: opinions.scores(context).masked_fill(silent, NEVER))


def events(
    config: LaneConfig, models: Models | None = None, memory: Memory | None = None, text: str = "q", seed: int = 0
) -> list[Event]:
    session = prepare(models or Models(table(2)), [config], Prompt(text), Limits(seed, 24), memory=memory)
    deque(session, maxlen=0)
    assert check(session.trace) == []
    return [stamped.event for stamped in session.trace.events]


def texts(recorded: list[Event]) -> list[str]:
    """Of every sample, by the number of its sequence."""
    found = defaultdict(str)
    for event in recorded:
        if isinstance(event, Commit) and event.sequence:
            found[event.sequence] += event.text
    return [found[number] for number in sorted(found)]
