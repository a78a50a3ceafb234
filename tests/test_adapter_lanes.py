"""A lane with an adapter on the run's model, beside lanes without: the text, what a page sends, and what is refused."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from toys import byte_tokenizer

import playground
from playground.contract.lane_config import LaneConfig
from playground.engine.checkpoint.catalogue import BUNDLED_MODELS
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.ui.components.settings import Settings
from playground.ui.models.fits import needed_by
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.site import Site
from playground.weight_changes import WeightChanges

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def models():
    return playground.load("pocket", device="cpu", dtype="float32")


def adapter_of(target, folder: Path) -> Path:
    """A strong random adapter for every query projection."""
    torch.manual_seed(0)
    weights = {}
    for name, module in target.network.named_modules():
        if name.endswith("q_proj"):
            out, wide = module.weight.shape
            weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, wide)
            weights[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(out, 4)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "pocket", "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapter(models, tmp_path_factory) -> Path:
    return adapter_of(models.target, tmp_path_factory.mktemp("adapters") / "lora")


def compared(models, *lanes):
    return playground.compare(list(lanes), PROMPT, models=models, max_new_tokens=12)


@pytest.mark.oracle("greedy")
def test_a_lane_with_an_adapter_writes_the_text_of_the_adapted_model(models, adapter):
    plain, own = compared(models, "greedy", {"strategy": "greedy", "weights": f"adapter:{adapter}"})
    alone = playground.load(f"pocket + {adapter}", device="cpu", dtype="float32")
    assert own.logprobs == playground.run("greedy", PROMPT, models=alone, max_new_tokens=12).logprobs
    assert plain.logprobs == compared(models, "greedy")[0].logprobs != own.logprobs
    assert own.header.parts[-1].name == f"adapter:{adapter}" and own.header.quantization == "none"


def test_an_adapted_model_keeps_the_draft_of_its_base(models, adapter):
    alone = playground.load(f"pocket + {adapter}", device="cpu", dtype="float32")
    greedy, speculative = compared(alone, "greedy", "speculative")
    assert alone.draft.name == "pocket-draft" and greedy.text == speculative.text


def test_a_lane_may_be_quantised_and_adapted(models, adapter):
    weights = [f"{packed}adapter:{adapter}" for packed in ("", "nf4 + ")]
    plain, packed = compared(models, *({"strategy": "greedy", "weights": each} for each in weights))
    alone = playground.load("pocket", "none", "cpu", "float32", weights[1])
    assert packed.logprobs == compared(alone, "greedy")[0].logprobs != plain.logprobs
    assert packed.header.quantization == "nf4"


def test_an_adapter_with_other_tokens_fails_its_lane_alone(models, adapter):
    byte_tokenizer().save_pretrained(adapter)
    try:
        with pytest.raises(Refusal, match="adapter has another vocabulary than pocket .*model of the run"):
            compared(models, {"strategy": "greedy", "weights": f"adapter:{adapter}"})
        plain, own = compared(models, "greedy", {"strategy": "greedy", "weights": f"adapter:{adapter}"})
        assert plain.text and own.reason == "failed"
    finally:
        for file in adapter.iterdir():
            if not file.name.startswith("adapter_"):
                file.unlink()


def test_the_memory_of_an_adapted_lane_is_counted(adapter):
    plain, own = (needed_by(ModelRequest("pocket", "none", "cpu", "float32", weights)).bytes
                  for weights in ("none", f"adapter:{adapter}"))
    assert own > plain


# --- its name on every surface ---

def test_weights_are_a_quantisation_and_then_adapters():
    assert WeightChanges.read("") == WeightChanges()
    assert WeightChanges.read("nf4 + adapter:/a + adapter:org/b") == WeightChanges("nf4", ("/a", "org/b"))
    assert WeightChanges.read("adapter:/a").named("pocket") == "pocket + /a"


@pytest.mark.parametrize(("weights", "says"), [
    ("int9", "one of int8, nf4, fp4, adapter:FOLDER"),
    ("adapter:", "lack the adapter: name its folder"),
    ("adapter:/a + nf4", "name the quantisation first"),
    ("nf4 + /a", "one of int8"),
    ("adapter:" + "x" * 2000, "one of int8"),
    (" + ".join(["adapter:a"] * 9), "one of int8"),
])
def test_other_weights_are_refused_before_a_model_is_loaded(weights, says):
    with pytest.raises(Refusal, match=says):
        playground.compare([{"strategy": "greedy", "weights": weights}], PROMPT)


def test_a_link_keeps_an_adapter_and_what_lacks_one_to_be_refused():
    lanes = [{"strategy": "greedy", "weights": weights} for weights in ("nf4 + adapter:/a", "adapter:", "none", 4)]
    settings = Settings.from_code(Settings(prompt="x", lanes=lanes).to_code())
    assert [config.weights for config in settings.configs()] == ["nf4 + adapter:/a", "adapter:", "", ""]


def test_a_page_loads_a_lanes_adapter_and_a_public_one_refuses_it(adapter):
    lanes = [{"strategy": "greedy", "weights": f"adapter:{adapter}"}]
    site = Site(ModelRequest("pocket", "none", "cpu", "float32"), Rules())
    loading = site.chosen.weight_loads(Settings(prompt=PROMPT, lanes=lanes))[f"adapter:{adapter}"]
    assert loading.result().target.name == f"pocket + {adapter}"
    public = Site(ModelRequest("pocket", "none", "cpu", "float32"), Rules.for_visitors(False))
    with pytest.raises(Refusal, match="public page adds no adapters"):
        public.chosen.weight_loads(Settings(prompt=PROMPT, lanes=lanes))


def test_a_missing_adapter_is_one_sentence(models):
    with pytest.raises(Refusal, match="There is no folder /gone"):
        compared(models, LaneConfig(weights="adapter:/gone"))


@pytest.mark.parametrize("form", ["{0}", "pocket + {0}", "{1}", "{1}/model.safetensors", "{2}"])
def test_what_is_typed_into_the_model_field_loads_and_a_public_page_refuses_it(adapter, tmp_path, form):
    cache = tmp_path / "models--org--name"
    shutil.copytree(BUNDLED_MODELS / "pocket", cache / "snapshots" / "abc")
    name = form.format(adapter, BUNDLED_MODELS / "pocket", cache)
    site = Site(ModelRequest("pocket", "none", "cpu", "float32"), Rules())
    assert site.chosen.load(Settings(prompt=PROMPT, model=name, draft="none")).result().target.name == name
    public = Site(ModelRequest("pocket", "none", "cpu", "float32"), Rules.for_visitors(False))
    with pytest.raises(Refusal, match="offers only the models in its list"):
        public.chosen.load(Settings(prompt=PROMPT, model=name))
