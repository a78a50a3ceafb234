"""Block diffusion and WeDLM: their logits against the library's networks, exact caches, and block length 1."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pairs import pair
from safetensors.torch import save_file
from toys import byte_tokenizer

import playground
from playground.algorithms.diffusion.finished_blocks import FinishedBlocks
from playground.decoding.canvas import check_fit
from playground.decoding.models import Models
from playground.engine.canvas.block_denoiser import BlockDenoiser, KnownFirstDenoiser
from playground.engine.canvas.masked_models import masking_of
from playground.errors import Refusal
from support.canvases import LENGTH, MASK, PROMPT, computed, course, denoiser, difference, run
from support.public_denoisers import weights

CANVAS = [11, 3, 250, None, None, 42, None, 100, None, 5, 6]
BLOCK = 4
EXACT = 1e-5
REFERENCE = json.loads((Path(__file__).parent / "block_denoiser_reference.json").read_text())


@torch.inference_mode()
def library_logits(model, tokens, allowed, positions=None):
    """The library's own forward with an explicit mask [n, n], [n, V]."""
    ids = torch.tensor([[MASK if token is None else token for token in tokens]])
    positions = torch.tensor([list(range(len(tokens)) if positions is None else positions)])
    found = model.network(input_ids=ids, attention_mask=allowed[None, None], position_ids=positions, use_cache=False)
    found.logits[0, :, MASK] = float("-inf")
    return found.logits[0]


def by_blocks(size: int, length: int) -> torch.Tensor:
    """Which position sees which, pair by pair."""
    return torch.tensor([[other // length <= one // length for other in range(size)] for one in range(size)])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).nan_to_num(0.0, neginf=0.0).abs().max())


# --- logits ---

@pytest.mark.parametrize("length", [1, 3, BLOCK])
def test_a_position_sees_its_block_and_earlier_ones(length):
    model = denoiser(block_length=length)
    assert isinstance(model, BlockDenoiser)
    assert error(model.denoise(CANVAS), library_logits(model, CANVAS, by_blocks(len(CANVAS), length))) < EXACT
    assert error(model.denoise(CANVAS), library_logits(model, CANVAS, by_blocks(len(CANVAS), length + 1))) > 0.1
    assert error(model.in_blocks(2).denoise(CANVAS), library_logits(model, CANVAS, by_blocks(len(CANVAS), 2))) < EXACT


def test_known_tokens_are_read_before_masks_with_causal_attention():
    model = denoiser(known_first=True)
    assert isinstance(model, KnownFirstDenoiser)
    known = [at for at, token in enumerate(CANVAS) if token is not None]
    order = known + [at for at, token in enumerate(CANVAS) if token is None]
    causal = torch.ones(len(CANVAS), len(CANVAS)).tril().bool()
    expected = library_logits(model, [CANVAS[at] for at in order], causal, order)
    assert error(model.denoise(CANVAS)[order], expected) < EXACT
    assert error(model.denoise(CANVAS), library_logits(model, CANVAS, causal)) > 0.1  # in the order of the text


def test_masks_further_right_change_nothing_on_a_model_that_reads_known_tokens_first():
    model = denoiser(known_first=True)
    assert error(model.denoise([*CANVAS[:9]], [3, 4]), model.denoise([*CANVAS[:9], None, None], [3, 4])) < EXACT


# --- states of finished blocks ---

@pytest.mark.parametrize("shifted", [False, True])
def test_a_block_on_the_states_of_finished_ones_has_the_logits_of_a_whole_forward(shifted):
    model = denoiser(shifted, block_length=BLOCK)
    canvas = [*range(20, 28), 30, None, None, 31]
    states, block = model.new_states(len(canvas)), range(8, 12)
    model.denoise(canvas[:8] + [None] * 4, [], range(8), states)
    found = model.denoise(canvas, list(block), [*range(8 - shifted, 12)], states)
    assert error(found, model.denoise(canvas)[list(block)]) < EXACT


def test_states_of_a_block_that_still_had_masks_are_wrong():
    model = denoiser(block_length=BLOCK)
    canvas = [*range(20, 28), 30, None, None, 31]
    states = model.new_states(len(canvas))
    model.denoise([*canvas[:7], None, *canvas[8:]], [], range(8), states)
    assert error(model.denoise(canvas, [9], range(8, 12), states), model.denoise(canvas, [9])) > 1e-3


KNOBS = dict(threshold=1.05, block_length=BLOCK)


def read_everything(self, block, masked, step, supposed=()):
    return self.lm.read(wanted=masked, supposed=dict(supposed))


@pytest.mark.parametrize("name, knobs, shifted", [
    ("fast_dllm", dict(threshold=0.05), True), ("fast_dllm", dict(threshold=0.05, block_length=3), False),
    ("local_leap", {}, False), ("bacd", dict(low=0.03, high=0.1), True),
])
def test_decoders_that_keep_finished_blocks_equal_those_that_read_everything(name, knobs, shifted, monkeypatch):
    model = denoiser(shifted, block_length=BLOCK)
    kept = run(model, name, **knobs)
    monkeypatch.setattr(FinishedBlocks, "read", read_everything)
    whole = run(model, name, **knobs)
    assert difference(kept, whole) < EXACT and sum(computed(kept)) < sum(computed(whole))


def test_the_first_forward_of_a_block_also_computes_the_block_finished_before_it():
    # a prompt of 5 tokens: one in the first block of the canvas, which therefore ends after 3 positions
    counts = computed(run(denoiser(block_length=BLOCK), "fast_dllm", **KNOBS))
    assert counts == [8, 4, 4] + [8, 4, 4, 4] * 2 + [7, 3, 3]


# --- block length 1 ---

@torch.inference_mode()
def autoregressive(model, shifted: bool, length: int = LENGTH) -> list[int]:
    """Greedy decoding by the library's own causal forward; an unshifted model is asked with a mask at the end."""
    ids = list(PROMPT)
    for _ in range(length):
        logits = model.network(input_ids=torch.tensor([[*ids, *[MASK] * (not shifted)]]), use_cache=False).logits[0, -1]
        logits[MASK] = float("-inf")
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT):]


def tokens_of(events) -> list[int]:
    return [token for _, token in sorted((at, token) for at, token, _ in course(events))]


@pytest.mark.oracle("fast_dllm", "bacd", "masked_diffusion")
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name", ["fast_dllm", "bacd", "masked_diffusion"])
def test_block_length_one_is_autoregressive_decoding(name, shifted):
    model = denoiser(shifted, block_length=1)
    assert tokens_of(run(model, name, block_length=8)) == autoregressive(model, shifted)


@pytest.mark.refuses("fast_dllm", "bacd", "masked_diffusion")
@pytest.mark.parametrize("length, shifted", [(2, True), (1, False)])
def test_longer_blocks_or_another_alignment_are_not(length, shifted):
    assert tokens_of(run(denoiser(shifted, block_length=length), "fast_dllm")) != autoregressive(denoiser(), True)


# --- refusals ---

@pytest.mark.parametrize("name, masking, said", [
    ("dream", dict(block_length=4), "sees its block and earlier ones, and .* needs a model that sees the whole canvas"),
    ("wedlm", dict(block_length=4), "sees its block and earlier ones, and WeDLM needs a model that reads known tokens"),
    ("wedlm", {}, "sees the whole canvas, and WeDLM needs"),
    ("fast_dllm", dict(known_first=True), "reads known tokens before masks, and Fast-dLLM needs .* choose WeDLM"),
])
def test_a_decoder_for_another_attention_is_refused_in_one_sentence(name, masking, said):
    with pytest.raises(Refusal, match=said) as refusal:
        playground.run(name, "The", models=Models(denoiser(**masking)))
    assert str(refusal.value).count(". ") == 0


@pytest.mark.parametrize("masking", [dict(block_length=4), dict(known_first=True)])
def test_they_fill_and_do_not_continue_text(masking):
    with pytest.raises(Refusal, match="fills masked positions and does not continue text"):
        playground.run("greedy", "The", models=Models(denoiser(**masking)))
    with pytest.raises(Refusal, match="continues text and cannot fill masked positions"):
        playground.run("wedlm", "The", models=pair())


@pytest.mark.parametrize("entry", [
    dict(block_length=-1), dict(block_length="4"), dict(block_length=4, known_first=True), dict(known_first=1),
    dict(known_first=True, shifted=True),
])
def test_an_unusable_entry_is_refused(entry):
    with pytest.raises(Refusal, match="correct it"):
        masking_of(type(denoiser().network.config)(masked_diffusion=dict(mask_token_id=1) | entry))


# --- public models ---

def stored(folder: Path, family: str, **changes) -> Path:
    """A folder with a public config and weights under their public names."""
    case = REFERENCE[family]
    (folder / "config.json").write_text(json.dumps(case["config"] | changes))
    save_file(weights(case["shapes"]), folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family, kind, shift", [
    ("sdar", BlockDenoiser, 0), ("fast_dllm", BlockDenoiser, 1), ("wedlm", KnownFirstDenoiser, 0),
    ("wedlm_qwen2", KnownFirstDenoiser, 0),
])
def test_public_models_have_the_logits_of_their_own_modelling_code(family, kind, shift, tmp_path):
    model = playground.load(stored(tmp_path, family), dtype="float32").target
    assert isinstance(model, kind) and model.mask_id == 63 and model.shifted == bool(shift)
    for canvas, logits in zip(REFERENCE[family]["canvases"], REFERENCE[family]["logits"]):
        expected = torch.tensor(logits)
        expected[:, 63] = float("-inf")
        found = model.denoise([None if token == 63 else token for token in canvas])
        assert error(found[shift:], expected[:len(canvas) - shift]) < EXACT


def test_another_attention_would_give_other_logits(tmp_path):
    model = playground.load(stored(tmp_path, "sdar"), dtype="float32").target
    canvas, expected = REFERENCE["sdar"]["canvases"][2], torch.tensor(REFERENCE["sdar"]["logits"][2])
    assert error(model.in_blocks(len(canvas)).denoise(canvas)[:, :63], expected[:, :63]) > 0.1


@pytest.mark.parametrize("family, changes, says", [
    ("sdar", {"use_sliding_window": True}, "value of use_sliding_window for which its network is not the library's"),
    ("sdar", {"model_type": "sdar_moe"}, "mixture of experts that fills masks"),
    ("wedlm", {"attention_bias": True}, "value of attention_bias for which"),
    ("fast_dllm", {"bd_size": "many"}, "needs a whole number as bd_size"),
])
def test_other_networks_of_these_families_are_refused(family, changes, says, tmp_path):
    with pytest.raises(Refusal, match=says):
        playground.load(stored(tmp_path, family, **changes))


def test_the_decoders_of_block_models_accept_them():
    for name in ("masked_diffusion", "fast_dllm", "bacd", "local_leap", "tccf"):
        check_fit(playground.contract.make(name), denoiser(block_length=4))
