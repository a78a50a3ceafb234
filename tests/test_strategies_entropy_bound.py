"""The sampler of DiffusionGemma, against the library's own generation on a tiny random network."""
from __future__ import annotations

import pytest
import torch
from toys import byte_tokenizer
from transformers.models.diffusion_gemma import generation_diffusion_gemma as library

import playground
from playground.decoding.canvas import Canvas
from playground.decoding.models import Models
from playground.engine.canvas.noise_denoiser import NoiseDenoiser
from playground.errors import Refusal
from strategies.diffusion import entropy_bound as module
from support.canvases import LENGTH, PROMPT, course, forwards, run
from support.noise_models import BLOCK, denoiser, network

NOISE = 5  # the token that takes the place of every random one
LONG = 2 * BLOCK
KNOBS = dict(steps=7, bound=1.5, hottest=0.9, coolest=0.3, stable=1, certain=0.6)


@pytest.fixture
def without_chance(monkeypatch):
    """Makes both sides take the most probable token, and one fixed token as noise."""
    monkeypatch.setattr(
        Canvas, "draw", lambda self, p, position, purpose: NOISE if purpose == "noise" else int(p.argmax())
    )
    monkeypatch.setattr(library.torch, "multinomial", lambda p, num_samples: p.argmax(-1, keepdim=True))
    monkeypatch.setattr(
        library.torch, "randint", lambda low, high, size, device=None: torch.full(size, NOISE, device=device)
    )


def by_the_library(bound: float = KNOBS["bound"]) -> list[int]:
    found = network().generate(
        torch.tensor([PROMPT]), max_new_tokens=LONG, max_denoising_steps=KNOBS["steps"],
        sampler_config=library.EntropyBoundSamplerConfig(entropy_bound=bound), t_min=KNOBS["coolest"],
        t_max=KNOBS["hottest"], stability_threshold=KNOBS["stable"], confidence_threshold=KNOBS["certain"],
    )
    return found.sequences[0, len(PROMPT):].tolist()


def written(**knobs) -> list[int]:
    return [token for _, token, _ in course(run(denoiser(), "entropy_bound", length=LONG, **KNOBS | knobs))]


@pytest.mark.slow
@pytest.mark.oracle("entropy_bound")
@pytest.mark.usefixtures("without_chance")
@pytest.mark.parametrize("bound", [0.5, 1.5])
def test_a_lane_writes_what_the_library_generates(bound):
    assert written(bound=bound) == by_the_library(bound)


@pytest.mark.refuses("entropy_bound")
@pytest.mark.usefixtures("without_chance")
@pytest.mark.parametrize("change", ["conditioning", "bound"])
def test_without_self_conditioning_or_with_another_rule_it_would_write_something_else(change, monkeypatch):
    if change == "conditioning":
        made = NoiseDenoiser.denoise

        def forgetful(self, canvas, wanted, computed, states):
            states.conditioning = None
            return made(self, canvas, wanted, computed, states)

        monkeypatch.setattr(NoiseDenoiser, "denoise", forgetful)
    else:
        monkeypatch.setattr(module, "within", lambda nats, bound: range(len(nats)))
    assert written() != by_the_library()


def test_the_rule_accepts_what_the_librarys_sampler_accepts():
    for seed in range(5):
        logits = 3 * torch.randn(1, 9, 12, generator=torch.Generator().manual_seed(seed))
        sampler = library.EntropyBoundSampler(library.EntropyBoundSamplerConfig(1.2), 9, 12, 1)
        sampler.accept_canvas(torch.zeros(1, 9), torch.zeros(1, 9), logits, 1)
        nats = -torch.special.entr(logits[0].softmax(-1)).sum(-1).neg()
        assert sorted(module.within(nats, 1.2)) == sampler.accepted_token_mask[0].nonzero()[:, 0].tolist()
    assert module.within(torch.tensor([9.0, 2.0]), 0.0) == [1]


def test_a_block_has_at_most_so_many_forwards_and_the_last_one_is_shorter():
    events = run(denoiser(), "entropy_bound", steps=3, certain=0.001, length=LENGTH)
    assert [event.tokens for event in forwards(events)] == [BLOCK] * 6 + [LENGTH % BLOCK] * 3
    assert len(course(events)) == LENGTH


def test_it_is_loaded_by_its_name_and_has_the_logits_of_the_library(tmp_path):
    network().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = playground.load(tmp_path, dtype="float32").target
    block = [3, 4, 5, 6, 7, 8]
    expected = network()(input_ids=torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([block])).logits[0]
    assert isinstance(model, NoiseDenoiser)
    found = model.denoise([*PROMPT, *block], None, range(len(PROMPT), len(PROMPT) + len(block)))
    assert float((found - expected).detach().abs().max()) < 1e-5


def test_only_its_own_sampler_runs_on_it():
    with pytest.raises(Refusal, match="turns noise into text, and Masked diffusion needs .*: choose Entropy bound"):
        playground.run("masked_diffusion", "The", models=Models(denoiser()))
    with pytest.raises(Refusal, match="does not continue text"):
        playground.run("greedy", "The", models=Models(denoiser()))
