"""Neural denoisers: their logits against the library's networks and the public modelling code, and what is refused."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import SIZES
from pairs import pair
from safetensors.torch import save_file
from toys import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import playground
from playground.decoding.models import Models
from playground.engine.canvas.denoiser import MaskedDenoiser
from playground.engine.canvas.masked_models import masking_of, public_config
from playground.errors import Refusal
from support.public_denoisers import weights

REFERENCE = json.loads((Path(__file__).parent / "denoiser_reference.json").read_text())
MASK = 7
CANVAS = [11, 3, 250, None, None, 42, None, 100, None]
EXACT = 1e-5


def network(architecture: str = "llama", shifted: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    masking = {"mask_token_id": MASK, "shifted": shifted}
    sizes = SIZES | {"vocab_size": 320, "masked_diffusion": masking}
    config = AutoConfig.for_model(architecture, **sizes, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).eval()


def denoiser(architecture: str = "llama", shifted: bool = False) -> MaskedDenoiser:
    return MaskedDenoiser(network(architecture, shifted), byte_tokenizer(), architecture)


@torch.inference_mode()
def library_logits(architecture: str, canvas: list[int | None], allowed=None) -> torch.Tensor:
    """The library's own forward with an explicit mask, by default of full attention, [positions, V]."""
    size = len(canvas)
    allowed = torch.ones(size, size, dtype=torch.bool) if allowed is None else allowed
    ids = torch.tensor([[MASK if token is None else token for token in canvas]])
    logits = network(architecture)(input_ids=ids, attention_mask=allowed[None, None], use_cache=False).logits[0]
    logits[:, MASK] = float("-inf")
    return logits


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).nan_to_num(0.0, neginf=0.0).abs().max())


# --- logits ---

@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_are_the_librarys_with_full_attention(architecture):
    assert error(denoiser(architecture).denoise(CANVAS), library_logits(architecture, CANVAS)) < EXACT


def test_a_causal_mask_would_give_other_logits():
    causal = torch.ones(len(CANVAS), len(CANVAS)).tril().bool()
    assert error(denoiser().denoise(CANVAS), library_logits("llama", CANVAS, causal)) > 0.1


def test_a_shifted_model_predicts_a_token_from_the_position_before_it():
    found, expected = denoiser(shifted=True).denoise(CANVAS), library_logits("llama", CANVAS)
    assert error(found[1:], expected[:-1]) < EXACT and bool(found[0].isnan().all())
    assert error(found[1:], expected[1:]) > 0.1


def test_the_mask_is_never_predicted():
    assert bool((denoiser().denoise(CANVAS)[:, MASK] == float("-inf")).all())


# --- some positions only ---

@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("computed", [[3, 4, 6, 8], [2, 3, 5, 7], [5], list(range(9))])
def test_positions_with_current_states_need_not_be_computed(shifted, computed):
    model = denoiser(shifted=shifted)
    states = model.new_states(len(CANVAS))
    whole = model.denoise(CANVAS, states=states)
    wanted = [position + shifted for position in computed if position + shifted < len(CANVAS)]
    assert error(model.denoise(CANVAS, wanted, computed, states), whole[wanted]) < EXACT


def test_states_of_another_canvas_give_other_logits():
    model = denoiser()
    states = model.new_states(len(CANVAS))
    model.denoise(CANVAS, states=states)
    changed = [12, *CANVAS[1:]]
    assert error(model.denoise(changed, [3], [3], states), model.denoise(changed, [3])) > 1e-3


def test_computed_positions_replace_their_states():
    model = denoiser()
    states = model.new_states(len(CANVAS))
    model.denoise(CANVAS, states=states)
    changed = [12, *CANVAS[1:]]
    assert error(model.denoise(changed, None, range(len(changed)), states), model.denoise(changed)) < EXACT


def test_dropped_positions_are_invisible_and_the_others_keep_their_places():
    model, states = denoiser(), denoiser().new_states(len(CANVAS))
    visible = [0, 1, 2, 3, 5, 8]
    allowed = torch.zeros(len(CANVAS), len(CANVAS), dtype=torch.bool)
    allowed[:, visible] = True
    found = model.denoise(CANVAS, visible, visible, states)
    assert error(found, library_logits("llama", CANVAS, allowed)[visible]) < EXACT
    model.denoise(CANVAS, states=states)
    states.drop([4, 6, 7])
    assert error(model.denoise(CANVAS, visible, visible, states), found) < EXACT


def test_a_position_is_not_predicted_without_its_source():
    with pytest.raises(ValueError, match=r"positions \[3\] predict wanted ones"):
        denoiser(shifted=True).denoise(CANVAS, [4], [4], denoiser().new_states(len(CANVAS)))


# --- public models ---

def stored(folder: Path, family: str, **changes) -> Path:
    """A folder with a public config and weights under their public names."""
    case = REFERENCE[family]
    (folder / "config.json").write_text(json.dumps(case["config"] | changes))
    save_file(weights(case["shapes"]), folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family, shift", [("llada", 0), ("dream", 1)])
def test_public_models_have_the_logits_of_their_own_modelling_code(family, shift, tmp_path):
    model = playground.load(stored(tmp_path, family), dtype="float32").target
    assert model.fills and model.mask_id == 63 and model.shifted == bool(shift)
    for canvas, logits in zip(REFERENCE[family]["canvases"], REFERENCE[family]["logits"]):
        expected = torch.tensor(logits)
        expected[:, 63] = float("-inf")
        found = model.denoise([None if token == 63 else token for token in canvas])
        assert error(found[shift:], expected[:len(canvas) - shift]) < EXACT


def test_the_weights_of_llada_under_other_names_would_give_other_logits(tmp_path):
    folder = stored(tmp_path, "llada")
    mixed = weights(REFERENCE["llada"]["shapes"])
    gate, up = (f"model.transformer.blocks.0.{name}_proj.weight" for name in ("ff", "up"))
    mixed[gate], mixed[up] = mixed[up].clone(), mixed[gate].clone()
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    model = playground.load(folder, dtype="float32").target
    assert error(model.denoise([5, 17, 3, 9]), torch.tensor(REFERENCE["llada"]["logits"][0])[:4]) > 0.1


@pytest.mark.parametrize("changes, says", [
    ({"alibi": True}, "value of alibi for which its network is not the library's"),
    ({"d_model": "wide"}, "needs a whole number as d_model"),
    ({"mask_token_id": 64}, "needs the id of a token as mask_token_id"),
])
def test_other_networks_of_these_families_are_refused(changes, says, tmp_path):
    with pytest.raises(Refusal, match=says):
        playground.load(stored(tmp_path, "llada", **changes))


def test_configs_of_models_that_continue_text_are_left_to_the_library(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    assert public_config("x", path) is None and masking_of(LlamaConfig()) is None


@pytest.mark.parametrize("entry", [{}, {"mask_token_id": "6"}, {"mask_token_id": 1, "block": 4}])
def test_an_unusable_entry_is_refused(entry):
    with pytest.raises(Refusal, match="masked_diffusion of config.json needs the id of a token"):
        masking_of(LlamaConfig(masked_diffusion=entry))


def test_an_architecture_that_cannot_run_without_a_causal_mask_is_refused():
    config = AutoConfig.for_model("gpt2", masked_diffusion={"mask_token_id": 1})
    with pytest.raises(Refusal, match="A gpt2 network cannot fill masks here: choose one of llama, qwen2, qwen3"):
        masking_of(config)


# --- the wrong model for a strategy ---

def test_a_denoiser_cannot_continue_text_or_draft():
    with pytest.raises(Refusal, match="fills masked positions and cannot draft a text"):
        playground.run("speculative", "The", models=Models(pair().target, denoiser()))
    with pytest.raises(Refusal, match="fills masked positions and does not continue text"):
        playground.run("greedy", "The", models=Models(denoiser()))
    with pytest.raises(Refusal, match="continues text and cannot fill masked positions"):
        playground.run("masked_diffusion", "The", models=pair())


def test_a_prompt_beyond_the_context_is_refused():
    model = denoiser()
    with pytest.raises(Refusal, match="reads .* with the answer: shorten it"):
        model.answer_length([1] * model.context, 16)
    assert model.answer_length([1] * (model.context - 3), 16) == 3
    with pytest.raises(Refusal, match="predicts a token from the one before it: write a prompt"):
        denoiser(shifted=True).answer_length([], 16)
