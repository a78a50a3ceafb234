"""The text part of a multimodal checkpoint computes what the library's multimodal class computes of text alone."""
from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

import playground
from playground.bench.models.tiny_networks import tiny_config
from playground.bench.models.trial import tokenizer
from playground.engine.loading.load import Loading, load
from playground.engine.loading.text_parts import KINDS
from playground.errors import Refusal

IDS = torch.tensor([[5, 9, 2, 7, 7, 30, 31, 9, 2, 11, 12, 40]])
CPU = Loading("cpu", "float32")
VISION = dict(image_size=32, patch_size=16, projection_dim=32, out_hidden_size=32, depth=1, num_position_embeddings=4)


def saved(kind: str, folder):
    """A tiny random checkpoint of a multimodal type, as the library saves it, and the logits [n, V] of its own class
    for text alone.
    """
    torch.manual_seed(0)
    config = tiny_config(kind)
    for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id",
                 "vision_start_token_id", "vision_end_token_id", "boi_token_id", "eoi_token_id", "boa_token_id"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 120)
    for inner in ("vision_config", "audio_config"):
        for name, value in VISION.items():
            if isinstance(getattr(getattr(config, inner, None), name, None), int):
                setattr(getattr(config, inner), name, value)
    if "mrope_section" in (rope := config.get_text_config().rope_parameters or {}) or kind.startswith("qwen2_"):
        rope |= {"mrope_section": [1, 1, 2], "rope_type": "default"}
    whole = AutoModelForMultimodalLM.from_config(config, experts_implementation="eager").float().eval()
    whole.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    with torch.no_grad():
        return folder, whole(input_ids=IDS).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_part_computes_what_the_multimodal_class_does(kind, tmp_path):
    folder, expected = saved(kind, tmp_path)
    network = load(str(folder), CPU)[0]
    with torch.no_grad():
        found = network(IDS).logits[0]
    assert not any("vision" in name or "visual" in name for name, _ in network.named_parameters())
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1.0)


OLDER = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
         "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."}


def renamed(folder, names: dict[str, str]) -> None:
    weights = load_file(folder / "model.safetensors")
    found = {}
    for name, weight in weights.items():
        old = next((old for old in names if name.startswith(old)), "")
        found[names.get(old, "") + name.removeprefix(old)] = weight
    save_file(found, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("names", [{}, OLDER, {new: old for old, new in OLDER.items()}], ids=["saved", "old", "new"])
def test_names_of_older_and_newer_files_mean_the_same_weights(tmp_path, names):
    folder, expected = saved("llava", tmp_path)
    renamed(folder, names)
    with torch.no_grad():
        assert (load(str(folder), CPU)[0](IDS).logits[0] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.refuses
def test_a_text_part_with_another_rotary_embedding_would_fail_that_comparison(tmp_path, monkeypatch):
    from playground.engine.loading import text_parts
    folder, expected = saved("qwen2_vl", tmp_path)
    fields = text_parts._fields
    monkeypatch.setattr(text_parts, "_fields", lambda inner: fields(inner) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
    with torch.no_grad():
        assert (load(str(folder), CPU)[0](IDS).logits[0] - expected).abs().max() > 1e-2


def test_the_text_part_runs_and_says_what_it_is(tmp_path):
    model = playground.load(saved("llava", tmp_path)[0], draft="none", device="cpu").target
    assert model.attends and model.network.config.model_type == "llama"


def test_a_multimodal_model_without_a_text_class_is_refused_for_what_it_is(tmp_path):
    tiny_config("chameleon").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(Refusal, match="is a .* model"):
        load(str(tmp_path), CPU)
    config = tiny_config("qwen2_5_omni_thinker")
    config.save_pretrained(tmp_path)
    with pytest.raises(Refusal, match="sees more than text, and the library has no class for its text part"):
        load(str(tmp_path), CPU)
