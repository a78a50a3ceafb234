"""Files that do not hold the weights their config.json asks for: the refusal names the cause and what to correct."""
from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from toys import network, save

import playground
from playground.engine.loading.load import Loading, load
from playground.engine.loading.missing_weights import Gaps
from playground.errors import Refusal
from support.quantised_checkpoints import bitsandbytes, edited, fp8, read, stored


def renamed(folder: Path, name) -> Path:
    tensors = {name(key): tensor for key, tensor in read(folder).items()}
    save_file({key: tensor for key, tensor in tensors.items() if key}, folder / "model.safetensors", {"format": "pt"})
    return folder


def leftover(folder: Path, write) -> Path:
    """A checkpoint in full precision with the quantization_config of one that is quantised."""
    config = (write(folder) / "config.json").read_bytes()
    (save(folder) / "config.json").write_bytes(config)
    return folder


CHANGED = {
    "torch.compile": (lambda folder: renamed(folder, "_orig_mod.{}".format), r"named _orig_mod\.\.\.\.,.* inside of"),
    "DataParallel": (lambda folder: renamed(folder, "module.{}".format), "as a wrapper such as torch.compile or Data"),
    "no head": (lambda folder: stored(folder, {}, ("lm_head.weight",)), "no lm_head.weight,.*without its head; save"),
    "the base model": (
        lambda folder: renamed(folder, lambda key: "" if "lm_head" in key else key.removeprefix("model.")),
        "no lm_head.weight,.*set tie_word_embeddings to true",
    ),
    "more layers": (lambda folder: edited(folder, num_hidden_layers=4), "asks for 4 layers and 2 are stored; corr"),
    "a part of a layer": (lambda folder: stored(folder, {}, ("1.mlp.up_proj.weight",)), "no model.layers.1.mlp.up"),
    "more tokens": (lambda folder: edited(folder, vocab_size=325), r"is \[320, 64\] in.*\[325, 64\] by.*vocab_size"),
    "another width": (lambda folder: edited(folder, intermediate_size=96), r"128.* by config.json; correct that size"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_the_cause_of_missing_weights_is_named(tmp_path, case):
    change, says = CHANGED[case]
    with pytest.raises(Refusal, match=f"do not belong to its config.json: .*{says}") as refused:
        load(str(change(save(tmp_path / "model"))), Loading("cpu"))
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


@pytest.mark.parametrize(("write", "says"), [
    (lambda folder: bitsandbytes(folder, load_in_8bit=True), "stored as int8, and its files hold them in full prec"),
    (lambda folder: bitsandbytes(folder, load_in_4bit=True), "stored as fp4, .*: remove quantization_config there"),
    (fp8, "stored as fp8, and its files hold them in full precision"),
])
def test_a_quantization_config_that_was_left_over_is_named(tmp_path, write, says):
    """As after an adapter was merged into the full weights of a model that had been loaded quantised."""
    with pytest.raises(Refusal, match=says):
        playground.load(str(leftover(tmp_path / "model", write)), draft="none", device="cpu")


def test_scales_that_are_missing_are_those_of_a_quantisation_that_the_files_do_not_have():
    gaps = Gaps(missing=["model.layers.0.mlp.up_proj.qweight", "model.layers.0.mlp.up_proj.scales"])
    assert "says that the weights are quantised, and they hold no model.layers.0" in gaps.cause(network())


def test_a_config_that_asks_for_tuples_does_not_keep_a_model_from_running(tmp_path):
    folder = edited(save(tmp_path / "model"), return_dict=False)
    models = playground.load(str(folder), draft="none", device="cpu")
    plain = playground.load(str(save(tmp_path / "plain")), draft="none", device="cpu")
    ours, theirs = (playground.run("greedy", "The fox", models=each, max_new_tokens=4) for each in (models, plain))
    assert ours.token_ids == theirs.token_ids
