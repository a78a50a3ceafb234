"""Draft heads that are named in place of a draft model: recognised by their config, or refused in a sentence."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved import save_models
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

import playground
from playground.cli import main
from playground.contract import find
from playground.decoding.models import Models
from playground.engine.loading.load import Shelf
from playground.errors import Refusal
from playground.events import Failed
from support.speculation import speculative_lane
from support.speculative_runs import recorded

WIDTH, DEPTH, VOCABULARY = 32, 2, 319  # of the target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def named(layer: str, name: str) -> dict[str, Tensor]:
    """Random weights of a strategy's own network, with a prefix of another name for its layer."""
    chance = torch.Generator().manual_seed(0)
    return {
        key.replace("midlayer.", layer): torch.randn(tensor.shape, generator=chance) * 0.3
        for key, tensor in find(name).untrained(WIDTH, DEPTH).items()
    }


SHAPE = {"num_attention_heads": 1, "head_dim": WIDTH, "rms_norm_eps": 1e-5, "hidden_size": WIDTH}


def eagle_3(layer: str) -> dict[str, Tensor]:
    ids = torch.arange(40) * 3
    extra = {"lm_head.weight": torch.randn(40, WIDTH), "d2t": ids - torch.arange(40)}
    return {**named(layer, "eagle_3"), **extra}


def dflash() -> tuple[dict, dict[str, Tensor]]:
    config = MuseGlimmerAssistantConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, block_size=4, mask_token_id=7, target_layer_ids=[0, 1],
    )  # fmt: skip
    return config.to_dict(), MuseGlimmerAssistantModel(config).state_dict()


def speculators_dflash() -> tuple[dict, dict[str, Tensor]]:
    weights = named("", "dflash")
    layers = weights["fc.weight"].shape[1] // WIDTH
    config = {
        "speculators_model_type": "dflash", "block_size": 4, "mask_token_id": 7,
        "aux_hidden_state_layer_ids": list(range(layers)),
        "transformer_layer_config": {**SHAPE, "num_hidden_layers": 1},
    }  # fmt: skip
    return config, weights


def heads() -> dict[str, tuple[str, dict, dict[str, Tensor]]]:
    """By format the strategy, the config and the weights."""
    medusa = {f"{k}.0.linear.{part}": torch.randn(*size) * 0.1 for k in range(2)
              for part, size in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))}  # fmt: skip
    aux = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    return {
        "speculators eagle3": (
            "eagle_3", {"speculators_model_type": "eagle3", "transformer_layer_config": SHAPE, **aux},
            eagle_3("layers.0."),
        ),
        "authors' EAGLE-3": (
            "eagle_3", {"architectures": ["LlamaForCausalLMEagle3"], **SHAPE, **aux}, eagle_3("midlayer."),
        ),
        "authors' EAGLE": ("eagle", {"architectures": ["LlamaForCausalLM"], **SHAPE}, named("", "eagle")),
        "Medusa": ("medusa", {"medusa_num_heads": 2, "version": "2"}, medusa),
        "the library's DFlash": ("dflash", *dflash()),
        "speculators dflash": ("dflash", *speculators_dflash()),
    }


def folder(path: Path, config: dict | None, weights: dict[str, Tensor]) -> str:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return str(path)


@pytest.mark.parametrize("kind", heads())
def test_a_head_is_recognised_and_drafts_for_its_target(saved, tmp_path, kind):
    strategy, config, weights = heads()[kind]
    models = playground.load(saved.target, folder(tmp_path / "head", config, weights), dtype="float64")
    assert models.draft is None and list(models.heads) == [strategy]
    session, events = recorded(speculative_lane(strategy, "greedy_match"), models, 10)
    assert not [event for event in events if isinstance(event, Failed)]
    assert any(event.kind == "draft" for event in events)
    plain, _ = recorded(speculative_lane("prompt_lookup", "greedy_match"), models, 10)
    assert session._runners[0].lane.tokens == plain._runners[0].lane.tokens


def test_a_lane_with_a_draft_model_says_which_drafter_the_head_is_for(saved, tmp_path):
    strategy, config, weights = heads()["Medusa"]
    models = playground.load(saved.target, folder(tmp_path / "head", config, weights))
    _, events = recorded(speculative_lane("draft_model"), models)
    assert "choose the drafter medusa" in events[-1].message
    _, events = recorded(speculative_lane("eagle"), models)
    assert "has not been fitted" in events[-1].message


def test_the_shell_takes_a_head_as_the_draft(saved, tmp_path, capsys):
    strategy, config, weights = heads()["authors' EAGLE"]
    place = folder(tmp_path / "head", config, weights)
    command = ["run", "speculative", "--model", saved.target, "--draft", place, "--prompt", "The green bird"]
    assert main([*command, "--with", "eagle_2", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out


def refused() -> dict[str, tuple[dict | None, dict[str, Tensor], str]]:
    eagle = eagle_3("layers.0.")
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": SHAPE}
    library, weights = dflash()
    return {
        "width": (config, {**eagle, "fc.weight": torch.zeros(WIDTH, 3 * 48)}, "hidden size 48, and .* has 32"),
        "vocabulary": (config, {**eagle, "t2d": torch.zeros(99, dtype=torch.bool)}, "vocabulary 99, and .* has 319"),
        "layers": ({**library, "target_layer_ids": [0, 9]}, weights, "output of layer 10, and .* has 2 layers"),
        "mask": ({**library, "mask_token_id": 500}, weights, "token 500, and .* has 319"),
        "no config": (None, eagle, "has no config.json"),
        "another kind": ({"speculators_model_type": "other"}, eagle, "of the kind other, which is not supported"),
        "no vector for masks": (
            {**config, "speculators_model_type": "peagle", "mask_token_id": 3,
             "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, eagle, "no network can be made of",
        ),
        "lacking": (config, {"norm.weight": torch.zeros(WIDTH)}, "lacks the weights fc.weight"),
    }


@pytest.mark.parametrize("case", refused())
def test_what_does_not_fit_is_refused_in_a_sentence_with_both_sizes(saved, tmp_path, case):
    config, weights, says = refused()[case]
    with pytest.raises(Refusal, match=says) as refusal:
        playground.load(saved.target, folder(tmp_path / "head", config, weights))
    assert str(refusal.value).count(". ") == 0


@pytest.mark.parametrize("kind", ["pickle", "cut", "config"])
def test_pickles_cut_files_and_damaged_configs_are_refused(saved, tmp_path, kind):
    _, config, weights = heads()["Medusa"]
    place = Path(folder(tmp_path / "head", config, weights))
    file = place / "model.safetensors"
    if kind == "pickle":
        file.rename(place / "medusa_lm_head.pt")
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:200])
    else:
        (place / "config.json").write_text("{")
    says = {"pickle": "are a pickle, which can execute code", "cut": "is damaged", "config": "has no tokenizer"}
    with pytest.raises(Refusal, match=says[kind]):
        playground.load(saved.target, str(place))


def test_no_folder_is_opened_where_none_may_be(saved, tmp_path):
    _, config, weights = heads()["Medusa"]
    shelf = Shelf(lambda *loaded: None, folders=False)
    with pytest.raises(Refusal, match="Folders cannot be opened here"):
        playground.load("pocket", folder(tmp_path / "head", config, weights), shelf=shelf)


def test_other_models_are_drafts_as_before(saved):
    models = playground.load(saved.target, saved.draft)
    assert isinstance(models, Models) and models.draft is not None and not models.heads
