"""The benchmark measures what it says; how fast anything is, it tells on other days."""
from __future__ import annotations

import json
import logging
from importlib.metadata import version

import pytest
import torch
from saved import save_models
from toys import network

from playground.bench.contenders import PAIRS, PLAIN, Contender, twin
from playground.bench.contest import Spread, compare, contest
from playground.bench.prompts import Task, read_tasks
from playground.engine.seams import install
from playground.errors import Refusal
from playground.shell import main


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One smallest benchmark: its document, its page, its output."""
    folder = tmp_path_factory.mktemp("bench")
    saved, level = save_models(folder), logging.getLogger("playground").level
    (folder / "prompts.json").write_text(json.dumps([{"task": "birds", "prompt": "The green bird"}, {"task": "foxes", "prompt": "The red fox", "chat": True}]))
    code = main(["bench", "--model", saved.target, "--draft", saved.draft, "--prompts", str(folder / "prompts.json"), "--repeats", "2",
                 "--max-new-tokens", "12", "--threads", "1", "--json", str(folder / "b.json"), "--page", str(folder / "b.md")])
    logging.getLogger("playground").setLevel(level)
    assert code == 0
    return json.loads((folder / "b.json").read_text()), (folder / "b.md").read_text()


def test_every_pair_is_compared_on_every_task(measured):
    document, _ = measured
    assert [(c["first"], c["second"], c["task"]) for c in document["comparisons"]] == [(*pair, task) for pair in PAIRS for task in ("birds", "foxes")]
    assert all(c["ratio"]["low"] <= c["ratio"]["median"] <= c["ratio"]["high"] for c in document["comparisons"])


def test_guessing_ahead_and_the_library_write_what_the_plain_lane_writes(measured):
    document, _ = measured
    for comparison in document["comparisons"]:
        assert comparison["same_text"] == comparison["prompts"] == 1, comparison


def test_each_contender_is_measured_in_each_round_but_the_first(measured):
    document, _ = measured
    assert len(document["measurements"]) == 2 * len({name for pair in PAIRS for name in pair})
    for measurement in document["measurements"]:
        assert len(measurement["seconds"]) == 2 and min(measurement["seconds"]) > 0
        lanes = 4 if "four lanes" in measurement["contender"] else 1
        assert measurement["tokens"] == len(measurement["token_ids"]) == 12 * lanes


def test_a_benchmark_names_its_machine_and_settings(measured):
    document, page = measured
    assert document["machine"]["threads"] == 1 and document["machine"]["torch"] == version("torch")
    assert document["settings"]["dtype"] == "float32" and document["settings"]["max_new_tokens"] == 12
    assert document["machine"]["processor"] in page


def test_the_page_has_a_table_for_each_pair(measured):
    document, page = measured
    assert page.count("\n## ") == len(PAIRS) and page.count("\n| birds |") == page.count("\n| foxes |") == len(PAIRS)


def test_the_copy_for_the_library_shares_the_weights_and_not_the_seams():
    ours = network()
    theirs = twin(ours)
    expected = theirs(torch.tensor([[1, 2, 3]])).logits
    install(ours)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(ours.parameters(), theirs.parameters()))
    assert ours.config._attn_implementation != theirs.config._attn_implementation
    assert torch.equal(theirs(torch.tensor([[1, 2, 3]])).logits, expected)


def test_nobody_always_follows_the_same_other():
    order = []
    everyone = [Contender(name, lambda task: None, lambda asked, name=name: order.append(name), lambda left: [1]) for name in "abc"]
    writings = contest(everyone, [Task("t", "p")], 2, lambda share, text: None)
    assert "".join(order) == "abcbcacab"
    assert [len(writing.seconds) for writing in writings] == [2, 2, 2]


def test_without_a_draft_its_pairs_are_left_out():
    everyone = [Contender(name, lambda task: None, lambda asked: None, lambda left: [1]) for name in {n for pair in PAIRS[:2] for n in pair}]
    compared = compare(contest(everyone, [Task("t", "p")], 1, lambda share, text: None))
    assert [(c.first, c.second) for c in compared] == list(PAIRS[:2]) and compared[0].first == PLAIN


def test_a_spread_is_median_and_extremes():
    assert Spread.of([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0)


def test_the_prompts_that_come_along_cover_the_tasks():
    assert {task.task for task in read_tasks()} == {"records", "programs", "edit", "arithmetic", "story"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"task": "x"}]', '[{"task": "x", "prompt": " "}]', "[1]"])
def test_prompts_of_another_shape_are_refused(tmp_path, text):
    (tmp_path / "prompts.json").write_text(text)
    with pytest.raises(Refusal):
        read_tasks(tmp_path / "prompts.json")
