"""Window-Diffusion: what it computes and what it reuses."""
from __future__ import annotations

import pytest
import torch

from strategies.diffusion.window_diffusion import WindowDiffusion
from support.cached_canvases import EXACT, WHOLE, plain
from support.canvases import LENGTH, PROMPT, computed, denoiser, difference, fills, run


@pytest.mark.oracle("window_diffusion")
@pytest.mark.parametrize("shifted", [False, True])
def test_a_window_of_the_whole_canvas_with_phases_of_one_step_is_plain_decoding(shifted):
    model = denoiser(shifted)
    found = run(model, "window_diffusion", visible=LENGTH, active=LENGTH, phase=1)
    assert difference(found, plain(model, block_length=LENGTH)) < EXACT


@pytest.mark.oracle("window_diffusion")
def test_pruned_positions_are_as_if_masked_out_of_attention():
    """The first forward against the library's, with an explicit mask and the original positions."""
    model = denoiser()
    first = fills(run(model, "window_diffusion", visible=5, active=3, phase=1))[0]
    seen = len(PROMPT) + 5
    ids = torch.tensor([PROMPT + [7] * LENGTH])
    allowed = torch.zeros(1, 1, WHOLE, WHOLE, dtype=torch.bool)
    allowed[..., :seen] = True
    with torch.inference_mode():
        logits = model.network(input_ids=ids, attention_mask=allowed, use_cache=False).logits[0]
    logits = logits.clone()
    logits[:, 7] = float("-inf")
    best = logits[len(PROMPT):len(PROMPT) + 3].softmax(-1).max(-1)
    position = int(best.values.argmax())
    assert (first.positions, first.ids) == ([position], [int(best.indices[position])])
    assert first.confidences[0] == pytest.approx(float(best.values[position]), abs=EXACT)


class Renumbered(WindowDiffusion):
    """Wrong: it predicts positions that it left out of the forward's states."""

    def _visible(self, lm, masked):
        return [*range(-len(PROMPT) + 2, 0), *masked[:self.visible]]


@pytest.mark.refuses("window_diffusion")
def test_leaving_out_a_part_of_the_prompt_gives_other_logits():
    model, knobs = denoiser(), dict(visible=LENGTH, active=LENGTH, phase=1)
    found = run(model, "window_diffusion", Renumbered(**knobs))
    assert difference(found, plain(model, block_length=LENGTH)) > EXACT


def test_a_phase_computes_the_visible_then_the_active_and_what_was_filled_in_it():
    counts = computed(run(denoiser(), "window_diffusion", visible=8, active=3, phase=4))
    assert counts[:5] == [len(PROMPT) + 8, 4, 5, 6, len(PROMPT) + 4 + 8]
    assert computed(run(denoiser(), "window_diffusion", visible=8, active=3, phase=4, far_field=True))[0] == WHOLE


def test_positions_beyond_the_active_ones_are_not_filled():
    for fill in fills(run(denoiser(), "window_diffusion", visible=6, active=2, phase=3, slide=False))[:2]:
        assert fill.positions[0] < 2
    events = run(denoiser(), "window_diffusion", visible=6, active=2, phase=8)
    assert sorted(fill.positions[0] for fill in fills(events)) == list(range(LENGTH))


def test_an_end_token_cuts_the_canvas_once_nothing_before_it_is_masked():
    model = denoiser()
    first = fills(run(model, "window_diffusion", visible=4, active=1, phase=1))[0].ids[0]
    model.end_ids = frozenset([first])
    events = run(model, "window_diffusion", visible=4, active=1, phase=1)
    assert len(fills(events)) == 2 and set(fills(events)[1].ids) == {first}
    whole = run(model, "window_diffusion", visible=4, active=1, phase=1, stop_at_end=False)
    assert len(fills(whole)) == LENGTH
