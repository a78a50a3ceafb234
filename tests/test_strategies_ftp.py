"""FTP: tokens of the prompt pass the blocks that do not need them, and leave nothing in their caches."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import figures, run

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.events import Note
from playground.training.calibration import CalibrationTexts
from support.compute_runs import deep, deep_network, policy_lane
from support.policy_fits import finished, fitted_lane, training_texts

FTP = find("ftp")
BRIEF = {"ftp": {"recent": 1}}
COLLAPSES = {
    "ftp": [
        Collapse(policy_lane("ftp", r=0.0), LaneConfig("greedy")),
        Collapse(policy_lane("ftp", recent=64), LaneConfig("greedy")),
        Collapse(policy_lane("ftp", "sample", r=0.0), LaneConfig("sample")),
    ],
}
LAYERS, RECENT = 6, 2
PROMPT = [5, 9, 2, 7, 7, 1, 30, 31, 12, 4, 8, 15, 40, 3]
TRAINING = FTP.calibrate.__func__.__globals__["train_ftp"].__globals__
SHARES = [0.0, 0.2, 0.5, 0.5, 0.3, 0.0]


def weights_at_random(seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (64, 4), "0.bias": (64,), "2.weight": (1, 64), "2.bias": (1,)}
    router = {f"router.{name}": torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    schedules = {f"schedule.{rate}": torch.tensor(SHARES) for rate in (0.1, 0.2, 0.3)}
    return router | schedules


def shares_for(mean: float) -> list[float]:
    return [share * mean * LAYERS / sum(SHARES) for share in SHARES]


def kept_by_hand(received: list[float], share: float, weights: dict | None) -> list[int]:
    """The tokens with the highest scores, in plain Python; the first and the last ones first of all."""
    count = len(received)
    scores = list(received)
    if weights is not None:
        mean, order = sum(received) / count, sorted(range(count), key=received.__getitem__)
        for token in range(count):
            given = torch.tensor([token / (count - 1), min(10.0, received[token] / mean),
                                  order.index(token) / (count - 1), share])
            hidden = (weights["router.0.weight"] @ given + weights["router.0.bias"]).clamp(min=0)
            scores[token] = float(weights["router.2.weight"][0] @ hidden + weights["router.2.bias"][0])
    always = {0, *range(count - RECENT, count)}
    ranked = sorted(range(count), key=lambda token: (token not in always, -scores[token]))
    return sorted(always | set(ranked[:round((1 - share) * count)]))


@torch.no_grad()
def by_hand(ids: list[int], mean: float, weights: dict | None, kept: dict[int, list[int]] | None = None):
    """Logits after the last token, and the prompt tokens of every block.

    The library's own layers, each on the states of its tokens with their true positions; generated tokens run in all.
    """
    network = deep_network()
    network.set_attn_implementation("eager")
    inner, prompt, received, chosen = network.model, len(PROMPT), None, {}
    x, schedule = inner.embed_tokens(torch.tensor([ids])), shares_for(mean)
    for number, layer in enumerate(inner.layers):
        if kept is not None:
            rows = kept[number]
        elif received is None or not schedule[number]:
            rows = list(range(prompt))
        else:
            rows = kept_by_hand(received, schedule[number], weights)
        chosen[number] = rows
        rows = rows + list(range(prompt, len(ids)))
        places = torch.tensor([rows])
        mask = torch.full((len(rows), len(rows)), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        angles = inner.rotary_emb(x, places)
        given = layer.input_layernorm(x[:, rows])
        _, attention = layer.self_attn(given, position_embeddings=angles, attention_mask=mask)
        if kept is None:
            received = received or [0.0] * prompt
            for place, token in enumerate(rows):
                received[token] = float(attention[0, :, place:, place].mean())
        x = x.clone()
        x[:, rows] = layer(x[:, rows], attention_mask=mask, position_ids=places, position_embeddings=angles)
    return network.lm_head(inner.norm(x))[0, -1], chosen


def text_by_hand(mean: float, weights: dict | None, length: int) -> tuple[list[int], dict]:
    logits, kept = by_hand(PROMPT, mean, weights)
    ids = [*PROMPT, int(logits.argmax())]
    while len(ids) < len(PROMPT) + length:
        ids.append(int(by_hand(ids, mean, weights, kept)[0].argmax()))
    return ids, kept


class KeepsTheLeast(FTP):
    """Keeps the tokens that receive least attention."""

    def choose(self, layer, received, tokens):
        return super().choose(layer, None if received is None else received.max() - received, tokens)


class SumsAttention(FTP):
    """Takes the whole attention received, of which early tokens have more, because more queries see them."""

    def choose(self, layer, received, tokens):
        scaled = None if received is None else received * torch.arange(len(received), 0, -1)
        return super().choose(layer, scaled, tokens)


def lane_of(cls, monkeypatch, router: str, mean: float, length: int = 8):
    monkeypatch.setattr("support.policy_fits.PROMPT", PROMPT)
    return fitted_lane(cls(r=mean, router=router, recent=RECENT), weights_at_random(), monkeypatch, length)


def agrees(cls, monkeypatch, router: str, mean: float) -> bool:
    lane, events = lane_of(cls, monkeypatch, router, mean)
    expected, kept = text_by_hand(mean, weights_at_random() if router == "trained" else None, 8)
    ran = figures(events, "prompt tokens that each block ran")[0]["values"]
    same = [[token for token, runs in enumerate(row) if runs] for row in ran] == list(kept.values())
    return same and lane.tokens == expected


@pytest.mark.oracle("ftp")
@pytest.mark.parametrize("router, mean", [("static", 0.25), ("trained", 0.25), ("trained", 0.4)])
def test_the_text_is_that_of_blocks_that_read_only_their_tokens(router, mean, monkeypatch):
    assert agrees(FTP, monkeypatch, router, mean)


@pytest.mark.refuses("ftp")
@pytest.mark.parametrize("cls", [KeepsTheLeast, SumsAttention])
def test_those_blocks_refuse_another_order_of_the_tokens(cls, monkeypatch):
    assert not all(agrees(cls, monkeypatch, router, 0.4) for router in ("static", "trained"))


def test_a_block_holds_the_tokens_it_ran_and_no_others(monkeypatch):
    lane, events = lane_of(FTP, monkeypatch, "static", 0.4)
    ran = [sum(row) for row in figures(events, "prompt tokens that each block ran")[0]["values"]]
    held = [lane.target.store.slots_of(layer).live for layer in range(LAYERS)]
    later = lane.target.store.length - len(PROMPT)
    assert held == [count + later for count in ran] and min(ran) < len(PROMPT)
    assert [round((1 - share) * len(PROMPT)) for share in shares_for(0.4)] == ran


@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup"])
def test_drafts_of_a_pruned_prompt_are_verified_as_if_they_were_alone(drafter):
    from pairs import pair
    models = {"target": pair().target, "draft": pair().draft}
    prompt = PROMPT + PROMPT
    knobs = ("ftp", {"r": 0.3, "recent": 1})
    plain, _ = run(LaneConfig("greedy", {}, [knobs]), models, prompt, 12)
    drafted, _ = run(LaneConfig("speculative", {}, [(drafter, {}), ("greedy_match", {}), knobs]), models, prompt, 12)
    whole, _ = run(LaneConfig("greedy"), models, prompt, 12)
    assert drafted.tokens == plain.tokens != whole.tokens


def test_schedules_keep_their_mean_under_mutation_and_crossing():
    from random import Random
    chance = Random(0)
    one, other = (TRAINING["random_schedule"](8, 0.3, chance) for _ in range(2))
    for shares in (one, other, TRAINING["crossed"](one, other, 0.3, chance), TRAINING["moved"](one, chance)):
        assert shares[0] == 0 and max(shares) <= 0.9 + 1e-9 and min(shares) >= 0
        assert sum(shares) / 8 == pytest.approx(0.3, abs=0.01)


def test_the_search_finds_a_block_that_may_skip_for_free():
    def fitness(shares: list[float]) -> float:
        return sum(share for block, share in enumerate(shares) if block != 5)

    best, seen = finished(TRAINING["search"](fitness, 8, 0.1, 0))
    assert best[5] == max(best) and len(seen) == TRAINING["GENERATIONS"]


def test_training_finds_schedules_and_a_router(monkeypatch):
    monkeypatch.setitem(TRAINING, "GENERATIONS", 1)
    monkeypatch.setitem(TRAINING, "POPULATION", 5)
    monkeypatch.setitem(TRAINING, "RATES", (0.2,))
    weights, seen = finished(FTP.calibrate(CalibrationTexts(deep(), training_texts(), 0), 0))
    assert float(weights["schedule.0.2"].mean()) == pytest.approx(0.2, abs=0.01)
    assert weights["router.0.weight"].shape == (64, 4) and any(isinstance(event, Note) for event in seen)


def test_without_a_fit_it_says_so():
    _, events = run(policy_lane("ftp"), {"target": deep()}, PROMPT, 4)
    assert next(event.text for event in events if isinstance(event, Note)).startswith("No schedule for this model")
