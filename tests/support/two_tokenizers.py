"""Two models with different tokens."""
from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator

from tables import Enumerating, Law, Letters, TableModel

from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.rng import Draws
from playground.events import Event, Failed


class Pieces(Letters):
    """A tokenizer of letters that splits a text into the longest known pieces and skips unknown ones."""

    def encode(self, text: str) -> list[int]:
        found = []
        while text:
            piece = max(
                (p for p in self.letters if text.startswith(p) and self.letters.index(p) not in self.ends),
                key=len,
                default="",
            )
            found += [self.letters.index(piece)] if piece else []
            text = text[len(piece) or 1:]
        return found


def speaking(letters: list[str], ends: str = "", **settings) -> TableModel:
    model = TableModel(letters, ends, **settings)
    model.tokens = Pieces(letters, model.end_ids)
    return model


def strangers(seed: int = 0, ends: bool = False) -> dict[str, TableModel]:
    """The target has a token "ab", the draft "ba", and their common letters have different ids."""
    return {"target": speaking(["a", "b", "ab", *["."] * ends], "." * ends, seed=seed),
            "draft": speaking([*["!"] * ends, "b", "a", "ba"], "!" * ends, seed=seed + 1)}


def between(
    lane: LaneConfig | Assembly,
    models: dict,
    prompt: list[int],
    limits: Limits,
    draws: Draws | Enumerating | None = None,
) -> Iterator[tuple[Lane, list]]:
    """Run one lane whose draft reads the prompt in its own tokens; yields it after each request, with its events."""
    assembly = copy.deepcopy(lane) if isinstance(lane, Assembly) else assemble(lane)
    spelled = models["draft"].tokens.encode("".join(map(models["target"].tokens.piece, prompt)))
    lane = Lane(prompt, models, assembly, limits, Recorder(models["target"].tokens), {"draft": spelled})
    lane.draws = draws or Draws(limits.seed)
    runner = Runner(lane, assembly)
    while not runner.finished:
        recorded = runner.advance()
        assert not [event for event in recorded if isinstance(event, Failed)], recorded
        yield lane, recorded


def crossed(lane: LaneConfig | Assembly, models: dict, prompt: list[int], length: int) -> tuple[Lane, list[Event]]:
    seen = list(between(lane, models, prompt, Limits(0, length)))
    return seen[-1][0], [event for _, recorded in seen for event in recorded]


def law_between(lane: LaneConfig | Assembly, models: dict, prompt: list[int], length: int) -> Law:
    draws, found = Enumerating(), defaultdict(float)
    for course, _ in enumerate(draws.runs()):
        assert course < 50_000, "this law would take too long to sum"
        *_, (last, _) = between(lane, models, prompt, Limits(0, length), draws)
        found[tuple(last.tokens[len(prompt):])] += draws.weight
    return dict(found)
