"""What people have on disk is recognised by its content: it loads, or one sentence names what it is and what to do."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import network, save

import playground
from playground.engine.loading import read_tokenizer
from playground.engine.loading.load import Loading, Shelf, estimate, load
from playground.engine.loading.loaded_model import loaded_model
from playground.errors import Refusal

CPU = Loading("cpu", "float32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def same_weights(path: Path, saved: Path) -> bool:
    ours, plain = (load(str(place), CPU)[0].state_dict() for place in (path, saved))
    return ours.keys() == plain.keys() and all(torch.equal(ours[name], plain[name]) for name in plain)


def takes(path: Path) -> tuple[int, int]:
    cost = estimate(str(path), CPU)
    return cost.bytes, cost.parameters


def cached(copy: Path, *snapshots: str, main: str = "") -> Path:
    """A folder of the hub's cache with these snapshots."""
    root = copy.parent / "models--org--name"
    for name in snapshots:
        shutil.copytree(copy, root / "snapshots" / name)
    if main:
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(main)
    return root


def test_a_folder_of_the_hubs_cache_means_its_only_snapshot(copy, saved):
    root = cached(copy, "abc")
    assert same_weights(root, saved) and same_weights(root / "snapshots", saved)


def test_a_folder_of_the_hubs_cache_means_the_snapshot_of_main(copy, saved):
    root = cached(copy, "abc", "def", main="def\n")
    (root / "snapshots" / "abc" / "model.safetensors").unlink()
    assert same_weights(root, saved)


def test_a_cache_with_several_snapshots_or_none_is_refused(copy):
    with pytest.raises(Refusal, match=r"holds 2 snapshots: name one of them, such as .*snapshots/abc"):
        load(str(cached(copy, "abc", "def", main="../../copy")), CPU)
    (copy / "snapshots").mkdir()
    (copy / "config.json").unlink()
    with pytest.raises(Refusal, match="without a snapshot"):
        load(str(copy), CPU)


def test_a_file_of_weights_means_the_model_in_its_folder(copy, saved):
    assert same_weights(copy / "model.safetensors", saved)
    with pytest.raises(Refusal, match="Folders cannot be opened here"):
        Shelf(loaded_model, folders=False).get(str(copy / "model.safetensors"), CPU)


def test_a_file_by_a_relative_path_is_no_hub_id(copy, monkeypatch):
    monkeypatch.chdir(copy)
    assert playground.load(Path("model.safetensors"), draft="none", device="cpu").target.vocabulary
    with pytest.raises(Refusal, match="Folders cannot be opened here"):
        Shelf(loaded_model, folders=False).get("model.safetensors", CPU)


def test_weights_of_a_variant_are_loaded_by_it(copy, saved):
    (copy / "model.safetensors").rename(copy / "model.fp16.safetensors")
    assert same_weights(copy, saved) and takes(copy) == takes(saved)


def test_sharded_weights_of_a_variant_are_loaded_by_it(copy, saved):
    load(str(copy), CPU)[0].save_pretrained(copy, variant="fp16", max_shard_size="20KB")
    (copy / "model.safetensors").unlink()
    assert len(list(copy.glob("model.fp16-*"))) > 1
    assert same_weights(copy, saved) and takes(copy) == takes(saved)
    next(copy.glob("model.fp16-00002*")).unlink()
    with pytest.raises(Refusal, match="lacks model.fp16-00002"):
        load(str(copy), CPU)


def test_a_named_file_chooses_among_variants_and_usual_weights(copy, saved):
    other = {name: weight + 1 for name, weight in load_file(copy / "model.safetensors").items()}
    for variant in ("fp16", "bf16"):
        save_file(other, copy / f"model.{variant}.safetensors", {"format": "pt"})
    assert same_weights(copy, saved) and not same_weights(copy / "model.bf16.safetensors", saved)
    (copy / "model.safetensors").unlink()
    with pytest.raises(Refusal, match=r"several variants \(bf16, fp16\).*name one of the files"):
        load(str(copy), CPU)


def written(file: str, content: bytes = b"", keep: bool = False):
    """A folder with one more file, without the config and weights unless they are kept."""
    def change(folder: Path) -> None:
        for name in () if keep else ("config.json", "model.safetensors"):
            (folder / name).unlink()
        (folder / file).write_bytes(content)
    return change


def renamed(file: str):
    return lambda folder: (folder / "model.safetensors").rename(folder / file)


def pointer(file: str):
    return written(file, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", keep=True)


def dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blobs" / "0")


def several_models(folder: Path) -> None:
    (folder / "config.json").unlink()
    for name in ("checkpoint-5", "checkpoint-9"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")


FOLDERS = {
    "a pointer of Git LFS as weights": (pointer("model.safetensors"), "pointer of Git LFS.*run `git lfs pull`"),
    "a pointer of Git LFS as tokenizer": (pointer("tokenizer.json"), "tokenizer.json of .* pointer of Git LFS"),
    "links to blobs that are gone": (dangling, "model.safetensors of .* is a link to nothing: fetch"),
    "folders of models": (several_models, r"folders of models \(checkpoint-5, checkpoint-9\): name one"),
    "weights under another name": (renamed("weights.safetensors"), "does not use .weights.safetensors.: rename"),
    "parts without their list": (renamed("model-00001-of-00002.safetensors"), "without their list.*index.json"),
    "pickled weights": (renamed("pytorch_model.bin"), "only pickled weights.*pytorch_model.bin.*save_pretrained"),
    "a pickled checkpoint": (renamed("model.pt"), "only pickled weights .model.pt"),
    "an unfinished download": (renamed("model.safetensors.incomplete"), "unfinished download.*fetch the model again"),
    "ONNX": (renamed("model.onnx"), "weights for ONNX .model.onnx."),
    "TensorFlow": (renamed("tf_model.h5"), "weights for TensorFlow"),
    "Flax": (renamed("flax_model.msgpack"), "weights for Flax"),
    "the makers' own format": (written("params.json"), "original format of their makers .params.json."),
    "diffusers": (written("model_index.json"), "pipeline of diffusers"),
    "DeepSpeed": (written("zero_to_fp32.py"), "training checkpoint in parts.*consolidate"),
    "MLC": (written("mlc-chat-config.json"), "compiled for MLC"),
}


@pytest.mark.parametrize("form", FOLDERS)
def test_a_folder_that_cannot_be_loaded_is_named_for_what_it_is(copy, form):
    change, says = FOLDERS[form]
    change(copy)
    with pytest.raises(Refusal, match=says) as refused:
        load(str(copy), CPU)
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


FILES = {
    "model.pt": (b"PK\x03\x04", "an archive or pickled weights"),
    "pytorch_model.bin": (b"\x80\x02", "pickled weights, which can run code"),
    "model.tar.gz": (b"\x1f\x8b", "an archive: unpack it"),
    "model.h5": (b"\x89HDF", "for Keras"),
    "ggml-model.bin": (b"tjgg", "GGML file, older than GGUF"),
    "lfs.safetensors": (b"version https://git-lfs.github.com/spec/v1", "pointer of Git LFS"),
    "notes.txt": (b"hello", "a file that holds no model: name the folder"),
    "weights.safetensors": (b"", "does not use for weights: rename"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_model_is_named_for_what_it_is(copy, name):
    content, says = FILES[name]
    (copy / name).write_bytes(content)
    with pytest.raises(Refusal, match=says):
        load(str(copy / name), CPU)


def test_weights_without_a_config_beside_them_are_refused(copy):
    (copy / "config.json").unlink()
    with pytest.raises(Refusal, match="holds weights alone: put the config.json and tokenizer.json"):
        load(str(copy / "model.safetensors"), CPU)


# --- numbers that are none ---

def changed(folder: Path, change) -> str:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(("value", "says"), [(float("nan"), "are NaN in"), (float("inf"), "are infinite numbers in")])
def test_a_weight_that_is_no_number_is_named(copy, value, says):
    name = "model.embed_tokens.weight"  # a row that no check of a text need touch
    folder = changed(copy, lambda weights: weights[name][-1, 3].fill_(value))
    with pytest.raises(Refusal, match=f"{says} the weights {name} of .*damaged"):
        playground.load(folder, draft="none", device="cpu")


def test_large_finite_weights_are_no_damage(copy):
    folder = changed(copy, lambda weights: weights["lm_head.weight"].fill_(3e38))
    with pytest.raises(Refusal, match="logits of .* are NaN or infinite in float32 although its weights are finite"):
        playground.load(folder, draft="none", device="cpu")


@pytest.mark.parametrize(("factor", "says"), [(2e6, "The weights lm_head.weight of"), (3e5, "The logits of")])
def test_what_overflows_in_float16_is_named_with_the_dtypes_that_do_not(copy, factor, says):
    folder = changed(copy, lambda weights: weights["lm_head.weight"].mul_(factor))
    with pytest.raises(Refusal, match=f"{says} .* overflow in float16.*choose bfloat16 or float32"):
        playground.load(folder, draft="none", device="cpu", dtype="float16")
    assert playground.load(folder, draft="none", device="cpu", dtype="float32").target


# --- tokenizers with code of their own ---

def own_tokenizer(folder: Path) -> None:
    entry = {"tokenizer_class": "FooTokenizer", "auto_map": {"AutoTokenizer": ["t.Foo", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(entry))
    (folder / "t.py").write_text("raise SystemExit('this code was run')")


def test_of_a_tokenizer_with_its_own_code_the_tokenizer_json_is_read(copy, saved):
    own_tokenizer(copy)
    ours, plain = (load(str(folder), CPU)[1] for folder in (copy, saved))
    assert ours.get_vocab() == plain.get_vocab() and ours.encode("a text") == plain.encode("a text")


def test_a_tokenizer_that_drops_merges_at_random_reads_a_text_in_one_way(copy, saved):
    """As some are saved after training with BPE dropout."""
    stored = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    stored["model"]["dropout"] = 0.9
    (copy / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    ours, plain = (load(str(folder), CPU)[1] for folder in (copy, saved))
    text = "The green bird sings, and the red fox listens."
    assert all(ours.encode(text) == plain.encode(text) for _ in range(5))


def test_a_tokenizer_of_sentencepiece_alone_names_the_packages_that_read_it(copy, monkeypatch):
    """Without them the library takes its file for one of tiktoken."""
    monkeypatch.setattr(read_tokenizer, "is_sentencepiece_available", lambda: False)
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(Refusal, match=r"for SentencePiece alone \(tokenizer.model\): install the packages"):
        load(str(copy), CPU)
    (copy / "tokenizer.model").write_bytes(b"IQ== 0\n")  # of tiktoken
    with pytest.raises(Refusal, match="cannot be read.*tiktoken"):
        load(str(copy), CPU)


def test_a_tokenizer_that_is_code_alone_is_refused(copy):
    own_tokenizer(copy)
    (copy / "tokenizer.json").rename(copy / "tokenizer.model")
    with pytest.raises(Refusal, match="code of its own, which is never run here: save a tokenizer.json"):
        load(str(copy), CPU)


def test_a_network_is_checked_in_every_number_however_it_is_loaded():
    broken = network()
    broken.model.layers[0].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(Refusal, match="NaN in the weights model.layers.0.mlp.down_proj.weight"):
        loaded_model(broken, None, "broken", "", "none")
