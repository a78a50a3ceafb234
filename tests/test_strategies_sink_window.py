"""Cache policies: which positions stay live, and when."""
from __future__ import annotations

from functools import cache

import pytest
import torch
from pairs import network, pair
from registry import lanes, title, unchanged_by
from tables import TableModel, watch

from playground.contract import make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Cache, Commit
from playground.trace.cache_contents import contents
from strategies.kv_cache.sink_window import SinkWindow
from support.attention_written_out import Change, written_out
from support.eviction import LENGTH, PROMPT, alone, course, models

COLLAPSES = {"sink_window": unchanged_by("sink_window", window=1024)}


def seen(policy, query: int) -> list[int]:
    return policy.visible(torch.tensor([[query]]), torch.arange(query + 1))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "sinks, window, query, positions",
    [
        (2, 3, 9, [0, 1, 7, 8, 9]),
        (2, 3, 3, [0, 1, 2, 3]),
        (0, 1, 5, [5]),
        (4, 1, 9, [0, 1, 2, 3, 9]),
        (0, 3, 9, [7, 8, 9]),
    ],
)
def test_a_row_sees_the_sinks_and_a_window_that_includes_itself(sinks, window, query, positions):
    assert seen(make("sink_window", sinks=sinks, window=window), query) == positions


def written_by_hand(model: TableModel, prompt: list[int], sinks: int, window: int, length: int) -> list[int]:
    """Greedy tokens where the prompt is read in full and every later row sees the sinks and the last tokens alone."""
    text = [*prompt, argmax(model, prompt)]
    while len(text) < len(prompt) + length:
        row = len(text) - 1
        text.append(argmax(model, [token for place, token in enumerate(text) if place < sinks or row - place < window]))
    return text


def argmax(model: TableModel, context: list[int]) -> int:
    scores = model.scores(tuple(context)).tolist()
    return scores.index(max(scores))


def check_sink_window(policy: type[SinkWindow], decoder: str) -> None:
    """Text and live positions of a table model, whose logits depend on all that a row attends to."""
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", spread=3.0)}
    for sinks, window in ((2, 3), (0, 4), (4, 1)):
        assembly = Assembly(make(decoder), cache_policy=policy(sinks=sinks, window=window))
        prompt = [0, 1, 2, 0, 1, 3, 3]
        for lane in watch(assembly, models, prompt, Limits(0, 16), Draws(0)):
            if lane.generated:
                row = len(lane.tokens) - 1
                live = {int(place) for place in lane.target.store.slots[0].positions[0] if place >= 0}
                assert live <= {place for place in range(row) if place < sinks or row - place < window}
        assert lane.tokens == written_by_hand(models["target"], prompt, sinks, window, 16)


class OneTooMany(SinkWindow):
    """The window does not include the current token."""

    def visible(self, query_positions, key_positions):
        return (key_positions < self.sinks) | (query_positions - key_positions <= self.window)


class SinksLeaveToo(SinkWindow):
    def visible(self, query_positions, key_positions):
        return query_positions - key_positions < self.window + self.sinks


class SinksCountFromOne(SinkWindow):
    def visible(self, query_positions, key_positions):
        return (key_positions <= self.sinks) & (key_positions > 0) | (query_positions - key_positions < self.window)


@pytest.mark.oracle("sink_window")
@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_every_row_sees_sinks_and_window_and_nothing_else_is_cached(decoder):
    check_sink_window(SinkWindow, decoder)


@pytest.mark.refuses("sink_window")
@pytest.mark.parametrize("wrong", [OneTooMany, SinksLeaveToo, SinksCountFromOne], ids=lambda cls: cls.__name__)
def test_a_wrong_window_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_sink_window(wrong, "greedy")


def test_evicted_slots_are_reported_and_their_memory_is_freed():
    config = LaneConfig("greedy", {}, [("sink_window", {"sinks": 2, "window": 4})])
    session = prepare(
        pair(), [config], Prompt("The green bird sings, and the red fox listens."), Limits(max_new_tokens=12)
    )
    written, caches = 0, []
    for stamped in session:
        if isinstance(stamped.event, Commit):
            written += len(stamped.event.ids)
        if isinstance(stamped.event, Cache):
            caches.append(stamped.event)
            length = len(session.headers[0].prompt_ids) + max(0, written - 1)
            assert stamped.event.length == length
            *_, live = contents(caches)
            assert live == [[[(0, 2), (length - 3, length)]]]  # and the next row makes four
    # a slot of two heads in three layers
    assert len(caches) == 13 and caches[0].evicted > 0 and all(cache.evicted == 6 for cache in caches[2:])
    assert len({cache.bytes for cache in caches}) == 1


@pytest.mark.parametrize("config", lanes(added=(("sink_window", {"sinks": 1, "window": 3}),)), ids=title)
def test_live_slots_hold_the_text_at_their_positions(config):
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
    for lane in watch(assemble(config), models, [0, 1, 2, 0, 1], Limits(2, 12), Draws(2)):
        store = lane.target.store
        positions = store.slots[0].positions[0].tolist()
        if store.length:
            assert store.keys[0].rows[0, : len(positions), 0].tolist() == [
                lane.tokens[position] for position in positions
            ]


# --- positions in the cache ---

def numbered_by_the_cache(sinks: int, window: int, first: int = len(PROMPT)) -> Change:
    """Unrotate every query and key, and rotate them again, row by row, by their index among what the row sees.

    Rows before the first one see everything.
    """
    def change(q, k, scores, scaling):
        changed = scores.clone()
        for row in range(first, q.shape[1]):
            seen = [p for p in range(row + 1) if p < sinks or row - p < window]
            places = torch.arange(len(seen))
            query, keys = (
                rotated(q[:, row : row + 1], torch.tensor([len(seen) - 1 - row])),
                rotated(k[:, seen], places - torch.tensor(seen)),
            )
            changed[:, row] = float("-inf")
            changed[:, row, seen] = (query * keys).sum(-1) * scaling
        return changed
    return change


@cache
def theta() -> float:
    return network("llama").config.rope_parameters["rope_theta"]


def rotated(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rows [heads, n, d] rotated by so many positions [n]; the components of a pair are half a row apart."""
    half = rows.shape[-1] // 2
    angles = by[:, None] * theta() ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(rows[..., :half], rows[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


class TurnedTheOtherWay(SinkWindow):
    def gap_width(self, query_positions):
        return -super().gap_width(query_positions)


class OneTooFew(SinkWindow):
    def gap_width(self, query_positions):
        return (super().gap_width(query_positions) - 1).clamp(min=0)


class EverythingIsFar(SinkWindow):
    def before_gap(self, key_positions):
        return key_positions >= 0


@pytest.mark.oracle("sink_window")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("sinks, window", [(2, 5), (4, 1), (0, 6), (4, 40)])
def test_renumbered_positions_are_indices_in_the_cache(architecture, sinks, window):
    ours = course(alone(make("sink_window", sinks=sinks, window=window, positions="renumbered")), models(architecture))
    true = course(alone(make("sink_window", sinks=sinks, window=window)), models(architecture))
    assert ours[0] == written_out(architecture, numbered_by_the_cache(sinks, window))
    assert ours[1] == true[1]
    assert (ours[0] == true[0]) == (sinks == 0 or sinks + window > len(PROMPT) + LENGTH)


@pytest.mark.refuses("sink_window")
@pytest.mark.parametrize("wrong", [TurnedTheOtherWay, OneTooFew, EverythingIsFar], ids=lambda cls: cls.__name__)
def test_a_wrong_renumbering_is_detected(wrong):
    assert course(alone(wrong(sinks=2, window=5, positions="renumbered")), models())[0] != written_out(
        "llama", numbered_by_the_cache(2, 5)
    )


# --- a prompt that is read within the window ---

def within_the_window(sinks: int, window: int) -> Change:
    """Every row, those of the prompt included, sees the sinks and the last tokens."""
    def change(q, k, scores, scaling):
        place = torch.arange(q.shape[1])
        return scores.masked_fill((place >= sinks) & (place[:, None] - place >= window), float("-inf"))
    return change


CHUNKS = [(2, 5, 3), (0, 6, 1), (4, 1, 64)]  # sinks, window, chunk


def check_windowed_prefill(policy: type[SinkWindow]) -> None:
    for sinks, window, chunk in CHUNKS:
        knobs = {"sinks": sinks, "window": window, "prefill": "windowed", "chunk": chunk}
        assert course(alone(policy(**knobs)), models())[0] == written_out("llama", within_the_window(sinks, window))
        assert course(alone(policy(**knobs, positions="renumbered")), models())[0] == written_out(
            "llama", numbered_by_the_cache(sinks, window, first=0)
        )


class ForgetsBeforeEveryChunk(SinkWindow):
    """The first rows of a chunk see less: what the last row of the chunk does not see is gone."""

    def visible(self, query_positions, key_positions):
        last = query_positions // self.chunk * self.chunk + self.chunk - 1 if self.restricts_prompt else query_positions
        return (key_positions < self.sinks) | (last - key_positions < self.window)


class SeesTheWholePrompt(SinkWindow):
    restricts_prompt = False


@pytest.mark.slow
@pytest.mark.oracle("sink_window")
def test_a_windowed_prompt_is_read_as_if_every_row_had_the_mask():
    check_windowed_prefill(SinkWindow)


@pytest.mark.refuses("sink_window")
@pytest.mark.parametrize("wrong", [ForgetsBeforeEveryChunk, SeesTheWholePrompt], ids=lambda cls: cls.__name__)
def test_a_wrong_windowed_prefill_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_windowed_prefill(wrong)


@pytest.mark.strategy("sink_window")
def test_a_windowed_prompt_never_holds_more_than_the_budget_and_a_chunk(monkeypatch):
    policy, most = make("sink_window", sinks=2, window=5, prefill="windowed", chunk=4), []

    def visible(query_positions, key_positions):
        most.append(len(key_positions))
        return SinkWindow.visible(policy, query_positions, key_positions)

    monkeypatch.setattr(policy, "visible", visible)
    course(alone(policy), models())
    assert len(PROMPT) > 2 + 5 + 4 >= max(most)


def test_no_renumbered_distance_exceeds_the_cache_length():
    policy = make("sink_window", sinks=3, window=7, positions="renumbered")
    for query in range(200):
        at = torch.tensor([query])
        seen = policy.visible(at[:, None], torch.arange(query + 1))[0].nonzero().flatten()
        distances = query - seen - policy.gap_width(at) * policy.before_gap(seen)
        assert distances.sort(descending=True).values.tolist() == list(range(min(query + 1, 10)))[::-1]


def test_rotating_queries_back_moves_them_to_an_earlier_position():
    model = pair("llama").target
    rows = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    back = torch.tensor([0, 1, 7, 30, 100])
    # the model's table of angles is in float32
    assert torch.allclose(model.rotate_back(rows, back), rotated(rows, -back), atol=1e-5)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_positions_that_cannot_be_renumbered_are_refused_in_one_sentence(architecture):
    with pytest.raises(Refusal, match="switch renumbering off") as refusal:
        course(alone(make("sink_window", positions="renumbered")), models(architecture))
    assert str(refusal.value).count(".") == 1
