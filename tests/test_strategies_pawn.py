"""PAWN's numbers against brute force, its sum against loops over tokens and gates, and a training that learns."""
from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from pairs import pair

from playground.contract import find
from playground.engine.forward_input import ForwardInput
from playground.events import Note
from playground.training.calibration import CalibrationTexts
from support.overlay_runs import named, read_by, shades

Pawn = find("pawn")
TOKENS, START, WIDTH = [70, 71, 72, 70, 71, 90, 33, 70, 71, 72], 4, 6


def detector():
    from strategies.overlays.pawn import detector as module
    return module


# --- the metrics ---

def by_hand(logits: list[float], token: int) -> list[float]:
    total = math.log(sum(math.exp(value) for value in logits))
    logp = [value - total for value in logits]
    likelier = [other for other in range(len(logits)) if logp[other] >= logp[token]]
    return [
        -sum(math.exp(value) * value for value in logp), max(logp), logp[token], len(likelier) / len(logp),
        sum(math.exp(logp[other]) for other in likelier),
    ]


def check_metrics(metrics_of) -> None:
    logits = 2 * torch.randn(5, 7, generator=torch.Generator().manual_seed(2)).double()
    logits[4] = 0.0  # all alike
    tokens = torch.tensor([int(logits[0].argmax()), int(logits[1].argmin()), 3, 6, 2])
    found = metrics_of(logits, tokens)
    assert found.tolist() == [pytest.approx(by_hand(row, token), abs=1e-12)
                              for row, token in zip(logits.tolist(), tokens.tolist())]
    assert found[0, 3] == pytest.approx(1 / 7) and found[0, 4] == pytest.approx(found[0, 1].exp())
    assert found[1, 3:].tolist() == pytest.approx([1, 1]) == found[4, 3:].tolist()
    assert found[4, 0] == pytest.approx(math.log(7))


def rank_of_the_likelier(logits, tokens):
    """Wrong: the token itself does not count."""
    found = detector().metrics_of(logits, tokens).clone()
    found[:, 3] -= 1 / logits.shape[1]
    return found


@pytest.mark.oracle("pawn")
def test_metrics_are_those_of_brute_force():
    check_metrics(detector().metrics_of)


@pytest.mark.refuses("pawn")
def test_a_rank_without_the_token_itself_fails():
    with pytest.raises(AssertionError):
        check_metrics(rank_of_the_likelier)


# --- the network ---

@cache
def weights() -> dict[str, torch.Tensor]:
    metrics = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).double()
    return {name: tensor.double() for name, tensor in detector().untrained(WIDTH, metrics, 3).items()}


def evidence(length: int = 9):
    chance = torch.Generator().manual_seed(5)
    metrics = torch.randn(length, 5, generator=chance).double()
    return detector().evidence_of(metrics, torch.randn(length + 1, WIDTH, generator=chance).double())


def layers(values: torch.Tensor, name: str) -> torch.Tensor:
    for number in range(3):
        values = weights()[f"{name}.{number}.weight"] @ values + weights()[f"{name}.{number}.bias"]
        values = values * 0.5 * (1 + torch.erf(values / math.sqrt(2))) if number < 2 else values
    return values


def by_loops(found) -> float:
    """The logit, token by token and gate by gate."""
    features = [layers((row - weights()["mean"]) / weights()["spread"], "features") for row in found.metrics]
    gates = [layers(row, "gates").exp() for row in found.states]
    pooled = []
    for feature in range(len(features[0])):
        gate = feature * len(gates[0]) // len(features[0])
        total = sum(row[gate] for row in gates)
        pooled.append(sum(row[gate] / total * values[feature] for row, values in zip(gates, features)))
    return float(layers(torch.stack(pooled), "verdict"))


def check_sum(judge) -> None:
    found = evidence()
    assert float(judge(weights(), found).logit) == pytest.approx(by_loops(found), abs=1e-10)


def over_gates(weights_, found):
    """Wrong: the gates of a token share, not the tokens of a gate."""
    features, gates = detector().features_and_gates(weights_, found)
    pooled = (detector().spread_gates(gates.softmax(-1)) * features).sum(0)
    return detector().TextScore(layers(pooled, "verdict"), gates.softmax(-1))


def mean_pooling(weights_, found):
    """Wrong: every token weighs the same."""
    features, gates = detector().features_and_gates(weights_, found)
    return detector().TextScore(layers(features.mean(0), "verdict"), gates)


@pytest.mark.oracle("pawn")
def test_the_score_is_the_sum_over_tokens_written_out():
    check_sum(detector().judge)


@pytest.mark.refuses("pawn")
@pytest.mark.parametrize("wrong", [over_gates, mean_pooling])
def test_a_softmax_over_gates_or_no_weights_fails(wrong):
    with pytest.raises(AssertionError):
        check_sum(wrong)


@pytest.mark.strategy("pawn")
def test_the_score_after_each_token_is_that_of_the_text_so_far():
    found = evidence(40)
    prefixes = [detector().ScoredTokens(*(part[:end] for part in found)) for end in range(1, 41)]
    whole = [float(detector().judge(weights(), prefix).logit) for prefix in prefixes]
    assert detector().running(weights(), found).tolist() == pytest.approx(whole, abs=1e-10)
    loud = {**weights(), "gates.2.weight": 300 * weights()["gates.2.weight"]}  # exp of these overflows
    whole = [float(detector().judge(loud, prefix).logit) for prefix in prefixes]
    assert detector().running(loud, found).tolist() == pytest.approx(whole, abs=1e-9)


@pytest.mark.strategy("pawn")
def test_order_does_not_matter_and_tokens_that_are_not_seen_change_nothing():
    found, chance = evidence(), torch.Generator().manual_seed(0)
    order = torch.randperm(9, generator=chance)
    score = float(detector().judge(weights(), found).logit)
    mixed = detector().ScoredTokens(*(part[order] for part in found))
    assert float(detector().judge(weights(), mixed).logit) == pytest.approx(score, abs=1e-12)
    padded = detector().ScoredTokens(*(torch.cat([part, 50 + part[:3]]) for part in found))
    seen = torch.arange(12) < 9
    verdict = detector().judge(weights(), padded, seen)
    assert float(verdict.logit) == pytest.approx(score, abs=1e-12) and not verdict.shares[9:].any()
    constant = {name: torch.zeros_like(tensor) if name.startswith("gates") else tensor
                for name, tensor in weights().items()}
    assert detector().judge(constant, found).shares.flatten().tolist() == pytest.approx([1 / 9] * 9 * 8)


@pytest.mark.strategy("pawn")
def test_area_counts_pairs_and_half_of_the_ties():
    assert detector().area([3.0, 2.0], [1.0, 2.0]) == 3.5 / 4
    assert detector().area([1.0], [1.0, 2.0, 0.0, 1.0]) == 0.5


# --- over a text ---

def fitted(width: int) -> dict[str, torch.Tensor]:
    metrics = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).double()
    return {name: 3 * tensor if name.startswith("gates") else tensor
            for name, tensor in detector().untrained(width, metrics, 4).items()}


@pytest.mark.strategy("pawn")
@pytest.mark.parametrize("size", [128, 3])
def test_a_text_is_weighed_by_the_states_around_its_tokens_however_it_is_read(monkeypatch, size):
    from playground.decoding import overlay_reading
    monkeypatch.setattr(overlay_reading, "PIECE", size)
    model = pair().target
    overlay = Pawn()
    overlay.begin_fitted(fitted(model.embed([0]).shape[1]))
    events = read_by(overlay, model, TOKENS, START)
    work = ForwardInput(model.new_store(), TOKENS, list(range(-1, len(TOKENS) - 1)))
    from playground.engine.hooks import LayerPlan
    (logits,), states = model.forward([work], LayerPlan(capture=frozenset({model.depth})))
    own = detector().metrics_of(logits[START - 1:-1], torch.tensor(TOKENS[START:]))
    inputs = model.normed(states[model.depth])[START - 1:].float()
    verdict = detector().judge(overlay._weights, detector().evidence_of(own, inputs))
    relative = verdict.shares.mean(1) * len(own)
    assert shades(events) == pytest.approx((relative / (1 + relative)).tolist(), abs=2e-4)
    (note,) = [event.text for event in events if isinstance(event, Note)]
    assert f"{float(verdict.logit.sigmoid()):.2f}" in note and "not evidence" in note
    plain = dict(zip(*(named(events, "scores without")[part] for part in ("labels", "values"))))
    assert plain["mean log-probability"] == pytest.approx(float(own[:, 2].mean()), abs=1e-4)
    logp = logits[START - 1:-1].log_softmax(1)
    ranks = [sum(row[other] >= row[token] for other in range(len(row))) for row, token in zip(logp, TOKENS[START:])]
    assert plain["mean log-rank"] == pytest.approx(sum(map(math.log, ranks)) / len(ranks), abs=1e-4)
    variance = sum(float(row.exp() @ (row - row.exp() @ row).square()) for row in logp)
    surplus = float((own[:, 2] + own[:, 0]).sum())
    assert plain["standardised"] == pytest.approx(surplus / math.sqrt(variance), abs=1e-3)


@pytest.mark.strategy("pawn")
def test_without_a_fit_no_score_is_shown():
    events = read_by(Pawn(), pair().target, TOKENS, START)
    assert len(shades(events)) == len(TOKENS) - START
    (note,) = [event.text for event in events if isinstance(event, Note)]
    assert "fit pawn" in note


# --- the training ---

@pytest.mark.strategy("pawn")
def test_training_tells_sampled_texts_from_others_and_is_repeatable(monkeypatch):
    from strategies.overlays import pawn
    monkeypatch.setattr(pawn, "DESCENT", pawn.Descent("loss", 25, 5e-3, clip=1.0))
    monkeypatch.setattr(pawn, "LENGTH", 16)
    monkeypatch.setattr(pawn, "OPENING", 4)
    chance = torch.Generator().manual_seed(7)
    texts = torch.randint(3, 319, (10, 40), generator=chance).tolist()  # unlikely tokens, "human" here

    def run() -> tuple[dict, list[str]]:
        steps, notes = Pawn.calibrate(CalibrationTexts(pair(dtype=torch.float32).target, texts), 0), []
        while True:
            try:
                notes.append(next(steps))
            except StopIteration as end:
                return end.value, [note.text for note in notes if isinstance(note, Note)]

    (first, notes), (second, _) = run(), run()
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
    assert len(notes) == 4 and all("t = " in note or ": 1.000;" in note for note in notes)
    overlay = Pawn()
    overlay.begin_fitted(first)
    assert shades(read_by(overlay, pair(dtype=torch.float32).target, TOKENS, START))


@pytest.mark.strategy("pawn")
def test_the_rules_of_sampling_keep_what_they_say():
    from strategies.overlays.pawn import sampled
    logits = torch.tensor([0.60, 0.25, 0.08, 0.07]).log()
    draws = {rule: [sampled(logits, rule, torch.Generator().manual_seed(at)) for at in range(300)]
             for rule in ("argmax", "t = 0.7", "t = 1", "top-p 0.9")}
    assert set(draws["argmax"]) == {0} and set(draws["top-p 0.9"]) == {0, 1, 2} and set(draws["t = 1"]) == {0, 1, 2, 3}
    assert draws["t = 0.7"].count(0) > draws["t = 1"].count(0)
