"""By chance against decoding by hand with the library, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Held, make
from strategies.kv_cache.random_keep import RandomKeep
from support.budget_policies import roomy
from support.eviction import alone, course, models
from support.wrong_variants import variants_of

COLLAPSES = {"random_keep": roomy("random_keep", size=2048)}


def at_random(policy: RandomKeep, heads: int, length: int) -> torch.Tensor:
    """How often each position stayed live in a text that grew token by token, over all heads, [length]."""
    positions = torch.arange(policy.size)[None].expand(heads, -1)
    for next_position in range(policy.size + 1, length + 1):
        positions = torch.cat([positions, torch.full((heads, 1), next_position - 1)], 1)
        held = Held(0, 1, "keep", 0, next_position, positions, read=lambda part: torch.zeros(heads, 1, 1))
        positions = positions[policy.retain(held)].view(heads, -1)
    return torch.bincount(positions.flatten(), minlength=length)


def unevenness(kind: type[RandomKeep]) -> float:
    """Chi-square of 32 positions over 600 heads, 31 degrees of freedom, where a quarter of the text stays.

    For an even sample 31 with a deviation of 8; an unevenness of a tenth of a position's chances adds 600 * 0.25 * 0.01
    / 0.75 for each, 64 in all.
    """
    counts = sum(at_random(kind(size=8, dice=dice), 6, 32) for dice in range(100)).float()
    return float(((counts - 150) ** 2 / (150 * 0.75)).sum() * 31 / 32)


class DrawnAnewForEveryKeep(RandomKeep):
    """Older tokens have to survive more random evictions."""

    def scores(self, held):
        chance = torch.Generator().manual_seed(self.dice * 1000 + held.next)
        return torch.rand(held.positions.shape, generator=chance)


class LateOnesAreLuckier(RandomKeep):
    def scores(self, held):
        return super().scores(held) + held.positions / held.next / 4


@pytest.mark.oracle("random_keep")
def test_randomly_retained_tokens_are_a_uniform_sample_of_the_text():
    assert unevenness(RandomKeep) < 31 + 5 * 8


@pytest.mark.refuses("random_keep")
@pytest.mark.parametrize("wrong", variants_of(RandomKeep, __name__), ids=lambda cls: cls.__name__)
def test_a_biased_sample_is_detected(wrong):
    assert unevenness(wrong) > 31 + 5 * 8


def test_heads_layers_and_seeds_differ_and_a_run_is_reproducible():
    _, held = course(alone(make("random_keep", size=8)), models())
    assert len({frozenset(head) for layer in held[-1] for head in layer}) == 6
    assert course(alone(make("random_keep", size=8)), models())[1] == held
    assert course(alone(make("random_keep", size=8, dice=1)), models())[1] != held


def test_random_retention_does_not_depend_on_the_chunk_size():
    policy = make("random_keep", size=5)

    def kept(positions: list[int]) -> list[int]:
        at = Held(
            0, 1, "keep", 0, max(positions) + 1, torch.tensor([positions]), read=lambda part: torch.zeros(1, 1, 1)
        )
        return at.positions[policy.retain(at)].tolist()

    one_by_one = list(range(5))
    for position in range(5, 300):
        one_by_one = kept([*one_by_one, position])
    assert one_by_one == kept(list(range(300)))
