"""The limits on a config.json let every config of the library through, and stop counts that would take memory."""
from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from playground.engine.checkpoint.config_limits import check_raw_config
from playground.errors import Refusal

CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
INVALID = {"gemma4_assistant", "nougat"}  # whose own defaults the library refuses


def test_the_default_config_of_every_causal_type_is_allowed(tmp_path):
    checked = 0
    for kind in CAUSAL:
        if kind in INVALID:
            continue
        (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
        check_raw_config(kind, tmp_path / "config.json")
        checked += 1
    assert checked == len(set(CAUSAL) - INVALID) > 180


@pytest.mark.slow
def test_the_default_config_of_every_other_type_is_allowed(tmp_path):
    """Text parts of multimodal types, classifiers, and what a checkpoint may hold beside a language model."""
    kinds = sorted(set(CONFIG_MAPPING_NAMES) - set(CAUSAL) - INVALID)
    for kind in kinds:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
        check_raw_config(kind, tmp_path / "config.json")
    assert len(kinds) > 500


@pytest.mark.parametrize("entry", [
    "vocab_size_per_layer_input", "moe_shared_expert_intermediate_size", "share_expert_dim", "expert_ffn_hidden_size",
])
def test_a_size_with_layer_or_expert_in_its_name_is_no_count(tmp_path, entry):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {entry: 262_144}}))
    check_raw_config("model", tmp_path / "config.json")


@pytest.mark.parametrize("entry", ["num_hidden_layers", "n_layer", "num_experts", "n_routed_experts", "num_labels"])
def test_a_count_that_would_take_memory_is_refused(tmp_path, entry):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {entry: 10_000_000}}))
    with pytest.raises(Refusal, match=f"gives {entry} a value beyond"):
        check_raw_config("model", tmp_path / "config.json")
