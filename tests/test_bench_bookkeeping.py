"""The benchmark of overhead of strategies outside forwards, at a tiny size."""
from __future__ import annotations

import json
from pathlib import Path
from time import thread_time

import pytest

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.bench.bookkeeping.bookkeeping_defaults import Sizes
from playground.bench.bookkeeping.bookkeeping_report import page, verdict
from playground.bench.bookkeeping.bookkeeping_trial import Bookkeeping, BookkeepingTrial
from playground.bench.bookkeeping.generated_model import ForwardClock, generated_pair
from playground.bench.bookkeeping.strategy_lanes import MEASURED, lane_of, measured_names, settings_of
from playground.cli import main
from playground.cli.bench import bookkeeping as bench_bookkeeping
from playground.contract import find
from playground.engine.forward_input import ForwardInput
from playground.errors import Refusal

OUT = "docs/bookkeeping.json"
FIGURES = Path(__file__).parent.parent / OUT
TINY = "--vocabulary 2000 --layers 2 --context 600 --watched 300 --tokens 4".split()


@pytest.mark.slow
def test_three_strategies_are_measured_and_added_to_a_page(tmp_path, capsys):
    out, written = tmp_path / "figures.json", tmp_path / "page.md"
    files = ["--out", str(out), "--page", str(written)]
    assert main(["bench", "bookkeeping", *TINY, *files, "--only", "top_p", "sink_window"]) == 0
    assert main(["bench", "bookkeeping", *TINY, *files, "--add", str(out), "--only", "prompt_lookup"]) == 0
    found = json.loads(out.read_text())
    assert "prompt_lookup: processor, load average over 15 minutes" in found["machine"]  # beside that of the others
    results = [Bookkeeping(**fields) for fields in found["strategies"]]
    assert [result.strategy for result in results] == ["top_p", "sink_window", "prompt_lookup"]
    for result in results:
        assert not result.failure and 500 < result.prompt <= 600
        assert result.rounds and result.rows >= result.rounds and result.tokens >= 2
        assert result.seconds > 0 and result.bytes > 100 * result.tokens and result.prompt_seconds > 0
    assert all(f"`{result.strategy}`" in written.read_text() for result in results)


@pytest.fixture(scope="module")
def trial() -> BookkeepingTrial:
    return BookkeepingTrial(Sizes(vocabulary=2000, layers=4, context=600, watched=300, tokens=4, seconds=30))


@pytest.mark.parametrize("name", ["flash", "m2r2", "s2d", "ftp"])
def test_a_head_without_fitted_weights_and_a_policy_that_chooses_rows_are_measured(trial, name):
    measured = trial.measure(name)
    assert not measured.failure and measured.rounds


def test_every_draft_head_is_measured_with_random_weights():
    heads = [name for name in measured_names() if issubclass(find(name), DraftHead)]
    assert len(heads) > 15 and all(settings_of(name) == {"weights": "random"} for name in heads)


def test_every_strategy_that_generates_text_has_a_lane():
    assert len(measured_names()) > 100 and all(lane_of(name) for name in measured_names())
    assert {find(name).kind for name in measured_names()} == set(MEASURED)
    with pytest.raises(Refusal, match="generates no text"):
        lane_of("scaling_laws")


def test_strategies_are_ordered_by_excess_over_a_limit():
    results = [
        Bookkeeping("quick", "greedy", tokens=10, rounds=10, seconds=0.01, bytes=9_000),
        Bookkeeping("slow", "greedy", tokens=10, rounds=20, seconds=0.1, bytes=9_000),
        Bookkeeping("wordy", "greedy", tokens=10, rounds=10, seconds=0.01, bytes=90_000),
        Bookkeeping("broken", "greedy", failure="It broke."),
    ]
    text = page({}, results)
    assert text.index("`wordy`") < text.index("`slow`") < text.index("`quick`") < text.index("broken: It broke.")
    assert verdict(results).startswith("1 of 4 strategies meet both limits, 1 take longer than 2 ms, 1 record more")


def test_files_of_other_programs_are_refused_in_a_sentence(tmp_path, capsys):
    (tmp_path / "other.json").write_text("[]")
    assert main(["bench", "bookkeeping", *TINY, "--only", "top_p", "--add", str(tmp_path / "other.json")]) == 2
    assert "contains no results of this benchmark" in capsys.readouterr().err


def test_the_published_table_has_every_strategy_or_says_why_it_could_not_be_measured():
    published = json.loads(FIGURES.read_text(encoding="utf-8"))
    results = [Bookkeeping(**fields) for fields in published["strategies"]]
    missing = sorted(set(measured_names()) ^ {result.strategy for result in results})
    assert not missing, f"python -m playground bench bookkeeping --add {OUT} --out --page --only {' '.join(missing)}"
    assert "partial" not in published
    assert published["settings"]["vocabulary"] >= 150_000 and published["settings"]["layers"] >= 32
    assert all(result.rounds or result.failure.endswith(".") for result in results)
    assert not any(fault in each.failure for each in results for fault in ("unexpected error", "not been fitted"))
    assert FIGURES.with_suffix(".md").read_text(encoding="utf-8") == page(
        {name: published[name] for name in ("settings", "machine")}, results)


def test_what_was_measured_is_on_disk_before_the_next_strategy(tmp_path, monkeypatch, capsys):
    def measured(sizes, names):
        yield Bookkeeping(names[0], "greedy", tokens=1, rounds=1)
        assert [each["strategy"] for each in json.loads(out.read_text())["strategies"]] == names[:1]
        raise KeyboardInterrupt

    out = tmp_path / "figures.json"
    monkeypatch.setattr(bench_bookkeeping, "_results", measured)
    main(["bench", "bookkeeping", *TINY, "--out", str(out), "--only", "top_p", "top_k"])
    assert "`top_p`" in capsys.readouterr().out


def test_a_forward_inside_another_one_is_timed_once():
    clock, start = ForwardClock(), thread_time()
    with clock.running(), clock.running():
        sum(range(100_000))
    assert 0 < clock.spent <= thread_time() - start


def test_all_logits_of_a_long_prompt_are_refused_and_its_last_ones_are_not():
    model, _ = generated_pair(Sizes(vocabulary=2000, layers=1, context=600, watched=100, tokens=2, seconds=1))
    store, chain = model.new_store(), list(range(-1, 199))
    model.forward([ForwardInput(store, [7] * 200, chain, last_only=True)])
    store.commit(199)
    with pytest.raises(Refusal, match="shorten it"):
        model.forward([ForwardInput(store, [7] * 200, chain)])
