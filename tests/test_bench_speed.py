"""The whole of `bench speed`: the hand-written loop, forwards, memory and bandwidth."""
from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch
from toys import byte_tokenizer, network

from playground.bench.measurements import Measurement
from playground.bench.speed.bandwidth_limit import bytes_a_token, cache_bytes_a_token, weight_bytes
from playground.bench.speed.baselines import TwinModels, twin
from playground.bench.speed.block_timing import FORWARDS, binary_tree, blocks, cache_memory, prefilled_cache
from playground.bench.speed.decode_timing import decode_baselines, first_token_baselines, without_end_tokens
from playground.bench.speed.minimal_loop import Loop
from playground.bench.speed.speed_defaults import (
    ALLOCATED,
    COMPILED,
    FORMULA,
    HELD,
    LANE,
    LIBRARY,
    LIMIT,
    LOOP,
    PARTS,
    SHAPES,
    STATIC,
    Grid,
)
from playground.bench.speed.speed_prompts import Task, read_tasks
from playground.bench.speed.speed_suite import Suite
from playground.bench.speed.speed_tables import NOT_MEASURED, BenchRun, tables
from playground.bench.speed.timer import Timer
from playground.bench.speed.timing import TimedText
from playground.bench.spread import Spread
from playground.cli import main
from playground.engine.model import Model
from playground.errors import Refusal
from support.speed_benches import SIZES, folder, measured, run, saved  # noqa: F401

pytestmark = pytest.mark.bench

@pytest.fixture(scope="module")
def speed(folder, saved, measured):
    """A minimal complete `bench speed`, beside another run: its document and its page."""
    run(
        "bench",
        "speed",
        "--model",
        saved.target,
        "--draft",
        "none",
        *SIZES,
        "--max-new-tokens",
        "6",
        "--contexts",
        "16",
        "40",
        "4096",
        "--blocks",
        "1",
        "4",
        "--lanes",
        "1",
        "2",
        "--only",
        *PARTS[1:],
        "--no-compile",
        "--beside",
        str(folder / "b.json"),
        "--json",
        str(folder / "s.json"),
        "--page",
        str(folder / "s.md"),
    )
    return json.loads((folder / "s.json").read_text()), (folder / "s.md").read_text()


# --- the hand-written loop, and all baselines after a prompt of a given length ---

@pytest.fixture(scope="module", params=["llama", "qwen2"])
def twice(request) -> TwinModels:
    ours = network(request.param)
    return TwinModels(Model(ours, byte_tokenizer(), request.param), twin(network(request.param)))


def greedy(theirs, ids: list[int], count: int) -> list[int]:
    """With a forward of the library over the whole text for each token."""
    text = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(theirs(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids):]


def test_the_loop_writes_what_the_library_writes(twice):
    ids = torch.arange(5, 15)
    loop = Loop(twice.untouched, 20)
    first = loop.prefill(ids)
    assert [*first.tolist(), *loop.decode(first, 10, 9).tolist()] == greedy(twice.untouched, ids.tolist(), 10)


def test_all_baselines_write_the_same_tokens_after_the_first(twice):
    task, ours = Task("16", "", ids=tuple(range(20, 36))), without_end_tokens(twice)
    expected = greedy(twice.untouched, list(task.ids), 7)
    for contender in decode_baselines(ours, 7, [1, 2], compiled=False):
        lanes = 2 if contender.name.startswith("2 lanes") else 1
        assert contender.read(contender.write(contender.ready(task))) == expected[1:] * lanes, contender.name
    for contender in first_token_baselines(ours):
        assert contender.read(contender.write(contender.ready(task))) == expected[:1], contender.name


def test_texts_of_fixed_length_ignore_end_tokens(twice):
    ours = without_end_tokens(twice)
    assert not ours.model.end_ids and twice.model.end_ids
    assert ours.model.network is twice.model.network and ours.untouched.generation_config.eos_token_id is None


# --- single forwards, memory and bandwidth ---

def test_a_block_is_a_binary_draft_tree_and_leaves_the_cache_unchanged(twice):
    assert binary_tree(6) == [-1, -1, 0, 0, 1, 1]
    store, rows = prefilled_cache(twice.model, list(range(9))), []
    forward = twice.model.forward
    (block,) = blocks(twice.model, store, (6,))
    twice.model.forward = lambda works: rows.append(len(works[0].tokens)) or forward(works)
    block.write(block.ready(Task("9", "", ids=tuple(range(9)))))
    del twice.model.forward
    assert rows == [6] * FORWARDS and store.length == 9 and store.parents == []


def test_a_cache_has_the_size_of_the_formula_with_spare_capacity(twice):
    found = cache_memory(twice.model, list(range(100)))
    # keys and values, layers, KV heads, width, float32
    assert cache_bytes_a_token(twice.untouched) == 2 * 2 * 2 * 16 * 4
    assert (
        found[FORMULA]
        == found[HELD]
        == 100 * cache_bytes_a_token(twice.untouched)
        < found[ALLOCATED]
        <= 2 * found[FORMULA]
    )


def test_a_token_reads_all_weights_except_the_embedding_table_and_the_whole_cache(twice):
    theirs = twice.untouched
    table = theirs.get_input_embeddings().weight
    others = sum(weight.nbytes for weight in theirs.parameters()) - table.nbytes
    assert weight_bytes(theirs) == others  # these lm_heads are not tied
    assert bytes_a_token(theirs, 10) == others + 10 * cache_bytes_a_token(theirs)


def test_a_tied_lm_head_counts_as_read(twice):
    tied = twin(twice.untouched)
    tied.lm_head.weight = tied.get_input_embeddings().weight
    assert weight_bytes(tied) == sum(weight.nbytes for weight in tied.parameters())


def test_the_bandwidth_limit_is_the_time_of_a_tokens_bytes_at_the_copys_bandwidth(twice, monkeypatch):
    monkeypatch.setattr("playground.bench.speed.bandwidth_limit.SIZES", {"cpu": 1 << 20})
    suite = Suite(
        twice, Grid(contexts=(16,), lanes=(), length=4, compiled=False), ["decoding"], lambda share, text: None
    )
    copied = TimedText(LIMIT, Task("16", "", ids=tuple(range(16))), seconds=[0.5])
    monkeypatch.setattr(suite, "_time", lambda part, everyone, task: [copied, TimedText(LANE, task, [1, 2], [0.1])])
    limit, lane = suite.records()
    # read and written, four times
    assert limit.rounds == [pytest.approx(0.5 * bytes_a_token(twice.untouched, 16 + 2) / (2 * 4 * (1 << 20)))]
    assert (limit.same, lane.same, lane.rounds) == (None, True, [0.05])


def test_a_timer_measures_its_with_statement(monkeypatch):
    moments = iter([2.0, 5.0])
    monkeypatch.setattr("playground.bench.speed.timer.perf_counter", lambda: next(moments))
    with Timer(torch.device("cpu")) as timer:
        pass
    assert timer.seconds == 3.0


def test_on_a_gpu_a_timer_reads_two_events_and_waits_for_the_second_only_when_asked(monkeypatch):
    calls, moments = [], iter([10.0, 40.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = next(moments)
            calls.append("record")

        def synchronize(self):
            calls.append("wait")

        def elapsed_time(self, end):
            return end.at - self.at

    for name, fake in (
        ("Event", Event),
        ("synchronize", lambda device: calls.append("empty")),
        ("current_stream", lambda device: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    with Timer(torch.device("cuda")) as timer:
        assert calls == ["empty", "record"]
    assert calls == ["empty", "record", "record"]
    assert timer.seconds == 0.03 and calls[-1] == "wait"


# --- the whole of `bench speed` ---

def test_every_part_is_measured_in_every_round_at_every_context_the_model_can_read(speed):
    document, _ = speed
    found = {(record["part"], record["context"]) for record in document["records"]}
    assert found == {(part, context) for part in PARTS[1:] for context in (16, 40)}
    assert all(
        len(record["rounds"]) == (1 if record["part"] == "memory" else 2) and not record["failure"]
        for record in document["records"]
    )


def test_every_baseline_shows_whether_it_wrote_what_the_plain_lane_wrote(speed):
    document, _ = speed
    assert all(
        record["same"]
        for record in document["records"]
        if record["part"] in ("decoding", "first") and record["subject"] != LIMIT
    )


def test_the_page_shows_both_runs_and_what_was_not_measured(speed):
    _, page = speed
    for heading in (
        "Greedy against generate, run B",
        "One forward of a tree",
        "Lanes together",
        "First token",
        "Recording",
        "Shares of the limits",
    ):
        assert f"## {heading}\n" in page
    for title in (*SHAPES.values(), "all"):
        assert f"| {title} | - | {NOT_MEASURED} |" in page
    assert COMPILED in page and f"| {version('torch')} | {version('torch')} |" in page


def test_an_interrupted_run_keeps_its_measurements(tmp_path, saved, monkeypatch):
    def cut(suite: Suite, task: Task, context: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Suite, "_memory", cut)
    main(
        [
            "bench",
            "speed",
            "--model",
            saved.target,
            "--draft",
            "none",
            *SIZES,
            "--contexts",
            "16",
            "--blocks",
            "1",
            "4",
            "--only",
            "blocks",
            "memory",
            "--json",
            str(tmp_path / "cut.json"),
        ]
    )
    records = json.loads((tmp_path / "cut.json").read_text())["records"]
    assert [(record["part"], record["subject"], len(record["rounds"])) for record in records] == [
        ("blocks", "1 node", 2),
        ("blocks", "4 nodes", 2),
    ]


@pytest.mark.parametrize("text", [None, "", "{}", '{"format": "decoding-playground-benchmark", "version": 1}'])
def test_files_that_are_no_measurements_are_refused(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "m.json").write_text(text)
    assert main(["bench", "speed", "--beside", str(tmp_path / "m.json")]) == 2
    assert "bench speed --out" in capsys.readouterr().err


def test_ratios_are_taken_within_a_round_and_failures_have_none():
    records = [
        Measurement("decoding", "m", 16, LANE, [0.002, 0.004]),
        Measurement("decoding", "m", 16, LOOP, [0.001, 0.001]),
        Measurement("decoding", "m", 16, LIBRARY, failure="RuntimeError: no memory"),
        Measurement("decoding", "m", 16, STATIC, [0.004, 0.004], same=False),
    ]
    shares = next(table for table in tables([BenchRun("A", "cpu", records)]) if table.title.startswith("Shares"))
    head, row = shares.rows([BenchRun("A", "cpu", records)])
    cells = dict(zip(head, row))
    assert cells[LANE] == "3.00 (2.00 to 4.00)" and cells["share of the loop"] == "0.38 (0.25 to 0.50)"
    assert (
        cells[LIBRARY] == "failed"
        and cells["generate / lane"] == cells[LIMIT] == NOT_MEASURED
        and cells["same text"] == f"not: {STATIC}"
    )


def test_a_spread_is_median_lowest_and_highest():
    assert Spread.of([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0)


def test_the_bundled_prompts_cover_the_tasks():
    assert {task.task for task in read_tasks()} == {"records", "programs", "edit", "arithmetic", "story"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"task": "x"}]', '[{"task": "x", "prompt": " "}]', "[1]"])
def test_malformed_prompts_are_refused(tmp_path, text):
    (tmp_path / "prompts.json").write_text(text)
    with pytest.raises(Refusal):
        read_tasks(tmp_path / "prompts.json")
