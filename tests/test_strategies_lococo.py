"""LoCoCo: heavy hitters stay as they are, all others are mixed by a convolution into the remaining slots."""
from __future__ import annotations

import math

import pytest
import torch
from pairs import pair
from torch import Tensor

from playground.contract import Held, find, make
from playground.training.calibration import CalibrationTexts
from strategies.kv_cache import lococo
from support.budget_policies import HandRule, best, roomy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.wrong_variants import variants_of

LoCoCo = find("lococo")
COLLAPSES = {"lococo": roomy("lococo", size=2048)}
HEADS, SLOTS, D, SIZE = 2, 13, 4, 6
CUT = {"size": SIZE, "buffer": 0, "chunk": 512}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(seed: int, channels: int = 3, kernel: int = 5, blend: float = 0.7) -> dict[str, Tensor]:
    return {"kernel": numbers(1, channels, 2 * D, kernel, seed=seed) * 0.5, "bias": numbers(1, channels, seed=seed + 1),
            "blend": torch.tensor([blend])}


def by_hand(keys: list, values: list, scores: list[float], weights: dict[str, Tensor]) -> tuple[list[int], list, list]:
    """The slots of one head after a compression, and what is in them, with loops over slots and channels."""
    heavy = best(dict(enumerate(scores)), SIZE - SIZE // 2)
    others = [slot for slot in range(SLOTS) if slot not in heavy]
    picks = sorted(best({slot: scores[slot] for slot in others}, SIZE // 2))
    kernel, bias, blend = (weights[name][0].tolist() for name in ("kernel", "bias", "blend"))
    read = [[*keys[slot], *values[slot]] for slot in others]
    new_keys, new_values = {slot: keys[slot] for slot in heavy}, {slot: values[slot] for slot in heavy}
    for row, pick in enumerate(picks):
        logits = []
        for place in range(len(others)):
            total = bias[row]
            for shift in range(len(kernel[0][0])):
                at = place + shift - len(kernel[0][0]) // 2
                if 0 <= at < len(others):
                    total += sum(kernel[row][channel][shift] * x for channel, x in enumerate(read[at]))
            logits.append(max(0.0, total))
        powers = [math.exp(x) for x in logits]
        shares = [blend * x / sum(powers) + (1 - blend) * (others[i] == pick) for i, x in enumerate(powers)]
        for old, new in ((keys, new_keys), (values, new_values)):
            new[pick] = [sum(s * old[slot][c] for s, slot in zip(shares, others)) for c in range(D)]
    slots = sorted(heavy | set(picks))
    return slots, [new_keys[slot] for slot in slots], [new_values[slot] for slot in slots]


def compressed(cls: type, seed: int) -> tuple[list, list, list]:
    """What a policy makes of random slots, given two calls with attention of which the last counts."""
    policy, positions = cls(**CUT), torch.arange(SLOTS)[None]
    policy.begin_fitted(fitted(seed))
    policy.text_length = SLOTS
    held = {"keys": numbers(HEADS, SLOTS, D, seed=seed + 2), "values": numbers(HEADS, SLOTS, D, seed=seed + 3)}
    for call in (seed + 4, seed + 5):
        policy.observe_attention(0, numbers(HEADS, 3, SLOTS, seed=call).abs(), torch.arange(3), positions)
    kept = policy.retain(Held(0, 1, "prefill", SLOTS, SLOTS, positions, held.__getitem__, held.__setitem__))
    slots = [row.nonzero()[:, 0].tolist() for row in kept]
    return (slots, *([held[part][head, slots[head]].tolist() for head in range(HEADS)] for part in ("keys", "values")))


def check(cls: type) -> None:
    for seed in range(0, 60, 10):
        keys, values = (numbers(HEADS, SLOTS, D, seed=seed + n).tolist() for n in (2, 3))
        scores = numbers(HEADS, 3, SLOTS, seed=seed + 5).abs().sum(1).tolist()
        for head, (slots, *found) in enumerate(zip(*compressed(cls, seed))):
            expected = by_hand(keys[head], values[head], scores[head], fitted(seed))
            assert slots == expected[0]
            for ours, theirs in zip(found, expected[1:]):
                assert (torch.tensor(ours) - torch.tensor(theirs)).abs().max() < 1e-5


class AccumulatesScores(LoCoCo):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, key_positions, self.text_length)


class MixesHeavyOnesToo(LoCoCo):
    def _mix(self, held, heavy, picks):
        super()._mix(held, torch.zeros_like(heavy), picks)


class WithoutRelu(LoCoCo):
    def _mix(self, held, heavy, picks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "relu", lambda logits: logits)
            super()._mix(held, heavy, picks)


class KeysAlone(LoCoCo):
    """Values are evicted instead of mixed."""

    def _mix(self, held, heavy, picks):
        values = held.read("values")
        super()._mix(held, heavy, picks)
        held.write("values", values)


@pytest.mark.oracle("lococo")
def test_slots_after_a_compression_are_those_of_the_formula():
    check(LoCoCo)


@pytest.mark.refuses("lococo")
@pytest.mark.parametrize("wrong", variants_of(LoCoCo, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_mixture_is_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.oracle("lococo")
def test_without_a_fit_a_run_evicts_by_the_attention_of_the_last_forward():
    def rule(seen):
        heads, size = len(seen.live), len(seen.weights) // len(seen.live)
        stays = []
        for head in range(heads):
            received = seen.weights[head * size:(head + 1) * size].sum((0, 1)).tolist()
            scores = dict(zip(seen.live[head], received))
            stays.append(best(scores, 9) if len(scores) > 11 else set(scores))
        return stays

    policy = make("lococo", size=9, buffer=2, chunk=512)
    assert course(alone(policy), models()) == HandRule("llama", rule).write(PROMPT, LENGTH)


def test_the_prompt_is_compressed_after_every_chunk():
    sizes = []

    class Listening(LoCoCo):
        def retain(self, held):
            sizes.append((held.moment, held.positions.shape[1]))
            return super().retain(held)

    _, held = course(alone(Listening(size=6, buffer=2, chunk=5)), models())
    # 22 tokens in fives: 10 slots become 6, and 11 of the next three chunks
    assert [size for moment, size in sizes if moment == "chunk"][::3] == [5, 10, 11, 11]
    assert all(len(head) <= 8 for layers in held for layer in layers for head in layer)


def test_shares_are_convex_and_depend_on_the_order_of_the_text():
    states, place = numbers(HEADS, 9, 2 * D, seed=0), torch.tensor([[1, 4], [0, 8]])
    kernel, bias = numbers(2, 2 * D, 5, seed=1), numbers(2, seed=2)
    shares = lococo.mixing_weights(states, place, kernel, bias, 1.0)
    assert (shares >= 0).all() and torch.allclose(shares.sum(-1), torch.ones(HEADS, 2, dtype=shares.dtype))
    turned = lococo.mixing_weights(states.flip(1), place, kernel, bias, 1.0).flip(2)
    assert not torch.allclose(shares, turned)
    plain = lococo.mixing_weights(states, place, kernel, bias, 0.0)
    assert plain.argmax(-1).tolist() == place.tolist() and set(plain.unique().tolist()) == {0.0, 1.0}


@pytest.mark.slow
def test_training_lowers_the_loss_after_compressions(monkeypatch):
    monkeypatch.setattr(lococo, "DESCENT", lococo.Descent("loss", 12, 3e-2, 4))
    small = {"TRAINED_SIZES": (6,), "TRAINED_CHUNK": 8, "SHORTEST": 20, "KERNEL": 3, "CHANNELS": 3}
    for name, value in small.items():
        monkeypatch.setattr(lococo, name, value)
    texts = CalibrationTexts(pair("llama", dtype=torch.float32).target, [[5, 9, 2, 7] * 6])
    events, losses = LoCoCo.calibrate(texts, 0), []
    while True:
        try:
            losses.append(next(events).data["series"]["loss"])
        except AttributeError:  # the note at the end
            continue
        except StopIteration as end:
            weights = end.value
            break
    assert losses[-1] < losses[0] and weights["kernel"].shape == (3, 3, 16, 3)
    policy = make("lococo", **CUT)
    policy.begin_fitted(weights)
    assert len(course(alone(policy), models())[0]) == LENGTH
