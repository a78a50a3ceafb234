"""By the length of keys against decoding by hand with the library, and wrong variants against the same check."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from playground.contract import make
from strategies.kv_cache.key_norm import KeyNorm
from support.budget_policies import BY_HAND, HandRule, Seen, best, roomy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.wrong_variants import variants_of

COLLAPSES = {"key_norm": roomy("key_norm", size=2048)}


def long_keys_go(size: int, recent: int) -> Callable[[Seen], list[set[int]]]:
    def rule(seen):
        late = {p for p in seen.live[0] if p >= seen.read - recent}
        lengths = [dict(zip(live, (keys ** 2).sum(-1).tolist())) for live, keys in zip(seen.live, seen.keys)]
        return [
            late | best({p: -length for p, length in head.items() if p not in late}, size - recent) for head in lengths
        ]

    return rule


@pytest.mark.oracle("key_norm")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("size, recent", [(1, 0), (9, 0), (9, 4), (5, 5)])
def test_key_norm_text_and_cache_equal_decoding_by_hand(architecture, size, recent):
    expected = HandRule(architecture, long_keys_go(size, recent)).write(PROMPT, LENGTH)
    assert course(alone(make("key_norm", size=size, recent=recent)), models(architecture)) == expected


class LongKeysStay(KeyNorm):
    def scores(self, held):
        return held.read("keys").norm(dim=-1)


class ValuesAreMeasured(KeyNorm):
    def scores(self, held):
        return -held.read("values").norm(dim=-1)


class OneHeadIsMeasured(KeyNorm):
    def scores(self, held):
        norms = held.read("keys").norm(dim=-1)
        return -norms[:1].expand_as(norms)


@pytest.mark.refuses("key_norm")
@pytest.mark.parametrize("wrong", variants_of(KeyNorm, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_rule_of_lengths_is_detected(wrong):
    _, expected = HandRule("llama", long_keys_go(13, 0)).write(PROMPT, LENGTH)
    assert course(alone(KeyNorm(size=13)), models())[1] == expected
    assert course(alone(wrong(size=13)), models())[1] != expected
