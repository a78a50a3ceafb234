"""What a cache policy is asked follows from what it implements, not from flags that it declares."""
from __future__ import annotations

import pytest
from registry import registered

from playground.contract import CachePolicy, base, cache_policy
from support.eviction import LENGTH, PROMPT, alone, course, models

CAPABILITIES = [
    cls for name in cache_policy.__all__ if isinstance(cls := getattr(cache_policy, name), type)
    and issubclass(cls, CachePolicy) and cls is not CachePolicy
]


class Latest(CachePolicy):
    """The shortest policy that evicts: the last three tokens stay."""

    def retain(self, held):
        return held.positions >= held.next - 3


class Even(CachePolicy):
    """The shortest policy that depends on positions alone."""

    def visible(self, query_positions, key_positions):
        return (key_positions % 2 == 0) | (key_positions == query_positions)


@pytest.mark.parametrize("policy, stays", [
    (Latest, lambda position, end: position >= end - 3),
    (Even, lambda position, end: position % 2 == 0),  # an odd position is seen by its own row, which is past
])
def test_a_policy_with_one_method_runs(policy, stays):
    tokens, held = course(alone(policy()), models())
    assert len(tokens) == LENGTH
    for generated, layers in enumerate(held[:-1]):
        end = len(PROMPT) + generated
        assert all(head == {p for p in range(end) if stays(p, end)} for layer in layers for head in layer)


def test_a_policy_that_implements_no_retain_is_row_wise():
    assert Even.row_wise and not Latest.row_wise
    assert {cls.name for cls in registered("cache_policy") if cls.row_wise} == {"sink_window", "oracle_keep", "quest"}


def test_what_every_policy_implements_fits_on_one_screen():
    assert sorted(name for name, value in vars(CachePolicy).items() if callable(getattr(CachePolicy, name))
                  and name[0] != "_") == [
        "budget", "expected_share", "explain", "knobs_for_budget", "rests", "retain", "retain_all", "visible",
    ]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda cls: cls.__name__)
def test_a_capability_is_small_and_some_strategy_has_it(capability):
    assert len([name for name in vars(capability) if not name.startswith("_")]) <= 8
    assert any(issubclass(cls, capability) for cls in registered("cache_policy"))


def test_a_method_of_a_capability_that_a_policy_lacks_is_refused():
    with pytest.raises(TypeError, match="Deaf.observe_attention would never be called: derive it from ReadsAttention"):
        type("Deaf", (CachePolicy,), {"name": "deaf", "observe_attention": lambda self, *what: None})
    assert "deaf" not in base.REGISTERED
