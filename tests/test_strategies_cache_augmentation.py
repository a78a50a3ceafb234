"""Cache augmentation: latent positions computed from the prompt's cache, which all later tokens attend to."""
from __future__ import annotations

import pytest
import torch
from pairs import VOCABULARY, network, pair
from runs import run
from torch import Tensor
from transformers import DynamicCache

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.contract import find
from playground.events import Figure
from playground.training.calibration import CalibrationTexts
from strategies.kv_cache import cache_augmentation as module
from support.budget_policies import roomy
from support.eviction import PROMPT, alone, course, models
from support.wrong_variants import variants_of

Augmentation = find("cache_augmentation")
COLLAPSES = {"cache_augmentation": [*roomy("cache_augmentation"), *roomy("cache_augmentation", latents=0)]}
LATENTS, WRITTEN = 3, 6


def fitted(seed: int = 0) -> dict[str, Tensor]:
    llama = DifferentiableLlama(pair("llama").target.parts)
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=chance, dtype=torch.float64) * (1.0 if name == "soft" else 0.3)
            for name, tensor in module.untrained(llama, 0).items()}


def coprocessor(weights: dict[str, Tensor]):
    """The library's network with the additions in its projections."""
    model = network("llama")
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        added = (weights[f"qkv.{index}.down"] @ weights[f"qkv.{index}.up"]).T
        for name, part in zip(("q_proj", "k_proj", "v_proj"), added.split([32, 16, 16])):
            getattr(attention, name).weight.data += part
        attention.o_proj.weight.data += (weights[f"out.{index}.down"] @ weights[f"out.{index}.up"]).T
    return model


@torch.inference_mode()
def text_by_hand(weights: dict[str, Tensor], pause: bool = False) -> list[int]:
    """Greedy decoding by the library, with latent positions at true positions after the prompt."""
    model, cache, ids = network("llama"), DynamicCache(), list(PROMPT)
    model(input_ids=torch.tensor([ids]), past_key_values=cache)
    latents = weights["soft"][None, :LATENTS]
    if not pause:
        positions = torch.arange(len(ids), len(ids) + LATENTS)[None]
        latents = coprocessor(weights).model(
            inputs_embeds=latents, position_ids=positions, past_key_values=cache).last_hidden_state
    written = []
    for _ in range(WRITTEN):  # the whole input again, at consecutive positions
        embedded = model.get_input_embeddings()(torch.tensor([[*PROMPT, *written]]))
        inputs = torch.cat([embedded[:, :len(PROMPT)], latents, embedded[:, len(PROMPT):]], 1)
        written.append(int(model(inputs_embeds=inputs, use_cache=False).logits[0, -1].argmax()))
    return written


def written(cls: type, weights: dict[str, Tensor], **knobs) -> list[int]:
    policy = cls(latents=LATENTS, **knobs)
    policy.begin_fitted(weights)
    return course(alone(policy), models())[0][:WRITTEN]


def check(cls: type) -> None:
    for seed in range(2):
        assert written(cls, fitted(seed)) == text_by_hand(fitted(seed))


class StatesOfTheCoprocessor(Augmentation):
    """Its own key and value states stay, in place of the model's."""

    def _augment(self, held):
        with pytest.MonkeyPatch.context() as patch:
            right, calls = module.read_after, []

            def read_after(net, past, inputs, start, added=None):
                calls.append(right(net, past, inputs, start, added))
                return calls[-1][0], calls[0][1]

            patch.setattr(module, "read_after", read_after)
            super()._augment(held)


class TokensCollideWithLatents(Augmentation):
    """Later tokens are numbered as if the latent positions were not there."""

    def begin(self, parts):
        super().begin(parts)
        outer = parts

        class Parts:
            def __getattr__(self, name):
                return getattr(outer, name)

            def rotate_back(self, rows, positions):
                return rows

        self._parts = Parts()


class FirstTokenOfThePrompt(Augmentation):
    def logits_after_prompt(self):
        return None


class WithoutAdditions(Augmentation):
    def begin_fitted(self, weights):
        super().begin_fitted({name: tensor * (name == "soft") for name, tensor in weights.items()})


@pytest.mark.oracle("cache_augmentation")
def test_a_run_writes_what_the_library_writes_with_latent_positions():
    check(Augmentation)
    assert written(Augmentation, fitted(), mode="pause") == text_by_hand(fitted(), pause=True)


@pytest.mark.refuses("cache_augmentation")
@pytest.mark.parametrize("wrong", variants_of(Augmentation, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_augmentation_is_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_speculative_decoding_writes_the_same():
    policy = Augmentation(latents=LATENTS)
    policy.begin_fitted(fitted())
    assert course(alone(policy, "speculative"), models())[0][:WRITTEN] == text_by_hand(fitted())


def test_text_after_a_place_does_not_change_its_loss():
    llama, weights = DifferentiableLlama(pair("llama").target.parts), fitted()
    ids = torch.randint(VOCABULARY, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    other = [*ids[:18], *ids[:12]]
    losses = [module.place_losses(llama, text, 5, module.cached_states(llama, text), weights, "coprocessor")
              for text in (ids, other)]
    assert torch.allclose(*losses)


# --- the curve ---

def curve_by_hand(texts: list[list[int]], seed: int) -> list[float]:
    """The loss of each token ahead of the same places without latents, by the library's forward over each text."""
    model, chance, found = network("llama"), torch.Generator().manual_seed(seed), [[] for _ in range(module.AHEAD)]
    for ids in texts:
        with torch.inference_mode():
            logp = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        for place in (torch.randperm(len(ids) - 2, generator=chance)[:module.PLACES] + 1).tolist():
            for ahead, token in enumerate(ids[place:place + module.AHEAD]):
                found[ahead].append(-float(logp[place + ahead - 1, token]))
    return [sum(each) / len(each) for each in found]


def held_out() -> list[list[int]]:
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=chance).tolist() for length in (20, 30, 26)]


def check_curves(curves: dict[str, Tensor]) -> None:
    assert curves["none"].tolist() == pytest.approx(curve_by_hand(held_out(), 7), abs=1e-6)


def test_the_curve_without_latents_is_the_librarys_loss_token_by_token():
    llama = DifferentiableLlama(pair("llama").target.parts)
    curves = module.measured_curves(llama, held_out(), fitted(), 7)
    check_curves(curves)
    assert len({tuple(curve.tolist()) for curve in curves.values()}) == 3
    with pytest.raises(AssertionError):  # one token late
        check_curves({"none": curves["none"].roll(1)})


def test_a_text_that_ends_before_the_last_token_ahead_has_a_shorter_curve():
    llama = DifferentiableLlama(pair("llama").target.parts)
    curves = module.measured_curves(llama, [[5, 9, 2, 7, 1]], fitted(), 7)
    assert [len(curve) for curve in curves.values()] == [module.AHEAD] * 3 and curves["none"][-1].isnan()
    assert [figure.data["x"] for figure in module.shown_curves(curves)] == [1, 2, 3, 4]


def test_a_run_shows_the_curve_that_was_measured_when_it_was_fitted():
    curves = {module.CURVE + mode: torch.arange(module.AHEAD) + 0.5 for mode in module.MODES}
    policy = Augmentation(latents=LATENTS)
    policy.begin_fitted(fitted() | curves)
    events = run(alone(policy), models(), PROMPT, 4)[1]
    shown = [event for event in events if isinstance(event, Figure) and event.name == "loss on held-out texts"]
    assert [figure.data["x"] for figure in shown] == list(range(1, module.AHEAD + 1))
    assert shown[2].data["series"] == dict.fromkeys(module.MODES.values(), 2.5)
    assert written(Augmentation, fitted() | curves) == text_by_hand(fitted()), "the curve is no weight"


@pytest.mark.slow
def test_training_changes_the_coprocessor_only_and_lowers_its_loss(monkeypatch):
    monkeypatch.setattr(module, "DESCENT", module.Descent("loss", 12, 3e-2, 6))
    monkeypatch.setattr(module, "HELD_OUT", 1)
    target = pair("llama", dtype=torch.float32).target
    before = [weight.clone() for weight in target.network.parameters()]
    events, losses = Augmentation.calibrate(CalibrationTexts(target, [[5, 9, 2, 7] * 8] * 2), 0), []
    while True:
        try:
            losses.append(next(events).data["series"]["loss"])
        except (AttributeError, KeyError):  # the note, and the curves
            continue
        except StopIteration as end:
            weights = end.value
            break
    assert losses[-1] < losses[0] and weights["qkv.0.up"].abs().max() > 0
    assert all(torch.equal(a, b) for a, b in zip(before, target.network.parameters()))
