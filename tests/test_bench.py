"""The speed benchmark measures what it states; speed itself is not tested here."""
from __future__ import annotations

import json
import logging
from importlib.metadata import version

import pytest
import torch
from saved import save_models
from toys import byte_tokenizer, network
from transformers import AutoModelForCausalLM, Qwen2Config

from playground.bench.bandwidth_limit import bytes_a_token, cache_bytes_a_token, weight_bytes
from playground.bench.baselines import Baseline, TwinModels, twin
from playground.bench.block_timing import FORWARDS, binary_tree, blocks, cache_memory, prefilled_cache
from playground.bench.decode_timing import decode_baselines, first_token_baselines, without_end_tokens
from playground.bench.measurements import Measurement
from playground.bench.minimal_loop import Loop
from playground.bench.model_shapes import KNOWN, assemble, build
from playground.bench.speed_defaults import (
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
from playground.bench.speed_prompts import Task, read_tasks
from playground.bench.speed_report import processor
from playground.bench.speed_suite import Suite
from playground.bench.speed_tables import NOT_MEASURED, BenchRun, tables
from playground.bench.spread import Spread
from playground.bench.text_baselines import PAIRS, PLAIN
from playground.bench.timer import Timer
from playground.bench.timing import TimedText, compare, failures, time_rounds
from playground.cli import main
from playground.engine.hooks import install_plans, use_own_attention
from playground.engine.load import Loading
from playground.engine.model import Model
from playground.errors import Refusal

pytestmark = pytest.mark.bench

WITHOUT_COMPILING = [pair for pair in PAIRS if COMPILED not in pair]
SIZES = ["--repeats", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def saved(folder):
    return save_models(folder)


@pytest.fixture(scope="module")
def measured(folder, saved):
    """A minimal benchmark: its document and its page."""
    tasks = [{"task": "birds", "prompt": "The green bird"}, {"task": "foxes", "prompt": "The red fox", "chat": True}]
    (folder / "prompts.json").write_text(json.dumps(tasks))
    run("bench", "--model", saved.target, "--draft", saved.draft, "--prompts", str(folder / "prompts.json"), *SIZES,
        "--max-new-tokens", "12", "--json", str(folder / "b.json"), "--page", str(folder / "b.md"))
    return json.loads((folder / "b.json").read_text()), (folder / "b.md").read_text()


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


def run(*words: str) -> None:
    level = logging.getLogger("playground").level
    code = main([*words])
    logging.getLogger("playground").setLevel(level)
    assert code == 0


def test_every_pair_is_compared_on_every_task(measured):
    document, _ = measured
    expected = [(*pair, task) for pair in WITHOUT_COMPILING for task in ("birds", "foxes")]
    assert [(c["first"], c["second"], c["task"]) for c in document["comparisons"]] == expected
    assert all(c["ratio"]["low"] <= c["ratio"]["median"] <= c["ratio"]["high"] for c in document["comparisons"])


def test_speculation_and_the_library_write_what_the_plain_lane_writes(measured):
    document, _ = measured
    for comparison in document["comparisons"]:
        assert comparison["same_text"] == comparison["prompts"] == 1, comparison


def test_each_contender_is_measured_in_each_round_but_the_first(measured):
    document, _ = measured
    assert len(document["measurements"]) == 2 * len({name for pair in WITHOUT_COMPILING for name in pair})
    for measurement in document["measurements"]:
        assert len(measurement["seconds"]) == 2 and min(measurement["seconds"]) > 0
        lanes = 4 if "four lanes" in measurement["contender"] else 1
        assert measurement["tokens"] == len(measurement["token_ids"]) == 12 * lanes


def test_a_benchmark_names_its_machine_and_settings(measured):
    document, page = measured
    assert document["machine"]["threads"] == 1 and document["machine"]["torch"] == version("torch")
    assert document["settings"]["dtype"] == "float32" and document["settings"]["max_new_tokens"] == 12
    assert document["machine"]["processor"] in page


def test_a_processor_is_named_with_family_and_model_number():
    cpuinfo = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t:\n\n"
    assert processor(cpuinfo + cpuinfo.replace("17", "18")) == "AMD EPYC, family 25, model 17"
    assert processor("model name\t: Some: thing\n") == "Some: thing"
    with pytest.raises(KeyError):  # an ARM: then the platform's name is used
        processor("processor\t: 0\nCPU part\t: 0xd0c\n")


def test_the_page_has_a_table_for_each_pair(measured):
    document, page = measured
    assert page.count(" against ") == page.count("\n| birds |") == page.count("\n| foxes |") == len(WITHOUT_COMPILING)


def test_the_copy_for_the_library_shares_weights_but_not_hooks():
    ours = network()
    theirs = twin(ours)
    expected = theirs(torch.tensor([[1, 2, 3]])).logits
    use_own_attention(ours)
    install_plans(ours)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(ours.parameters(), theirs.parameters()))
    assert ours.config._attn_implementation != theirs.config._attn_implementation
    assert torch.equal(theirs(torch.tensor([[1, 2, 3]])).logits, expected)


def test_the_order_rotates_so_that_nothing_always_follows_the_same_other():
    order = []
    everyone = [
        Baseline(name, lambda task: None, lambda asked, name=name: order.append(name), lambda left: [1])
        for name in "abc"
    ]
    writings = time_rounds(everyone, [Task("t", "p")], 2, lambda share, text: None)
    assert "".join(order) == "abcbcacab"
    assert [len(writing.seconds) for writing in writings] == [2, 2, 2]


def test_comparisons_with_a_draft_model_are_omitted_without_one():
    everyone = [writer(name) for name in {n for pair in PAIRS[:2] for n in pair}]
    compared = compare(time_rounds(everyone, [Task("t", "p")], 1, lambda share, text: None))
    assert [(c.first, c.second) for c in compared] == list(PAIRS[:2]) and compared[0].first == PLAIN


def writer(name: str, write=lambda asked: None) -> Baseline:
    return Baseline(name, lambda task: None, write, lambda left: [1])


def test_a_failure_is_reported_with_its_reason_and_the_others_are_measured():
    def fail(asked):
        raise RuntimeError("no compiler here\nand much more")

    names = PAIRS[0]
    writings = time_rounds([writer(names[0]), writer(names[1], fail)], [Task("t", "p")], 2, lambda share, text: None)
    (compared,) = compare(writings)
    assert compared.speeds[0] is not None and compared.speeds[1] is None and compared.ratio is None
    assert failures(writings) == [f"{names[1]} failed (RuntimeError: no compiler here)"]


def test_a_refused_prompt_ends_the_benchmark():
    def refuse(asked):
        raise Refusal("Shorten it.", "prompt")

    with pytest.raises(Refusal, match="Shorten it."):
        time_rounds([writer("a", refuse)], [Task("t", "p")], 1, lambda share, text: None)


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
    monkeypatch.setattr("playground.bench.bandwidth_limit.SIZES", {"cpu": 1 << 20})
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
    monkeypatch.setattr("playground.bench.timer.perf_counter", lambda: next(moments))
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


# --- shapes ---

@pytest.mark.parametrize("name, parameters", [("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("8b", 8_030_261_248)])
def test_a_shape_has_as_many_weights_as_the_model_it_is_named_after(name, parameters):
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(KNOWN[name].config()).num_parameters() == parameters


def test_a_network_of_random_weights_is_the_same_every_time_and_writes_with_a_padded_vocabulary():
    sizes = {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 8000}
    one, other = (
        assemble(Qwen2Config(**KNOWN["0.5b"].numbers | sizes), "small", Loading("cpu", "float32")) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.model.network.parameters(), other.model.network.parameters()))
    assert one.model.vocabulary == 8000 > len(one.model.tokenizer) and one.model.tokens.decode([7999]) == ""


@pytest.mark.parametrize(
    "loading, named", [(Loading("cpu", "float32", "nf4"), "CUDA"), (Loading("cpu", "float32", "int8"), "int8")]
)
def test_shapes_are_quantised_to_nf4_on_a_gpu_only(loading, named):
    with pytest.raises(Refusal, match=named):
        build("0.5b", loading)


def test_a_shape_that_does_not_fit_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr("playground.bench.model_shapes.free_bytes", lambda device: 10**9)
    with pytest.raises(Refusal, match="Llama 3.1 8B takes about .* in bfloat16, and 1.0 GB are free on cpu"):
        build("8b", Loading("cpu", "bfloat16"))


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
    assert "bench speed --json" in capsys.readouterr().err


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
