"""The distance of a lane's weights to the loaded ones, against the transformers library in plain loops."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pairs import network, pair

import playground
from playground.contract import OverlaidText, find
from playground.contract.lane_config import LaneConfig
from playground.decoding import overlay_reading
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.events import Commit, Figure, Forward, Note, Step
from playground.trace import check as inconsistencies
from playground.ui.play.gallery import examples
from support.overlay_runs import read_by, shades
from support.wrong_variants import refused

WeightsKL = find("weights_kl")
TOKENS = [70, 71, 72, 70, 71, 90, 70, 71, 72, 91, 70]
START = 4
AWAY, BACK = "KL(loaded || lane)", "KL(lane || loaded)"


def distributions(model, tokens: list[int]) -> list[list[float]]:
    """After each token, by a network of the transformers library with the same weights."""
    plain = network("llama").double()
    plain.load_state_dict(model.network.state_dict())
    with torch.no_grad():
        return plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].softmax(-1).tolist()


def by_hand(p: list[float], q: list[float]) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q))


def curve(events, series: str) -> list[float]:
    return [event.data["series"][series] for event in events
            if isinstance(event, Figure) and series in event.data.get("series", {})]


def check(cls: type[WeightsKL]) -> None:
    loaded, own = pair().target, pair().draft
    events = read_by(cls(), own, TOKENS, START, loaded)
    rows = range(START - 1, len(TOKENS) - 1)  # those that predict the generated tokens
    before, after = ([distributions(model, TOKENS)[at] for at in rows] for model in (loaded, own))
    away, back = [*map(by_hand, before, after)], [*map(by_hand, after, before)]
    assert curve(events, AWAY) == pytest.approx(away, abs=1e-4) and min(away) > 0.001
    assert curve(events, BACK) == pytest.approx(back, abs=1e-4)
    assert shades(events) == pytest.approx([min(1, kl) for kl in away], abs=1e-4)
    entropies = [-sum(p * math.log(p) for p in row) for row in before]
    assert curve(events, "loaded entropy, nats") == pytest.approx(entropies, abs=1e-4)
    (note,) = [event.text for event in events if isinstance(event, Note)]
    others = sum(p.index(max(p)) != q.index(max(q)) for p, q in zip(before, after))
    assert f"{sum(away) / len(away):.4f} nats on average over 7 tokens" in note
    assert f"most at token {away.index(max(away)) + 1} " in note and f"At {others} of them" in note


class TheOtherWay(WeightsKL):
    """Wrong: expectations under the lane's weights."""

    def read_both(self, first, logits, loaded):
        super().read_both(first, loaded, logits)


class OfTheTokenRead(WeightsKL):
    """Wrong: the row that read a token, not the one that predicted it."""

    def begin(self, text, model):
        super().begin(OverlaidText(text.tokens, text.start + 1, text.piece), model)


class OfTheCandidates(WeightsKL):
    """Wrong: over a few candidates that a trace records, normalised, as if they were all tokens."""

    def read_both(self, first, logits, loaded):
        few = loaded.topk(10, 1).indices
        super().read_both(first, *(torch.full_like(rows, -math.inf).scatter(1, few, rows.gather(1, few))
                                   for rows in (logits, loaded)))


@pytest.mark.oracle("weights_kl")
def test_divergences_and_entropies_are_those_of_the_library_over_all_tokens():
    check(WeightsKL)


@pytest.mark.refuses("weights_kl")
@pytest.mark.parametrize("wrong", [TheOtherWay, OfTheTokenRead, OfTheCandidates])
def test_wrong_distances_are_noticed(wrong):
    refused(check, wrong)


def test_pieces_of_a_long_text_are_read_by_both(monkeypatch):
    given = pair().draft, TOKENS, START, pair().target
    whole = curve(read_by(WeightsKL(), *given), AWAY)
    monkeypatch.setattr(overlay_reading, "_piece_size", lambda model, length: 3)
    assert curve(read_by(WeightsKL(), *given), AWAY) == pytest.approx(whole, abs=1e-4)


# --- in lanes ---

def run(*lanes: LaneConfig) -> Session:
    """Beside lanes with the loaded weights, some with those of another random model."""
    own = replace(pair(), quantized={"int8": pair().draft})
    session = prepare(own, list(lanes), Prompt("Once upon"), Limits(0, 24))
    while not session.finished:
        session.step()
    return session


def events_of(session: Session, lane: int) -> list:
    return [stamped.event for stamped in session.trace.events if stamped.lane == lane]


@pytest.fixture(scope="module")
def session() -> Session:
    return run(LaneConfig(), LaneConfig(weights="int8", extras=[("weights_kl", {})]),
               LaneConfig(extras=[("weights_kl", {})]))


def test_a_lane_with_the_loaded_weights_has_no_distance_and_pays_for_one_reading(session):
    events = events_of(session, 2)
    assert set(curve(events, AWAY)) == set(curve(events, BACK)) == {0} and len(curve(events, AWAY)) == 24
    assert "0 at every token" in " ".join(event.text for event in events if isinstance(event, Note))
    assert [event.stream for event in events if isinstance(event, Forward)].count("overlay") == 1


def test_other_weights_are_compared_along_the_whole_text_in_two_readings(session):
    events = events_of(session, 1)
    assert len(curve(events, AWAY)) == 24 and min(curve(events, AWAY)) > 0 and not inconsistencies(session.trace)
    assert [event.stream for event in events if isinstance(event, Forward)].count("overlay") == 2


def test_up_to_the_first_difference_the_loaded_entropy_is_that_of_the_plain_lane(session):
    """The one place where two lanes can be compared: behind it they have read different texts."""
    texts = [[token for event in events_of(session, lane) if isinstance(event, Commit) for token in event.ids]
             for lane in (0, 1)]
    first = next(at for at, (plain, own) in enumerate(zip(*texts)) if plain != own)
    plain = [event.entropy for event in events_of(session, 0) if isinstance(event, Step)]
    loaded = curve(events_of(session, 1), "loaded entropy, nats")
    assert loaded[:first + 1] == pytest.approx(plain[:first + 1], abs=1e-4)
    assert loaded[first + 1:] != pytest.approx(plain[first + 1:], abs=1e-2)


def test_the_text_of_the_lane_is_that_without_the_overlay(session):
    alone = run(LaneConfig(weights="int8"))
    assert [event for event in events_of(alone, 0) if isinstance(event, Commit)] == [
        event for event in events_of(session, 1) if isinstance(event, Commit)]


@pytest.mark.slow
def test_the_example_leaves_at_a_near_tie_and_is_farthest_from_the_loaded_weights_much_later():
    example = next(each for each in examples() if each["title"] == "What three bits change")
    plain, own = playground.compare(example["lanes"], example["prompt"], chat=True, max_new_tokens=example["length"],
                                    models=playground.load(None, playground.NO_DRAFT))
    distances = curve([stamped.event for stamped in own.trace.events], AWAY)
    first = next(at for at, (one, other) in enumerate(zip(plain.token_ids, own.token_ids)) if one != other)
    step = next(stamped.event for stamped in plain.trace.events
                if isinstance(stamped.event, Step) and stamped.event.position == first)
    best, second = (candidate.raw for candidate in step.top[:2])
    assert best < 1.5 * second and distances[first] < 0.1
    assert distances.index(max(distances)) > first + 15 and max(distances) > 5 * distances[first]
