"""Stored tensors that a network leaves unused: those that would change the text are refused, others are named."""
from __future__ import annotations

import pytest
import torch
from toys import network, save
from transformers import AutoModelForCausalLM, DeepseekV3Config

from playground.engine.loading.load import Loading, load
from playground.engine.sequence_classifier import load_classifier
from playground.errors import Refusal
from support.quantised_checkpoints import edited, gptq, read, stored

LAYER = "model.layers.0.self_attn."
ONE = torch.ones(1)
CHANGED = {
    "an adapter inside": ({LAYER + "q_proj.lora_A.default.weight": ONE, LAYER + "q_proj.lora_B.default.weight": ONE},
                          "2 tensors .*lora_A.* adapter that is not merged; merge it"),
    "an adapter beside": ({"base_model.model." + LAYER + "q_proj.lora_A.weight": ONE}, "adapter that is not merged"),
    "a bias": ({LAYER + "q_proj.bias": torch.ones(64)}, "layers without biases; correct it, for example attention_"),
    "a bias of a norm": ({"model.norm.bias": torch.ones(64)}, "layers without biases"),
    "a bias of the lm_head": ({"lm_head.bias": torch.ones(320)}, "layers without biases"),
    "a norm": ({LAYER + "q_norm.weight": torch.ones(16)}, "left unused.*: correct its config.json, or choose another"),
    "scales": ({LAYER + "q_proj.weight_scale": ONE}, "quantised in a way that its config.json does not say"),
    "positions": ({"model.embed_positions.weight": torch.ones(9, 64)}, "correct its config.json, or choose another"),
    "a layer": ({"model.layers.2.mlp.up_proj.weight": torch.ones(128, 64)}, "asks for 2 of the stored layers"),
    "a layer without the name of its model": ({"layers.2.mlp.up_proj.weight": ONE}, "asks for 2 of the stored layers"),
}
HARMLESS = {
    "rotations of older releases": {LAYER + "rotary_emb.inv_freq": torch.ones(8)},
    "masks of older releases": {LAYER + "bias": torch.ones(1, 1, 9, 9), LAYER + "masked_bias": torch.tensor(-1e9)},
    "biases of zeros, as GPTQ exports have": {LAYER + "q_proj.bias": torch.zeros(64)},
    "scales of a quantised cache": {LAYER + "k_scale": ONE, LAYER + "v_scale": ONE},
    "layers for multi-token prediction": {"mtp.layers.0.weight": ONE, "model.mtp.norm.weight": ONE},
    "a tower for images": {"vision_tower.layers.0.weight": ONE, "model.visual.patch_embed.weight": ONE},
    "a head of another task": {"v_head.summary.weight": ONE, "score.weight": ONE},
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_tensor_of_a_module_that_stays_unused_is_refused(tmp_path, case):
    add, says = CHANGED[case]
    folder = stored(save(tmp_path / "model"), add)
    with pytest.raises(Refusal, match=says) as refused:
        load(str(folder), Loading("cpu"))
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


@pytest.mark.parametrize("case", HARMLESS)
def test_parts_beside_the_language_model_are_named_in_the_log(tmp_path, case, caplog):
    folder = stored(save(tmp_path / "model"), HARMLESS[case])
    loaded, _, _ = load(str(folder), Loading("cpu"))
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(ids).logits, network()(ids).logits)
    if not case.startswith("rotations"):  # the library itself takes these away
        assert f"{len(HARMLESS[case])} stored tensors are not part of the language model" in caplog.text


def test_a_config_with_fewer_layers_than_are_stored_is_refused(tmp_path):
    folder = edited(save(tmp_path / "model"), num_hidden_layers=1)
    with pytest.raises(Refusal, match="asks for 1 of the stored layers; correct num_hidden_layers"):
        load(str(folder), Loading("cpu"))


def test_layers_for_prediction_that_are_numbered_on_are_as_many_as_the_config_says(tmp_path):
    """DeepSeek-V3 stores them as further layers; the library takes away only those of the published size."""
    config = DeepseekV3Config(
        vocab_size=320, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
        topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=2, num_nextn_predict_layers=1,
    )
    folder = save(tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load(str(stored(folder, {"model.layers.2.eh_proj.weight": ONE})), Loading("cpu"))
    with pytest.raises(Refusal, match="asks for 2 of the stored layers"):
        load(str(stored(folder, {"model.layers.3.eh_proj.weight": ONE})), Loading("cpu"))


def test_packed_weights_without_their_quantization_config_are_named(tmp_path):
    folder = edited(gptq(tmp_path / "model"), quantization_config=None)
    with pytest.raises(Refusal, match="stored quantised .there is .*, and its config.json has no quantiz"):
        load(str(folder), Loading("cpu"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint32])
def test_integers_for_weights_without_a_quantization_config_are_named(tmp_path, dtype):
    """As MLX packs weights, or int8 whose scales were lost."""
    folder = stored(save(tmp_path / "model"), {LAYER + "q_proj.weight": torch.ones(64, 64).to(dtype)})
    with pytest.raises(Refusal, match="stored quantised .there is .*q_proj.weight.*no quantization_config"):
        load(str(folder), Loading("cpu"))


def test_a_reward_model_with_unused_tensors_is_refused_too(tmp_path):
    folder = edited(save(tmp_path / "model"), architectures=["LlamaForSequenceClassification"], num_labels=1,
                    pad_token_id=0, id2label={"0": "good"})
    head = {"score.weight": torch.ones(1, 64)}
    assert load_classifier(str(stored(folder, head)), "cpu")
    assert "lm_head.weight" in read(folder)  # beside the classifier, which is harmless
    load_classifier.cache_clear()
    with pytest.raises(Refusal, match="layers without biases"):
        load_classifier(str(stored(folder, {LAYER + "q_proj.bias": torch.ones(64)})), "cpu")
