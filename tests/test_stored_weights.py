"""Checkpoints that are stored quantised: the library's text, true sizes, a name for the method, or one sentence."""
from __future__ import annotations

import importlib.util

import pytest
import torch
from toys import save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import playground
from playground.engine.loading import stored_weights
from playground.engine.loading.load import Loading, estimate, load
from playground.engine.loading.stored_weights import stored_form
from playground.errors import Refusal
from support import quantised_checkpoints as forms

PROMPT, END = "The red fox", 0
FORMS = {
    "int8 (stored)": lambda folder: forms.bitsandbytes(folder, load_in_8bit=True),
    "nf4 (stored)": lambda folder: forms.bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4 (stored)": lambda folder: forms.bitsandbytes(folder, load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "fp8 (stored)": lambda folder: forms.fp8(folder, rest=torch.float32),
    "mxfp4 (stored)": forms.mxfp4,
    "bitnet (stored)": forms.bitnet,
    "compressed-tensors int-quantized 8-bit (stored)": forms.compressed_tensors,
    "torchao (stored)": forms.torchao,
}
PACKAGES = {"compressed-tensors int-quantized 8-bit (stored)": "compressed_tensors", "torchao (stored)": "torchao"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint in each form, written once it is asked for."""
    written = {}

    def folder(name):
        if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name]):
            pytest.skip(f"{PACKAGES[name]} is not installed")
        if name not in written:
            written[name] = FORMS[name](tmp_path_factory.mktemp("stored") / "model")
        return str(written[name])

    return folder


def loaded(folder, **settings):
    return playground.load(folder, draft="none", device="cpu", **{"dtype": "float32"} | settings)


def written_by_the_library(folder, dtype=torch.float32):
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"})
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    return network.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:].tolist()


def without_end(ids):
    return list(ids)[:-1] if ids[-1] == END else list(ids)


@pytest.mark.parametrize("name", FORMS)
def test_a_stored_form_writes_the_text_of_generate_and_bears_its_name(folders, name):
    models = loaded(folders(name))
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=12)
    assert without_end(result.token_ids) == without_end(written_by_the_library(folders(name)))
    assert models.target.quantization == result.trace.headers[0].quantization == name


@pytest.mark.parametrize("name", FORMS)
def test_the_network_has_the_logits_of_from_pretrained(folders, name):
    network, _, facts = load(folders(name), Loading("cpu", "float32"))
    library = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32, device_map={"": "cpu"})
    ids = torch.arange(3, 40)[None]
    assert torch.equal(network(ids).logits, library(ids).logits)
    assert facts.quantization == name


@pytest.mark.parametrize("name", FORMS)
def test_an_estimate_of_a_stored_form_is_what_it_takes(folders, name):
    models, guess = loaded(folders(name)), estimate(folders(name), Loading("cpu", "float32"))
    taken = stored_weights.weight_bytes(models.target.network)  # after forwards, which decompress some forms
    assert guess.bytes == pytest.approx(taken, rel=0.1)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folders(name)))
    assert models.target.parameters == plain.num_parameters()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_fp8_leaves_in_bfloat16_is_read_in_the_dtype_of_the_run(tmp_path, dtype):
    folder = str(forms.fp8(tmp_path / "model"))
    network, _, _ = load(folder, Loading("cpu", dtype))
    assert {weights.dtype for weights in network.parameters()} == {getattr(torch, dtype)}
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cpu"})
    ids = torch.arange(3, 40)[None]
    error = (network(ids).logits - library(ids).logits).abs().max() / library(ids).logits.abs().max()
    assert error == 0 if dtype == "bfloat16" else 0 < error < 0.05


def test_a_gpu_of_the_machine_does_not_decide_for_the_cpu(tmp_path, monkeypatch):
    config = AutoConfig.from_pretrained(forms.fp8(tmp_path / "model"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(stored_weights, "is_kernels_available", lambda: True)
    assert stored_form("m", config, "cpu").dense and not stored_form("m", config, "cuda").dense
    monkeypatch.setattr(stored_weights, "is_kernels_available", lambda: False)
    assert stored_form("m", config, "cuda").dense


def test_a_form_whose_package_is_missing_names_it_before_weights_are_read(tmp_path, monkeypatch):
    if importlib.util.find_spec("gptqmodel"):
        pytest.skip("gptqmodel is installed")
    folder = str(forms.gptq(tmp_path / "model"))
    monkeypatch.setattr("playground.engine.loading.load.read_network", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(Refusal, match="stored in the form gptq 4-bit, .*optimum.* It needs gptqmodel as well"):
        loaded(folder)


@pytest.mark.parametrize("entry, says", [
    ({"quant_method": "nobody_knows"}, "names 'nobody_knows', which the transformers library does not read"),
    ({"bits": 4}, "names no method"),
    ({"quant_method": ["fp8"]}, "does not read"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32}, "awq 4-bit, .*gptqmodel"),
    ({"quant_method": "bitsandbytes"}, "without load_in_8bit or load_in_4bit"),
], ids=str)
def test_an_unreadable_form_is_one_sentence(tmp_path, entry, says):
    if "gptqmodel" in says and importlib.util.find_spec("gptqmodel"):
        pytest.skip("gptqmodel is installed")
    folder = forms.edited(save(tmp_path / "model"), quantization_config=entry)
    with pytest.raises(Refusal, match=says) as refused:
        loaded(str(folder))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["nf4 (stored)", "fp8 (stored)"])
def test_a_stored_form_is_not_quantised_again(folders, name):
    with pytest.raises(Refusal, match=f"stored as {name.split()[0]}, quantised already: choose no quantization"):
        loaded(folders(name), quantization="int8")


@pytest.mark.parametrize("name, takes", [("nf4 (stored)", "in nf4"), ("fp8 (stored)", "in float32")])
def test_a_stored_form_that_does_not_fit_is_not_to_be_quantised(folders, name, takes, monkeypatch):
    monkeypatch.setattr("playground.engine.loading.load.free_bytes", lambda device: 10_000)
    with pytest.raises(Refusal, match=f"takes about .* {takes}, and .* free on cpu: choose a smaller model"):
        load(folders(name), Loading("cpu", "float32"))


def test_packed_weights_do_not_compute_in_float64_and_dequantised_ones_do(folders):
    with pytest.raises(Refusal, match="nf4 .stored. weights cannot compute in float64"):
        loaded(folders("nf4 (stored)"), dtype="float64")
    models = loaded(folders("fp8 (stored)"), dtype="float64")
    assert models.target.dtype == torch.float64


@pytest.mark.parametrize("name, rounds", [
    ("int8 (stored)", True), ("fp8 (stored)", False), ("bitnet (stored)", True), ("torchao (stored)", False),
    ("compressed-tensors int-quantized 8-bit (stored)", True),
])
def test_layers_that_round_their_inputs_are_found(folders, name, rounds):
    """They decide how far the logits of one text may be from themselves when rows are batched otherwise."""
    network, _, _ = load(folders(name), Loading("cpu", "float32"))
    network(torch.arange(5)[None])
    assert stored_weights.rounds_inputs(network) == rounds
    assert loaded(folders(name)).target.tolerance == (0.15 if rounds else 1e-3)


def test_a_tensor_that_only_calls_itself_float32_is_not_plain():
    class Packed(torch.Tensor):
        def __tensor_flatten__(self):  # as of torchao's tensors, which wrap packed ones
            return [], None

    assert stored_weights.is_plain(torch.nn.Parameter(torch.ones(2)))
    assert not stored_weights.is_plain(torch.ones(2).as_subclass(Packed))
    assert not any(stored_weights.is_plain(torch.ones(2, dtype=dtype)) for dtype in (torch.int8, torch.float8_e4m3fn))
    assert not stored_weights.is_plain(None)


def test_quantised_layers_are_neither_fused_nor_copied_nor_trained(folders):
    from playground.training.frozen_network import FrozenNetwork

    packed, dense = loaded(folders("nf4 (stored)")).target, loaded(folders("fp8 (stored)")).target
    assert packed.fused is None and packed.parts is None and dense.fused is not None
    with pytest.raises(Refusal, match=r"are quantised \(nf4 .stored.\), and a draft head is trained"):
        FrozenNetwork(packed)


def test_a_zero_gpu_page_refuses_weights_that_a_gpu_must_read(folders):
    from playground.ui.server.zero_gpu import load_on_host

    settings = dict(draft="none", device="cpu", dtype="float32", quantization="none", progress=lambda *_: None)
    with pytest.raises(Refusal, match=r"quantised \(nf4 .stored.\) and are read on a GPU"):
        load_on_host(folders("nf4 (stored)"), **settings)
    assert load_on_host(folders("fp8 (stored)"), **settings).target.quantization == "fp8 (stored)"


def test_the_status_line_and_the_name_of_a_draft_say_how_weights_are_stored(folders):
    from playground.decoding.models import Models
    from playground.ui.models.status_line import described

    target = loaded(folders("fp8 (stored)")).target
    assert "fp8 (stored) · float32 · cpu" in described(Models(target))
    draft = loaded(folders("nf4 (stored)")).target
    result = playground.run("speculative", PROMPT, models=Models(target, draft), max_new_tokens=4)
    assert result.trace.headers[0].draft.endswith("model in nf4 (stored)")
