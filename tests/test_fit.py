"""Knobs fitted to a model: an entropy threshold learnt from pairs of known distribution, and the rows of a text."""
from __future__ import annotations

import json
import math

import pytest
import torch
from pairs import VOCABULARY, network, pair
from saved import save_models
from torch import Tensor

from playground.algorithms.sampling.token_readings import TokenReading
from playground.cli import main
from playground.contract import find
from playground.errors import Refusal
from playground.training import variants as learning
from strategies.sampling.adadec.entropy_threshold import RIDGE, best_cutoff, judge, learn, logistic, threshold


def pairs(count: int, tau: float, slope: float = -4.0, spread: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Entropies, most of them low if `spread` is small, and argmaxes that are right with probability
    sigmoid(slope (H - tau)).
    """
    chance = torch.Generator().manual_seed(seed)
    entropies = torch.rand(count, generator=chance, dtype=torch.float64) ** (1 / spread) * 3
    return entropies, torch.rand(count, generator=chance, dtype=torch.float64) < torch.sigmoid(
        slope * (entropies - tau)
    )


def readings(entropies: Tensor, right: Tensor) -> list[TokenReading]:
    """Rows over eight tokens with these entropies; the text's token has rank one or two."""
    logits = torch.zeros(len(entropies), 8, dtype=torch.float64)
    logits[:, 0] = _largest(entropies)
    logits[:, 1] += 1e-6
    return [TokenReading((~part).long(), rows) for part, rows in zip(right.split(7), logits.split(7))]


def _largest(entropies: Tensor) -> Tensor:
    """The logit above seven zeros that gives each entropy, by bisection: the entropy falls as the logit rises."""
    low, high = torch.zeros_like(entropies), torch.full_like(entropies, 40.0)
    for _ in range(60):
        middle = (low + high) / 2
        rows = torch.cat([middle[:, None], torch.zeros(len(middle), 7, dtype=torch.float64)], 1).log_softmax(-1)
        above = -(rows.exp() * rows).sum(-1) > entropies
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return low


# --- the threshold ---

@pytest.mark.parametrize("tau", [0.5, 1.0, 2.2])
def test_the_threshold_is_where_the_argmax_becomes_more_often_wrong_than_right(tau):
    assert threshold(*pairs(40_000, tau)).tau == pytest.approx(tau, abs=0.12)


@pytest.mark.parametrize("spread", [0.25, 4.0])
def test_the_threshold_is_the_same_for_unbalanced_classes(spread):
    entropies, right = pairs(60_000, 1.5, spread=spread)
    found = threshold(entropies, right)
    assert abs(found.right - 0.5) > 0.2, "the kinds are out of balance"
    assert found.tau == pytest.approx(1.5, abs=0.15)
    without_scan = -found.bias / found.weight  # where the balanced regression says one half
    assert abs(without_scan - 1.5) > 0.25, "the balanced regression alone would be wrong, so the scan matters"


def test_thresholds_on_probabilities_and_entropies_agree():
    entropies, right = pairs(5000, 1.0)
    found = threshold(entropies, right)
    p = torch.sigmoid(found.weight * entropies + found.bias)
    assert torch.equal(p < found.cutoff, entropies > found.tau)


def test_the_threshold_is_exact_where_entropies_separate_right_from_wrong():
    entropies = torch.linspace(0, 3, 2000, dtype=torch.float64)
    found = threshold(entropies, entropies < 1.2)
    assert found.tau == pytest.approx(1.2, abs=0.05) and found.accuracy > 0.98 and math.isfinite(found.weight)


def test_the_same_pairs_give_the_same_threshold():
    assert threshold(*pairs(2000, 1.0)) == threshold(*pairs(2000, 1.0)) != threshold(*pairs(2000, 1.0), seed=7)


def test_the_regression_is_at_the_minimum_of_its_penalised_loss():
    x, y = pairs(500, 1.0)
    found = torch.tensor(logistic(x, y), dtype=torch.float64, requires_grad=True)
    logits = found[0] * x + found[1]
    loss = (
        torch.nn.functional.binary_cross_entropy_with_logits(logits, y.double(), reduction="sum")
        + RIDGE / 2 * found[0] ** 2
    )
    loss.backward()
    assert found.grad.abs().max() < 1e-6


def test_the_cutoff_is_the_first_of_the_best():
    p, right = torch.tensor([0.105, 0.305, 0.305, 0.905]), torch.tensor([False, True, False, True])
    by_hand = [(sum((q >= c / 100) == r for q, r in zip(p.tolist(), right.tolist())) / 4, -c) for c in range(1, 100)]
    accuracy, negative = max(by_hand)
    assert best_cutoff(p, right) == (pytest.approx(-negative / 100), accuracy) == (pytest.approx(0.11), 0.75)


def test_a_pair_is_the_entropy_in_nats_and_whether_the_own_token_ranks_first():
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -50.0, -50.0], [math.log(3), 0.0, -50.0, -50.0]], dtype=torch.float64
    )
    entropies, right = judge(TokenReading(torch.tensor([2, 0, 1]), logits))
    certain = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropies.tolist() == pytest.approx([math.log(4), certain, certain])
    assert right.tolist() == [True, True, False]  # of equal scores none is above the own one


def test_readings_give_the_threshold_of_their_pairs():
    entropies, right = pairs(3000, 0.9, spread=0.7)
    entropies = entropies.clamp(0.01, 2.0)
    assert learn(readings(entropies, right)).tau == pytest.approx(threshold(entropies, right).tau, abs=1e-6)


@pytest.mark.parametrize(
    "right, says",
    [
        (torch.ones(500, dtype=torch.bool), "wrong 0 times"),
        (torch.zeros(500, dtype=torch.bool), "right 0 "),
        (torch.empty(0, dtype=torch.bool), "more text"),
    ],
)
def test_texts_that_the_model_always_or_never_gets_right_give_no_threshold(right, says):
    with pytest.raises(Refusal, match=says):
        threshold(torch.linspace(0, 3, len(right), dtype=torch.float64), right)


def test_an_empty_reading_is_refused():
    with pytest.raises(Refusal, match="more text"):
        learn([])


def test_a_model_that_is_more_often_right_where_it_is_uncertain_has_no_threshold():
    entropies, right = pairs(2000, 1.5)
    with pytest.raises(Refusal, match="no threshold"):
        threshold(entropies, ~right)


# --- reading ---

def own_rows(ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return network("llama")(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_reading_is_every_token_but_the_first_with_the_row_before_it(monkeypatch):
    monkeypatch.setattr(learning, "CHUNK", 16)  # so that later chunks use the cache
    ids = random_ids(50)
    found = list(learning.readings(pair().target, [ids]))
    assert [len(reading.ids) for reading in found] == [16, 16, 16, 1]
    assert torch.cat([reading.ids for reading in found]).tolist() == ids[1:]
    assert (torch.cat([reading.logits for reading in found]) - own_rows(ids)).abs().max() < 1e-9


def test_a_text_beyond_the_context_is_read_in_windows():
    model, ids = pair().target, random_ids(300)
    assert model.context == 128
    found = list(learning.readings(model, [ids]))
    rows = torch.cat([reading.logits for reading in found])
    assert (rows - torch.cat([own_rows(ids[:128]), own_rows(ids[128:256]), own_rows(ids[256:])])).abs().max() < 1e-9


def test_texts_of_one_token_have_nothing_to_read():
    assert list(learning.readings(pair().target, [[5], []])) == []


def test_progress_names_every_text():
    recorded = []
    list(learning.readings(pair().target, [[5, 6], [7, 8]], lambda share, text: recorded.append((share, text))))
    assert recorded == [(0.0, "Reading text 1 of 2"), (0.5, "Reading text 2 of 2")]


# --- the command ---

@pytest.fixture
def shell(capsys):
    def call(*words) -> tuple[int, str, str]:
        return main([str(word) for word in words]), *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models")).target


@pytest.fixture
def fits_length(monkeypatch):
    """EAD fits, for a test, the number of tokens a model read, which is known."""
    def fit(cls, given):
        return {"window": sum(len(reading.ids) for reading in given)}

    monkeypatch.setattr(find("ead"), "fit", classmethod(fit), raising=False)


def test_the_command_prints_knobs_as_options_to_paste(shell, fits_length, saved, tmp_path):
    (tmp_path / "a.txt").write_text("zxq zxq")
    (tmp_path / "b.jsonl").write_text('{"text": "qz"}\n{"text": "zq"}\n')
    words = ["fit", "ead", "--model", saved, "--texts", tmp_path / "a.txt", tmp_path / "b.jsonl"]
    code, out, err = shell(*words)
    assert (code, out, err) == (0, "--set window=8\n", "")  # 6 of seven bytes, and one of two, twice
    facts = json.loads(shell(*words, "--json")[1])
    assert (
        facts["knobs"] == {"window": 8}
        and facts["strategy"] == "ead"
        and facts["texts"] == 3
        and facts["model"] == saved
    )


def test_knobs_beyond_their_limits_are_refused(shell, fits_length, saved, tmp_path):
    (tmp_path / "a.txt").write_text("zx" * 50)
    code, out, err = shell("fit", "ead", "--model", saved, "--texts", tmp_path / "a.txt")
    assert code == 2 and out == "" and "Window must be between 1 and 32" in err


@pytest.mark.parametrize(
    "words, says",
    [
        ("fit", "NAME"),
        ("fit nothing --texts TEXT", "no strategy"),
        ("fit greedy --texts TEXT", "no knobs that are fitted"),
        ("fit ead --texts EMPTY", "empty"),
        ("fit ead --texts TEXT --epochs 3", "leave out --epochs"),
        ("fit ead --texts /nowhere", "cannot be read"),
        ("fit ead --texts TEXT --model /nowhere", "no folder"),
    ],
)
def test_wrong_input_is_refused_in_one_line(shell, fits_length, tmp_path, words, says):
    (tmp_path / "text").write_text("Once upon a time")
    (tmp_path / "empty").write_text("")
    code, out, err = shell(
        *words.replace("TEXT", str(tmp_path / "text")).replace("EMPTY", str(tmp_path / "empty")).split()
    )
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err
