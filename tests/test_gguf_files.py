"""A GGUF file loads through the library's own reader and writes its text; what it cannot read is one sentence."""
from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import playground
from playground.engine.checkpoint import gguf_files
from playground.engine.checkpoint.catalogue import BUNDLED_MODELS
from playground.engine.loading.load import Loading, Shelf, estimate, load
from playground.engine.loading.loaded_model import loaded_model
from playground.errors import Refusal

POCKET = BUNDLED_MODELS / "pocket"
PROMPT = "Once upon a time"
CPU = Loading("cpu", "float32")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The bundled model as GGUF, by the type of its matrices. Skipped without the package gguf."""
    pytest.importorskip("gguf")
    from convert_to_gguf import convert
    root = tmp_path_factory.mktemp("gguf")
    found = {kind: root / f"pocket.{kind}.gguf" for kind in ("F32", "Q8_0", "Q4_0")}
    for kind, path in found.items():
        convert(POCKET, path, kind)
    return found


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_a_gguf_file_writes_the_text_of_the_librarys_generate(files, kind):
    path = files[kind]
    network = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(PROMPT, return_tensors="pt")
    expected = network.generate(**ids, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)[0]
    models = playground.load(path, draft="none", device="cpu", dtype="float32")
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=24)
    text = tokenizer.decode(expected[ids.input_ids.shape[1]:])
    assert text.startswith(result.text) and len(result.text) > 40
    assert models.target.quantization == f"gguf {kind} (stored)"


def test_a_file_in_full_precision_has_the_weights_and_tokens_of_the_model(files):
    network, tokenizer, facts = load(str(files["F32"]), CPU)
    plain, own, _ = load("pocket", CPU)
    weights = network.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.state_dict().items())
    assert tokenizer.get_vocab() == own.get_vocab() and tokenizer.chat_template == own.chat_template
    assert estimate(str(files["F32"]), CPU).bytes == pytest.approx(facts.bytes, rel=1e-3)


def test_an_estimate_counts_dequantised_weights(files):
    small, full = (estimate(str(files[kind]), CPU) for kind in ("Q4_0", "F32"))
    assert small == full or small.bytes == full.bytes
    assert estimate(str(files["Q4_0"]), Loading("cpu", "bfloat16")).bytes * 2 == small.bytes


def test_a_folder_with_one_file_means_it_and_with_several_asks_for_one(files, tmp_path):
    shutil.copy(files["Q8_0"], tmp_path / "blob-without-a-suffix")
    assert load(str(tmp_path), CPU)[2].quantization == "gguf Q8_0 (stored)"
    with pytest.raises(Refusal, match="holds 3 GGUF files: name one of them"):
        load(str(files["F32"].parent), CPU)


def test_a_file_is_not_quantised_again_and_a_public_page_opens_none(files):
    with pytest.raises(Refusal, match="quantised already: choose no quantization"):
        load(str(files["Q8_0"]), Loading("cpu", "float32", "nf4"))
    with pytest.raises(Refusal, match="Folders cannot be opened here"):
        Shelf(loaded_model, folders=False).get(str(files["Q8_0"]), CPU)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(architecture: str = "llama", version: int = 3, tensors: int = 0, **entries: int) -> bytes:
    """A file without tensors. entries: whole numbers, by key."""
    fields = b"".join(text(f"{architecture}.{key}") + struct.pack("<II", 4, value) for key, value in entries.items())
    named = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, 1 + len(entries)) + named + fields


DAMAGED = {
    "nothing after the magic": b"GGUF" + bytes(60),
    "cut in its header": header()[:40],
    "a version that is not there": header(version=9),
    "more tensors than a file can hold": header(tensors=2**60),
    "tensors that are missing": header(tensors=3),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, case):
    (tmp_path / "model.gguf").write_bytes(DAMAGED[case])
    with pytest.raises(Refusal, match="GGUF file .* is damaged or incomplete: fetch it again"):
        load(str(tmp_path / "model.gguf"), CPU)


def test_an_unknown_architecture_and_a_missing_package_are_named(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(header("zork"))
    with pytest.raises(Refusal, match="of the architecture zork, which the transformers library does not read"):
        load(str(tmp_path / "model.gguf"), CPU)
    (tmp_path / "model.gguf").write_bytes(header())
    monkeypatch.setattr(gguf_files, "is_gguf_available", lambda: False)
    with pytest.raises(Refusal, match="read with the package gguf: install it with `pip install gguf`"):
        load(str(tmp_path / "model.gguf"), CPU)


def test_a_count_that_would_take_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "is_gguf_available", lambda: True)
    (tmp_path / "model.gguf").write_bytes(header(block_count=2**31))
    with pytest.raises(Refusal, match="gives llama.block_count a value beyond 1,000"):
        load(str(tmp_path / "model.gguf"), CPU)


def test_weights_that_are_cut_short_are_refused(files, tmp_path):
    (tmp_path / "model.gguf").write_bytes(files["Q8_0"].read_bytes()[:-5000])
    with pytest.raises(Refusal, match="damaged or incomplete"):
        load(str(tmp_path / "model.gguf"), CPU)
