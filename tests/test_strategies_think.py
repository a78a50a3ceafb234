"""ThinK: the key channels with the smallest products of squared queries and keys are dropped."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from playground.contract import Full, find, make
from support.budget_policies import roomy
from support.coded_caches import course, text
from support.packed_caches import PROMPT, rows
from support.wrong_variants import variants_of

ThinK = find("think")
COLLAPSES = {"think": [*roomy("think", ratio=0.0), *roomy("think", window=1024)]}
QUERIES = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
QUERIES = QUERIES * torch.linspace(0.2, 2, 8)


def by_hand(keys: Tensor, queries: Tensor, dropped: int) -> Tensor:
    """Keys [heads, n, d] with zeros, channel by channel: the energy of queries times that of keys."""
    pruned = keys.clone()
    for head in range(len(keys)):
        energy = []
        for channel in range(keys.shape[2]):
            asked = [float(x) ** 2 for x in queries[head, :, :, channel].flatten()]
            held = [float(x) ** 2 for x in keys[head, :, channel]]
            energy.append(sum(asked) / len(asked) * sum(held) / len(held))
        for channel in sorted(range(len(energy)), key=energy.__getitem__)[:dropped]:
            pruned[head, :, channel] = 0
    return pruned


def check(cls: type) -> None:
    for seed in range(4):
        policy, keys, later = cls(ratio=0.4, observed=6), rows(2, 15, 8, seed), rows(2, 4, 8, seed + 20)
        for part in QUERIES.split(7, 2):
            policy.observe_queries(0, part)
        packed = policy.quantise_layer(0, "keys", keys, None)
        expected = by_hand(keys, QUERIES[:, :, -6:], 3)
        assert torch.equal(packed.unpack(), expected)
        packed = policy.quantise_layer(0, "keys", later, packed)
        zero = (expected == 0).all(1, keepdim=True)
        assert torch.equal(packed.unpack(), torch.cat([expected, later.masked_fill(zero, 0)], 1))
        assert policy.quantise_count("values", 99) == 0


class ByKeysAlone(ThinK):
    def observe_queries(self, layer, query_states):
        super().observe_queries(layer, torch.ones_like(query_states))


class ByTheFirstQueries(ThinK):
    def observe_queries(self, layer, query_states):
        if layer not in self._queries:
            super().observe_queries(layer, query_states)


class DropsTheLargest(ThinK):
    def _choose(self, layer, keys):
        super()._choose(layer, 1 / keys)


class SameChannelsInAllHeads(ThinK):
    def _choose(self, layer, keys):
        super()._choose(layer, keys)
        self._kept[layer] = self._kept[layer][:1].expand(len(keys), -1)


@pytest.mark.oracle("think")
def test_the_channels_with_the_least_energy_are_dropped_once_and_for_all():
    check(ThinK)


@pytest.mark.refuses("think")
@pytest.mark.parametrize("wrong", variants_of(ThinK, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_choice_of_channels_is_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_recent_keys_and_all_values_are_exact_and_the_prefill_is_not_changed():
    policy, plain = make("think", ratio=0.5, window=6), course(make("think", ratio=0.0))[0]
    held = course(policy)[0]
    assert torch.equal(held.rows[1], plain.rows[1]) and torch.equal(held.rows[0][:, -6:], plain.rows[0][:, -6:])
    assert ((held.rows[0][:, :-6] == 0).sum(-1) == 4).all()
    assert text(make("think", ratio=0.5, window=6))[len(PROMPT)] == text(None)[len(PROMPT)]


def test_bytes_are_those_of_the_kept_channels():
    held = course(make("think", ratio=0.5, window=6))[0]
    assert held.keys.bytes == 2 * 18 * 4 * 8
    assert make("think", ratio=0.5).quantised_bits("keys", Full(24, 0, 3, 2, 8, 64)) == 32


def test_half_of_the_channels_of_keys_are_a_quarter_of_a_cache():
    policy = make("think", ratio=0.5, window=0)
    assert policy.expected_share(Full(300, 0, 8, 2, 64, 32)) == pytest.approx(0.75)
