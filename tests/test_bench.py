"""The speed benchmark measures what it states; speed itself is not tested here."""
from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from toys import network
from transformers import AutoModelForCausalLM, Qwen2Config

from playground.bench.speed.baselines import Baseline, twin
from playground.bench.speed.model_shapes import KNOWN, assemble, build
from playground.bench.speed.speed_defaults import COMPILED
from playground.bench.speed.speed_prompts import Task
from playground.bench.speed.speed_report import processor
from playground.bench.speed.text_baselines import PAIRS, PLAIN
from playground.bench.speed.timing import compare, failures, time_rounds
from playground.engine.hooks import install_plans, use_own_attention
from playground.engine.loading.load import Loading
from playground.errors import Refusal
from support.speed_benches import folder, measured, saved  # noqa: F401

pytestmark = pytest.mark.bench

WITHOUT_COMPILING = [pair for pair in PAIRS if COMPILED not in pair]


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
    monkeypatch.setattr("playground.bench.speed.model_shapes.free_bytes", lambda device: 10**9)
    with pytest.raises(Refusal, match="Llama 3.1 8B takes about .* in bfloat16, and 1.0 GB are free on cpu"):
        build("8b", Loading("cpu", "bfloat16"))
