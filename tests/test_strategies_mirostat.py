"""Mirostat: the surprisal of a text is controlled to a target, compared with an independent computation."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from registry import Collapse
from runs import QUESTION, alone, figures, random_rows, recorded, rows, run, same, series, written
from tables import TableModel
from torch import Tensor

from playground.contract import Decoder, Sampler, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.events import Figure, Note
from strategies.sampling.mirostat import zipf_exponent, zipf_size
from support.repeating_texts import REMOVED, made
from support.wrong_variants import refused

GREEDY, MODEL = LaneConfig("greedy"), LaneConfig("greedy", {}, [("temperature", {"t": 1.0})])
LN2 = math.log(2)


COLLAPSES = {
    "mirostat": [Collapse(alone("mirostat", tau=0.0, version=version, surprise=surprise), GREEDY)
                 for version in "12" for surprise in ("full", "renormalised")],
}


# --- Mirostat: rows by hand ---

def mirostat(mu: float, **knobs):
    """The sampler with a given truncation."""
    made = make("mirostat", **knobs)
    made.mu = mu
    return made


def left(sampler, scores: Tensor) -> list[int]:
    return (sampler.apply(scores, [[]])[0] > -math.inf).nonzero().flatten().tolist()


def test_the_threshold_is_in_bits():
    scores = rows(0.8, 0.2).log()
    assert left(mirostat(2.0), scores) == [0]  # ln 5 = 1.61 would stay, log2 5 = 2.32 does not
    assert left(mirostat(2.33), scores) == [0, 1]


def test_if_all_tokens_exceed_the_threshold_the_most_probable_stays():
    for version in "12":
        assert left(mirostat(-3.0, version=version), rows(1.0, 1.1, 1.0)) == [1]


def test_version_two_keeps_what_is_more_probable_than_a_fixed_floor():
    scores = random_rows(8)
    p = scores.softmax(-1)
    for mu in (1.5, 4.0, 9.0):
        floor = torch.where((p >= 2 ** -mu) | (p == p.amax(-1, keepdim=True)), scores, -math.inf)
        assert torch.equal(mirostat(mu).apply(scores, [[]] * len(scores)), floor)


def zipf(s: float, count: int) -> Tensor:
    return -s * torch.arange(1, count + 1, dtype=torch.float64).log()[None]


@pytest.mark.parametrize("s", [0.8, 1.0, 1.1, 1.5])
def test_the_exponent_of_a_zipf_law_is_found(s):
    shuffled = zipf(s, 2000)[:, torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    assert float(zipf_exponent(shuffled, 100)) == pytest.approx(s, abs=1e-9)


@pytest.mark.parametrize("s, mu, size, cut", [(1.1, 8, 27.8, 25), (1.5, 10, 64.2, 53), (0.8, 10, 60.4, 59)])
def test_version_ones_k_is_slightly_above_the_number_version_two_retains(s, mu, size, cut):
    scores = zipf(s, 50_000)
    assert float(zipf_size(scores, mu, 100)) == round(size)
    assert len(left(mirostat(mu), scores)) == cut
    assert len(left(mirostat(mu, version="1"), scores)) == round(size)


def test_k_is_continuous_at_exponent_one():
    sizes = [float(zipf_size(zipf(1 + off, 2000), 9.0, 100)) for off in (-1e-4, -1e-9, 0.0, 1e-9, 1e-4)]
    by_hand = 2 ** 9 / math.log(2000)
    assert sizes == [round(by_hand)] * 5


@pytest.mark.parametrize(
    "scores", [rows(0, 0, 0, 0), rows(5, -math.inf, -math.inf), rows(1, 0.5, -math.inf), rows(900, 0, -900)], ids=str
)
@pytest.mark.parametrize("mu", [-5.0, 0.0, 3.0, 1e4, math.inf])
def test_version_one_accepts_any_row_and_never_restores_removed_tokens(scores, mu):
    kept = left(mirostat(mu, version="1"), scores)
    assert int(scores.argmax()) in kept and set(kept) <= set((scores[0] > -math.inf).nonzero().flatten().tolist())
    assert mu < 1e3 or kept == (scores[0] > -math.inf).nonzero().flatten().tolist()


def test_worked_example_a_token_changes_mu_by_eta_times_its_error():
    scores, sampler = rows(0.5, 0.25, 0.25).log()[0], mirostat(1.5, tau=3.0, eta=0.1)
    list(sampler.observe({"target": scores}, 1, 0))
    assert sampler.mu == pytest.approx(1.5 - 0.1 * (2 - 3))
    renormalised = mirostat(1.5, tau=3.0, eta=0.1, surprise="renormalised")
    list(renormalised.observe({"target": scores}, 0, 0))  # it is the only one left, so its surprise is 0
    assert renormalised.mu == pytest.approx(1.5 + 0.1 * 3)


# --- whole texts ---

def surprises(model: TableModel, prompt: list[int], new: list[int], t: float = 1.0) -> list[float]:
    """Bits of every token under the whole distribution, read off the table."""
    return [-float((model.scores((*prompt, *new[:i])) / t).log_softmax(-1)[token]) / LN2 for i, token in enumerate(new)]


def drift(lane: Lane, knobs: dict) -> float:
    """What the errors of a run must add up to: the change of mu, over eta."""
    sampler = next(sampler for sampler in lane.chain.samplers if sampler.name == "mirostat")
    return (2 * knobs["tau"] - sampler.mu) / knobs["eta"]


@pytest.mark.oracle("mirostat")
@pytest.mark.parametrize("version", "12")
@pytest.mark.parametrize("eta", [0.1, 1.0])
def test_errors_sum_to_the_change_of_mu(version, eta):
    knobs, model = {"tau": 1.5, "eta": eta, "version": version}, TableModel("abcdefgh")
    for extra, t in ([], 1.0), ([("temperature", {"t": 2.0})], 2.0):
        lane, events = run(LaneConfig("greedy", {}, [("mirostat", knobs), *extra]), {"target": model}, [0, 1], 40)
        bits = surprises(model, [0, 1], lane.main.written, t)
        assert sum(bits) - 40 * 1.5 == pytest.approx(drift(lane, knobs), abs=1e-9)
        assert same(series(events, "surprise", "surprise, bits"), bits)
        assert [data["x"] for data in figures(events, "surprise")] == list(range(40))


@pytest.mark.refuses("mirostat")
def test_errors_do_not_sum_for_other_definitions_of_surprise():
    knobs, model = {"tau": 1.5, "eta": 0.5}, TableModel("abcdefgh")
    lane, _ = run(alone("mirostat", **knobs, surprise="renormalised"), {"target": model}, [0, 1], 40)
    bits = surprises(model, [0, 1], lane.main.written)
    assert abs(sum(bits) - 60 - drift(lane, knobs)) > 1  # surprise is lower under a truncated distribution
    lane, _ = run(alone("mirostat", **knobs), {"target": model}, [0, 1], 40)
    bits = surprises(model, [0, 1], lane.main.written)
    assert abs(sum(bits) * LN2 - 60 - drift(lane, knobs)) > 1  # nats


def test_without_truncation_and_correction_it_samples_from_the_model():
    model = TableModel("abcdefgh")
    for seed in range(3):
        assembly = assemble(alone("mirostat", eta=0.0))
        assembly.samplers[0].mu = math.inf
        assert written(assembly, {"target": model}, [0, 1], 30, seed=seed) == written(
            MODEL, {"target": model}, [0, 1], 30, seed=seed
        )


def course(sampler, spread: float, count: int, size: int = 256) -> list[tuple[float, float, bool]]:
    """Samples of random rows: mu before, surprise, and whether it was the most probable token."""
    chance, found = torch.Generator().manual_seed(0), []
    draws = Draws(0)
    for position in range(count):
        scores = torch.randn(size, generator=chance, dtype=torch.float64) * spread
        token = draws.pick(sampler.apply(scores[None], [[]])[0].softmax(-1), "token", position)
        before = sampler.mu
        list(sampler.observe({"target": scores}, token, position))
        found.append((before, -float(scores.log_softmax(-1)[token]) / LN2, token == int(scores.argmax())))
    return found


@pytest.mark.parametrize("eta", [0.1, 1.0])
def test_mean_surprise_converges_to_the_target_and_none_exceeds_mu(eta):
    found = course(mirostat(6.0, tau=3.0, eta=eta), spread=2.0, count=1500)
    assert sum(bits for _, bits, _ in found) / len(found) == pytest.approx(3.0, abs=0.1)
    assert all(bits <= mu or best for mu, bits, best in found)
    assert len({best for _, _, best in found}) == 2


def test_a_controller_on_renormalised_surprise_ends_above_the_target():
    found = course(mirostat(6.0, tau=3.0, eta=0.5, surprise="renormalised"), spread=2.0, count=600)
    assert sum(bits for _, bits, _ in found) / len(found) > 3.2


def test_a_target_beyond_the_models_entropy_is_reported_once():
    model = TableModel("abcd", spread=3.0)
    lane, events = run(alone("mirostat", tau=9.0, eta=0.5), {"target": model}, [0, 1], 30)
    mus = series(events, "surprise", "mu")
    assert mus == sorted(mus) and mus[-1] > 2 * mus[0]
    (note,) = [event.text for event in events if isinstance(event, Note)]
    assert "9 bits cannot be reached" in note


def test_rejected_draft_tokens_do_not_change_mu():
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
    knobs = {"tau": 1.2, "eta": 0.5}
    config = LaneConfig("speculative", {}, [("draft_model", {}), ("sample_match", {}), ("mirostat", knobs)])
    lane, _ = run(config, models, [0, 1], 30)
    assert sum(surprises(models["target"], [0, 1], lane.main.written)) - 30 * 1.2 == pytest.approx(
        drift(lane, knobs), abs=1e-9
    )
    assert assemble(config).guarantee() == ["heuristic"]


def test_a_forced_token_of_probability_zero_does_not_change_mu():
    config = replace(LaneConfig("greedy", {}, [("temperature", {"t": 0.0}), ("mirostat", {})]), forced=[70, 71])
    _, events = recorded(config, Prompt(QUESTION))
    mus = series(events, "surprise", "mu")
    assert mus and all(map(math.isfinite, mus)) and mus[0] == 6.0


class Swaps(Decoder):
    """Two sequences; the second takes the row of the first for every token it commits."""

    def decode(self, lm):
        yield lm.prefill()
        first, second = lm.fork(2)
        rows, _ = yield lm.extend([first, second])
        yield lm.keep([lm.choose(rows, 0), lm.choose(rows, 1, leaf=second)])
        self.samplers = first.chain.samplers, second.chain.samplers
        yield lm.keep(second)


def test_a_sequence_forked_from_another_adapts_separately():
    model, decoder = TableModel("ab", rule=lambda context: torch.tensor([0.9, 0.1], dtype=torch.float64).log()), Swaps()
    _, events = run(Assembly(decoder, [make("mirostat", tau=1.0, eta=1.0)]), {"target": model}, [0], 3)
    expected = [2.0 - (-math.log2(p) - 1.0) for p in (0.9, 0.1)]
    assert [sampler.mu for (sampler,) in decoder.samplers] == pytest.approx(expected)
    assert [event.sequence for event in events if isinstance(event, Figure) and event.name == "surprise"] == [1, 2]


Mirostat = find("mirostat")


def surprises_of(row: list[float]) -> list[float]:
    """Bits of each token of a row of scores."""
    total = sum(map(math.exp, row))
    return [-math.log2(math.exp(score) / total) if score > REMOVED else math.inf for score in row]


def zipf_k(row: list[float], mu: float, ranks: int) -> int:
    """The paper's k: s by least squares over neighbouring ranks, then k = (eps 2^mu / (1 - N^-eps)) ^ (1 / s)."""
    p = sorted((math.exp(score) for score in row if score > REMOVED), reverse=True)
    steps = [(math.log((i + 1) / i), math.log(p[i - 1] / p[i])) for i in range(1, min(ranks, len(p) - 1) + 1)]
    s = sum(t * b for t, b in steps) / sum(t * t for t, _ in steps)
    eps = s - 1
    return max(1, min(round((eps * 2**mu / (1 - len(p) ** -eps)) ** (1 / s)), len(p)))


def allowed_tokens(row: list[float], mu: float, version: str, ranks: int) -> set[int]:
    order = sorted((v for v in range(len(row)) if row[v] > REMOVED), key=lambda v: -row[v])
    if version == "1":
        return set(order[: zipf_k(row, mu, ranks)])
    return {v for v in order if surprises_of(row)[v] <= mu} | {order[0]}


def check_mirostat(cls: type[Sampler]) -> None:
    """Along a text: the tokens allowed at mu, and mu after each token, mu -= eta (surprise - tau) from 2 tau on."""
    chance = torch.Generator().manual_seed(0)
    for version, judged in (("1", "full"), ("2", "full"), ("2", "renormalised")):
        sampler, mu = made(cls, version=version, tau=2.0, eta=0.4, surprise=judged, ranks=10), 4.0
        for position in range(25):
            scores = torch.randn(40, generator=chance, dtype=torch.float64) * 2
            row = scores.masked_fill(torch.rand(40, generator=chance) < 0.2, REMOVED).tolist()
            allowed = allowed_tokens(row, mu, version, 10)
            found = sampler.apply(torch.tensor([row], dtype=torch.float64), [[]])[0]
            assert {v for v in range(40) if found[v] > REMOVED} == allowed
            token = sorted(allowed)[position % len(allowed)]
            whole = row if judged == "full" else [score if v in allowed else REMOVED for v, score in enumerate(row)]
            list(sampler.observe({"target": torch.tensor(row, dtype=torch.float64)}, token, position))
            mu -= 0.4 * (surprises_of(whole)[token] - 2.0)
            assert sampler.mu == pytest.approx(mu, abs=1e-9)


class CutsInNats(Mirostat):
    def kept(self, scores):
        best = scores.argmax(-1, keepdim=True)
        nats = (-scores.log_softmax(-1) <= self.mu).scatter(-1, best, True)
        return nats if self.version == "2" else super().kept(scores)


class StartsAtTheTarget(Mirostat):
    def __post_init__(self):
        super().__post_init__()
        self.mu = self.tau


class CorrectsTheWrongWay(Mirostat):
    def observe(self, rows, token, position):
        before = self.mu
        yield from super().observe(rows, token, position)
        self.mu = 2 * before - self.mu


class ForgetsTheFullRow(Mirostat):
    """Always takes the surprise under the truncated distribution."""

    def observe(self, rows, token, position):
        self.surprise = "renormalised"
        return super().observe(rows, token, position)


@pytest.mark.oracle("mirostat")
def test_mirostat_equals_its_formulas_token_by_token():
    check_mirostat(Mirostat)


@pytest.mark.refuses("mirostat")
@pytest.mark.parametrize("wrong", [CutsInNats, StartsAtTheTarget, CorrectsTheWrongWay, ForgetsTheFullRow])
def test_a_wrong_mirostat_is_refused(wrong):
    refused(check_mirostat, wrong)
