"""Runs from Python: ended early, from several threads, a hundred times, and what is drawn and tabulated of them."""
from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from time import sleep

import matplotlib
import pytest

import playground
from playground.decoding.lane_runner import advance
from playground.events import Commit, Done, Header, Stamped
from playground.stopping import limit_reached
from playground.trace import Trace
from support.api_models import PROMPT, models, saved  # noqa: F401

ROOT = Path(__file__).parents[1]
LONG = 60


# --- ended early ---

def test_a_limit_that_is_reached_ends_a_run_with_its_text_so_far(models):
    with playground.stop_after(0.0):
        result = playground.run("greedy", PROMPT, models=models, max_new_tokens=LONG)
    assert result.reason == "stopped" and len(result.token_ids) < LONG
    assert playground.run("greedy", PROMPT, models=models, max_new_tokens=4).reason == "length"


def test_a_limit_that_is_not_reached_changes_nothing(models):
    with playground.stop_after(600):
        limited = playground.run("greedy", PROMPT, models=models, max_new_tokens=6)
    assert limited.token_ids == playground.run("greedy", PROMPT, models=models, max_new_tokens=6).token_ids


def test_all_lanes_are_ended_from_another_thread_by_the_handle(models, monkeypatch):
    turns = []

    def stopped_after_twenty(runners):
        turns.append(1)
        if len(turns) == 20:
            (other := Thread(target=limit.stop)).start()
            other.join()
        return advance(runners)

    monkeypatch.setattr("playground.decoding.session.advance", stopped_after_twenty)
    with playground.stop_after() as limit:
        results = playground.compare(["greedy", "speculative"], PROMPT, models=models, max_new_tokens=LONG)
    assert {result.reason for result in results} == {"stopped"} and len(turns) == 20
    assert all(0 < len(result.token_ids) < LONG for result in results)


def test_the_outer_limit_counts_for_the_inner_one_too():
    with playground.stop_after(0.0), playground.stop_after(600) as inner:
        assert inner.reached
    with playground.stop_after(600), playground.stop_after(0.0):
        assert limit_reached()
    assert not limit_reached()


# --- threads and memory ---

def test_runs_in_several_threads_write_what_they_write_alone(models):
    lanes = [("sample", {"temperature": 1.5}), "speculative", "greedy", ("sample", {"top_k": 3})] * 2

    def ids(lane):
        return playground.run(lane, PROMPT, models=models, seed=3, max_new_tokens=12).token_ids

    alone = [ids(lane) for lane in lanes]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ids, lanes)) == alone


def test_two_runs_never_compute_at_the_same_time(models, monkeypatch):
    running, most = [], []

    def counted(runners):
        running.append(1)
        most.append(len(running))
        try:
            sleep(0.02)  # so that others could begin
            return advance(runners)
        finally:
            running.pop()

    monkeypatch.setattr("playground.decoding.session.advance", counted)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda seed: playground.run("greedy", PROMPT, models=models, max_new_tokens=4), range(3)))
    assert max(most) == 1


COUNTED = """
import gc, threading
import playground
models = playground.load("pocket", draft="pocket-draft", progress=False)
def counts_after(runs):
    for seed in range(runs):
        playground.run(("sample", {"temperature": 1.5}), "Put down 17.", models=models, seed=seed, max_new_tokens=6)
    gc.collect()
    return len(gc.get_objects()), threading.active_count()
print(*counts_after(20), *counts_after(100))
"""


@pytest.mark.slow
def test_a_hundred_runs_leave_no_objects_and_no_threads_behind():
    """In a process of its own: in this one, threads and caches of other tests make objects meanwhile."""
    done = subprocess.run([sys.executable, "-c", COUNTED], cwd=ROOT, capture_output=True, text=True, check=True)
    objects, running, objects_later, running_later = map(int, done.stdout.split())
    assert objects_later - objects < 20 and running_later == running  # one object in five runs would be seen


# --- loading ---

NOTEBOOK = """
import sys, types
shell = types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0, 0))
sys.modules["ipykernel"] = types.ModuleType("ipykernel")
import playground
playground.load("pocket", draft="pocket-draft", progress=%s)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("progress", "bars"), [("None", 1), ("False", 0)])
def test_loading_in_a_notebook_shows_one_bar_or_none_and_no_warning(progress, bars):
    done = subprocess.run([sys.executable, "-c", NOTEBOOK % progress], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert "Warning" not in done.stderr and "IProgress" not in done.stderr
    assert len({part.partition("%")[1] + part.rpartition("|")[1] for part in done.stderr.split("\r") if "%|" in part}
               ) == bars
    assert "Loading weights" not in done.stderr


def test_loading_in_a_script_shows_nothing_and_calls_what_is_given(saved, capsys):
    shares = []
    playground.load(saved.target, progress=lambda share, text: shares.append(share))
    playground.load(saved.target)
    assert capsys.readouterr() == ("", "") and shares[-1] == 1.0 and shares == sorted(shares)


# --- figures and tables ---

@pytest.fixture(scope="module")
def results(models):
    return playground.compare(["greedy", "speculative"], PROMPT, models=models, max_new_tokens=12)


def test_a_figure_has_the_numbers_of_the_results_in_both_libraries(results):
    tokens = results[0].tokens()
    drawn = playground.figure("entropy", results)
    assert [line.name for line in drawn.data] == [result.header.title for result in results]
    assert list(drawn.data[0].y) == pytest.approx(list(tokens["entropy"]))
    axes = playground.figure("entropy", results, "matplotlib").axes[0]
    assert isinstance(axes.figure, matplotlib.figure.Figure) and axes.get_ylabel() == "entropy (nats)"
    assert [float(y) for y in axes.lines[0].get_ydata()] == list(drawn.data[0].y)


def test_a_figure_of_acceptance_leaves_out_lanes_without_drafts(results):
    drawn = playground.figure("acceptance", results)
    assert [line.name for line in drawn.data] == [results[1].header.title]
    by_depth = results[1].drafts().query("tested").groupby("depth")["accepted"].mean()
    assert list(drawn.data[0].y) == pytest.approx(list(by_depth))


@pytest.mark.parametrize(("kind", "library", "says"), [
    ("entropie", "plotly", "did you mean entropy?"),
    ("entropy", "seaborn", "choose one of plotly, matplotlib"),
    ("acceptance", "plotly", "None of the results has numbers for acceptance"),
])
def test_a_figure_that_cannot_be_drawn_is_refused(results, kind, library, says):
    with pytest.raises(playground.Refusal, match=says.replace("?", r"\?")):
        playground.figure(kind, results[:1], library)


def test_tokens_have_their_round_and_their_candidates(results):
    plain, drafted = (result.tokens() for result in results)
    assert plain["round"].isna().all() and list(drafted["id"]) == results[1].token_ids
    rounds = results[1].rounds()
    for row in rounds.itertuples():
        own = drafted[drafted["round"] == row.round]
        assert list(own["position"]) == [*range(row.position, min(row.position + row.accepted + 1, len(drafted)))]
    for row in plain.itertuples():
        assert row.text == row.candidates[0][0]  # greedy takes the most probable token
        assert row.candidates[0][1] == pytest.approx(row.probability, abs=1e-4)


def test_the_cache_grows_with_the_text_and_stays_within_a_budget(models):
    plain = playground.run("greedy", PROMPT, models=models, max_new_tokens=8).cache()
    assert list(plain["live"]) == list(plain["length"]) and plain["bytes"].is_monotonic_increasing
    assert set(plain["stream"]) == {"target"} and (plain["mean_live"] == plain["live"]).all()
    window = playground.run("greedy", PROMPT, models=models, max_new_tokens=8,
                            extras=[("sink_window", {"sinks": 1, "window": 4})]).cache()
    assert window["live"].iloc[-1] <= 5 < window["length"].iloc[-1] and window["evicted"].sum() > 0


def test_a_lane_without_a_cache_has_an_empty_table():
    result = playground.Result(Trace([Header()], [Stamped(0, 0, 0.0, Commit(ids=[1], pieces=["a"])),
                                                  Stamped(0, 1, 0.1, Done("length"))]))
    assert len(result.cache()) == 0 and list(result.cache().columns)[:2] == ["stream", "seconds"]
