"""Masked diffusion: which positions it fills, by its rule, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from support.canvas_laws import BLOCK
from support.canvases import LENGTH, PROMPT, denoiser, difference, fills, forwards, run


@pytest.mark.oracle("masked_diffusion")
def test_guidance_moves_the_logits_away_from_those_without_the_prompt():
    model = denoiser()
    first = fills(run(model, "masked_diffusion", guidance=1.5, **BLOCK))[0]
    with_prompt = model.denoise([*PROMPT, *[None] * LENGTH])[len(PROMPT):]
    without = model.denoise([None] * (len(PROMPT) + LENGTH))[len(PROMPT):]
    guided = without + 2.5 * (with_prompt - without)
    guided[:, model.mask_id] = float("-inf")
    best = guided.softmax(-1).max(-1)
    position = int(best.values.argmax())
    assert (first.positions, first.ids) == ([position], [int(best.indices[position])])
    assert first.confidences[0] == pytest.approx(float(best.values[position]))


@pytest.mark.refuses("masked_diffusion")
def test_guidance_changes_what_is_filled_and_costs_a_second_forward():
    model = denoiser()
    plain, guided = run(model, "masked_diffusion", **BLOCK), run(model, "masked_diffusion", guidance=1.5, **BLOCK)
    assert difference(plain, guided) > 1e-3 and len(forwards(guided)) == 2 * len(forwards(plain))
