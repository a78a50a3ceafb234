"""A LoRA adapter on its base model computes what peft computes, and what does not fit is refused in one sentence."""
from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import byte_tokenizer, network, save

import playground
from playground.engine.checkpoint.adapter_config import AdapterConfig
from playground.engine.loading.load import Loading, Shelf, estimate, load
from playground.engine.loading.loaded_model import loaded_model
from playground.errors import Refusal

CPU = Loading("cpu", "float32")
IDS = torch.tensor([[5, 80, 200, 31, 7, 300, 2, 64]])
MODULE = "model.layers.0.self_attn.q_proj"
LINEAR = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Saved bases: a llama with an lm_head of its own, one whose lm_head is tied, and a gpt2."""
    root = tmp_path_factory.mktemp("bases")
    found = {kind: save(root / kind, kind) for kind in ("llama", "gpt2")}
    tied = network("llama")
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(root / "tied")
    byte_tokenizer().save_pretrained(root / "tied")
    return found | {"tied": root / "tied"}


def config_of(base: Path, **changes) -> dict:
    return {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8} | changes


def factors(rank: int = 4, seed: int = 0, out: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(shape, generator=generator) for shape in ((rank, 64), (out, rank)))
    return {f"base_model.model.{MODULE}.lora_A.weight": down, f"base_model.model.{MODULE}.lora_B.weight": up}


def written(folder: Path, config: dict | None, weights: dict[str, Tensor] | None) -> Path:
    """An adapter written by hand."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, folder / "adapter_model.safetensors")
    return folder


def logits(name: str | Path, **how) -> Tensor:
    with torch.no_grad():
        return load(str(name), Loading("cpu", **{"dtype": "float32"} | how))[0](IDS).logits[0]


# --- against peft ---

def by_peft(base: Path, folder: Path, settings: dict, seed: int = 0) -> Tensor:
    """Make an adapter with random weights, save it, and compute the logits [n, V] with peft, unmerged."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM
    torch.manual_seed(seed)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(**{"init_lora_weights": False} | settings))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad and not name.endswith("lora_magnitude_vector.default.weight"):
                weight.add_(0.1 * torch.randn_like(weight))
    adapted.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    with torch.no_grad():
        return again.eval()(IDS).logits[0]


FORMS = {
    "plain": ("llama", dict(target_modules=LINEAR)),
    "every linear layer": ("llama", dict(target_modules="all-linear", r=3, lora_alpha=5)),
    "rank patterns": ("llama", dict(target_modules=LINEAR, rank_pattern={"v_proj": 2, "layers.1.mlp.down_proj": 7})),
    "alpha patterns": ("llama", dict(target_modules=LINEAR, alpha_pattern={r"layers\.1\..*proj": 31, "q_proj": 1})),
    "rank-stabilised": ("llama", dict(target_modules=LINEAR, use_rslora=True, rank_pattern={"v_proj": 2})),
    "DoRA": ("llama", dict(target_modules=LINEAR, use_dora=True)),
    "biases of B": ("llama", dict(target_modules=LINEAR, lora_bias=True)),
    "the lm_head saved whole": ("llama", dict(target_modules=LINEAR, modules_to_save=["lm_head"])),
    "a norm saved whole": ("llama", dict(target_modules=LINEAR, modules_to_save=["norm"])),
    "embeddings and lm_head": ("llama", dict(target_modules=["embed_tokens", "lm_head"])),
    "trained tokens": ("llama", dict(target_modules=LINEAR, trainable_token_indices=[5, 80, 300])),
    "tied embeddings, changed alone": ("tied", dict(target_modules=["q_proj", "embed_tokens"])),
    "a tied lm_head saved whole": ("tied", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "trained tokens of tied embeddings": ("tied", dict(target_modules=["q_proj"], trainable_token_indices=[5, 80])),
    "layers of gpt2": ("gpt2", dict(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "layers of gpt2 with DoRA": ("gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
    "biases of gpt2": ("gpt2", dict(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, bias="all")),
    "biases of its layers": ("gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only")),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_computes_what_peft_computes(bases, tmp_path, form):
    kind, settings = FORMS[form]
    expected = by_peft(bases[kind], tmp_path / "lora", settings)
    scale = expected.abs().max().clamp(min=1.0)
    assert (logits(tmp_path / "lora") - expected).abs().max() < 1e-5 * scale
    assert (logits(bases[kind]) - expected).abs().max() > 1e-2 * scale


@pytest.mark.parametrize("wrong", ["rank-stabilised", "alpha patterns"])
def test_an_adapter_with_another_scale_would_fail_that_comparison(bases, tmp_path, wrong, monkeypatch):
    kind, settings = FORMS[wrong]
    expected = by_peft(bases[kind], tmp_path / "lora", settings)
    monkeypatch.setattr(AdapterConfig, "scale", lambda self, module, rank: self.alpha / rank)
    assert (logits(tmp_path / "lora") - expected).abs().max() > 1e-3


def test_an_adapter_beside_quantised_weights_adds_what_peft_adds(bases, tmp_path):
    by_peft(bases["llama"], tmp_path / "lora", FORMS["plain"][1])
    import peft
    base = load(str(bases["llama"]), Loading("cpu", "float32", "nf4"))[0]
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "lora").eval()(IDS).logits[0]
    assert (logits(tmp_path / "lora", quantization="nf4") - expected).abs().max() < 1e-5
    assert (logits(bases["llama"], quantization="nf4") - expected).abs().max() > 1e-2


# --- against the formula ---

@pytest.mark.parametrize("stabilised", [False, True])
def test_a_merged_weight_is_w_plus_scale_b_a(bases, tmp_path, stabilised):
    adapter = written(tmp_path / "lora", config_of(bases["llama"], use_rslora=stabilised), factors())
    down, up = factors().values()
    merged = load(str(adapter), CPU)[0].get_submodule(MODULE).weight
    plain = load(str(bases["llama"]), CPU)[0].get_submodule(MODULE).weight
    torch.testing.assert_close(merged, plain + 8 / (math.sqrt(4) if stabilised else 4) * up @ down)


def test_an_adapter_of_zeros_leaves_the_base_to_the_bit(bases, tmp_path):
    weights = {name: weight * ("lora_A" in name) for name, weight in factors().items()}
    adapter = written(tmp_path / "lora", config_of(bases["llama"]), weights)
    assert torch.equal(logits(adapter), logits(bases["llama"]))


def test_a_base_may_be_named_and_several_adapters_added(bases, tmp_path):
    first = written(tmp_path / "first", config_of("org/nowhere"), factors())
    second = written(tmp_path / "second", config_of("org/nowhere"), factors(seed=1))
    both, *one = (load(f"{bases['llama']} + {names}", CPU)[0].get_submodule(MODULE).weight
                  for names in (f"{first} + {second}", first, second))
    plain = load(str(bases["llama"]), CPU)[0].get_submodule(MODULE).weight
    torch.testing.assert_close(both, one[0] + one[1] - plain)


def test_a_base_beside_its_adapter_is_found(bases, tmp_path):
    shutil.copytree(bases["llama"], tmp_path / "base")
    adapter = written(tmp_path / "lora", config_of(Path("../base")), factors())
    assert not torch.equal(logits(adapter), logits(tmp_path / "base"))


def test_an_adapter_runs_on_the_bundled_model_and_is_named(tmp_path):
    plain = playground.load("pocket", draft="none", device="cpu").target
    name = next(name for name, _ in plain.network.named_modules() if name.endswith("q_proj"))
    out, wide = plain.network.get_submodule(name).weight.shape
    weights = {f"base_model.model.{name}.lora_{part}.weight": torch.randn(shape)
               for part, shape in {"A": (2, wide), "B": (out, 2)}.items()}
    adapter = written(tmp_path / "lora", config_of("pocket"), weights)
    models = playground.load(str(adapter), device="cpu")
    result = playground.run("greedy", "Once upon a time", models=models, max_new_tokens=8)
    assert models.target.name == str(adapter) and models.target.revision.startswith(plain.revision + "+")
    assert models.target.fused is not None  # merged weights keep the fast path
    assert result.logprobs != playground.run("greedy", "Once upon a time", models=playground.load(
        "pocket", draft="none", device="cpu"), max_new_tokens=8).logprobs


def test_the_tokenizer_beside_an_adapter_is_used(bases, tmp_path):
    adapter = written(tmp_path / "lora", config_of(bases["llama"]), factors())
    byte_tokenizer(template="Of the adapter.").save_pretrained(adapter)
    assert load(str(adapter), CPU)[1].chat_template == "Of the adapter."


def test_new_tokens_of_an_adapter_are_rows_of_the_network(bases, tmp_path):
    rows = {f"base_model.model.{name}.weight": torch.randn(333, 64) for name in ("model.embed_tokens", "lm_head")}
    adapter = written(tmp_path / "lora", config_of(bases["llama"]), factors() | rows)
    assert playground.load(str(adapter), draft="none", device="cpu").target.vocabulary == 333


def test_an_estimate_counts_the_adapter(bases, tmp_path):
    adapter = written(tmp_path / "lora", config_of(bases["llama"]), factors())
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert estimate(str(adapter), CPU).bytes == estimate(str(bases["llama"]), CPU).bytes + size


def test_two_adapters_of_one_base_are_two_models(bases, tmp_path):
    shelf = Shelf(loaded_model)
    for seed in range(2):
        written(tmp_path / str(seed), config_of(bases["llama"]), factors(seed=seed))
    first, second = (load(str(tmp_path / str(seed)), CPU)[2].revision for seed in range(2))
    assert first != second and shelf.held() == []


# --- what does not fit ---

def with_both(folder: Path) -> None:
    shutil.copy(folder / "adapter_model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


REFUSED = {
    "another kind": (dict(peft_type="IA3"), factors(), "adapter of the kind IA3, and only LoRA is read"),
    "no base": (dict(base_model_name_or_path=None), factors(), "does not name its base model: name the base as well"),
    "a base that is gone": (dict(base_model_name_or_path="/gone"), factors(),
                            r"base model of the adapter .* cannot be used .There is no folder /gone.: name the base"),
    "an empty file": ({}, {}, "is empty"),
    "a module that is not there": (
        {}, {name.replace("layers.0", "layers.9"): weight for name, weight in factors().items()},
        r"changes model.layers.9.* does not have: it belongs to another base model"),
    "other shapes": ({}, factors(out=96), r"by a matrix of \[96, 64\] where .* has \[64, 64\]: it belongs to another"),
    "half of it": ({}, dict(list(factors().items())[:1]), "lacks one of the two matrices"),
    "aLoRA": (dict(alora_invocation_tokens=[1]), factors(), "after its invocation tokens alone"),
    "PiSSA": (dict(init_lora_weights="pissa"), factors(), "path_initial_model_for_weight_conversion"),
    "no number as alpha": (dict(lora_alpha="x"), factors(), "gives no usable lora_alpha"),
    "a pattern that takes for ever": (dict(alpha_pattern={"(a+)+b": 3}), factors(), "gives no usable lora_alpha"),
    "no weights": ({}, None, "has no adapter_model.safetensors"),
    "a parameter that is not there": ({}, {"base_model.model.score.weight": torch.ones(2, 64)},
                                      "changes score|replaces score"),
    "rows without a head": ({}, {"base_model.model.model.embed_tokens.weight": torch.ones(333, 64)},
                            "333 embedding rows and 320 rows of the lm_head"),
    "NaN": ({}, {name: weight * math.nan for name, weight in factors().items()}, f"NaN in the weights {MODULE}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_cannot_be_added_is_refused_with_the_cause(bases, tmp_path, case):
    changes, weights, says = REFUSED[case]
    adapter = written(tmp_path / "lora", config_of(bases["llama"], **changes), weights)
    with pytest.raises(Refusal, match=says) as refused:
        playground.load(str(adapter), draft="none", device="cpu")
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


def test_files_that_are_no_adapter_are_refused(bases, tmp_path):
    adapter = written(tmp_path / "lora", config_of(bases["llama"]), factors())
    with pytest.raises(Refusal, match="is no adapter, since it has no adapter_config.json"):
        load(f"{bases['llama']} + {bases['gpt2']}", CPU)
    (adapter / "adapter_model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(Refusal, match="missing or damaged"):
        load(str(adapter), CPU)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(Refusal, match="adapter_config.json of .* cannot be read"):
        load(str(adapter), CPU)


def test_an_adapter_on_an_adapter_and_a_folder_with_both_are_refused(bases, tmp_path):
    first = written(tmp_path / "first", config_of(bases["llama"]), factors())
    with pytest.raises(Refusal, match="is an adapter itself"):
        load(str(written(tmp_path / "second", config_of(first), factors())), CPU)
    with_both(first)
    with pytest.raises(Refusal, match="a whole model and an adapter as well: move"):
        load(str(first), CPU)


def test_a_public_page_opens_no_folder_as_an_adapter(bases, tmp_path):
    adapter = written(tmp_path / "lora", config_of("pocket"), factors())
    for name in (str(adapter), f"pocket + {adapter}"):
        with pytest.raises(Refusal, match="Folders cannot be opened here"):
            Shelf(loaded_model, folders=False).get(name, CPU)


def test_dora_on_quantised_weights_is_refused(bases, tmp_path):
    weights = factors() | {f"base_model.model.{MODULE}.lora_magnitude_vector": torch.ones(64)}
    adapter = written(tmp_path / "lora", config_of(bases["llama"], use_dora=True), weights)
    with pytest.raises(Refusal, match="more than a product .DoRA.*choose no quantization"):
        load(str(adapter), Loading("cpu", "float32", "nf4"))
    assert load_file(adapter / "adapter_model.safetensors").keys() == weights.keys()
