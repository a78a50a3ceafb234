"""Pyramid of snapshots (PyramidKV): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairs import pair

from playground.contract import Held, make
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Cache, Figure
from playground.trace.cache_contents import contents
from strategies.kv_cache.prefixkv import level
from strategies.kv_cache.pyramidkv import PyramidKV
from support.budget_policies import BY_HAND, TEXT, TIGHT, TREE, HandRule, best, cache_positions, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, models, uneven
from support.wrong_variants import variants_of

# --- a pyramid ---

def by_the_paper(layers: int, prompt: int, window: int, capacity: int, beta: int) -> list[float]:
    """Tokens of a prompt beyond the capacity that each layer retains, before rounding, as the authors' code
    computes them: below twice the capacity without the window it is SnapKV.
    """
    if prompt < 2 * (capacity - window):
        return [capacity] * layers
    least = (capacity - window) / beta
    most = 2 * (capacity - window) - least
    if most > prompt - window:
        most = prompt - window
        least = 2 * (capacity - window) - most
    return [most - layer * (most - least) / (layers - 1) + window for layer in range(layers)]


def of_layer(layer: int, layers: int, prompt: int) -> Held:
    return Held(layer, layers, "prefill", prompt, prompt, torch.arange(prompt)[None], read=None)


def shares(policy: PyramidKV, layers: int, prompt: int) -> list[int]:
    return [policy.share(of_layer(layer, layers, prompt)) + policy.window for layer in range(layers)]


PYRAMIDS = [
    (6, 200, 8, 40, 20),
    (6, 200, 8, 40, 1),
    (3, 22, 3, 9, 3),
    (32, 4000, 16, 128, 10),
    (5, 50, 8, 40, 20),
    (2, 41, 8, 40, 40),
    (8, 95, 16, 64, 20),
    (8, 96, 16, 64, 20),
]


@pytest.mark.oracle("pyramidkv")
@pytest.mark.parametrize("layers, prompt, window, capacity, beta", PYRAMIDS)
def test_pyramid_budgets_are_the_papers_and_average_to_the_capacity(
    layers, prompt, window, capacity, beta
):
    found = shares(make("pyramidkv", window=window, capacity=capacity, beta=beta), layers, prompt)
    assert all(
        abs(ours - theirs) <= 0.5 for ours, theirs in zip(found, by_the_paper(layers, prompt, window, capacity, beta))
    )
    assert abs(sum(found) / layers - capacity) <= 0.5
    assert found == sorted(found, reverse=True) and found[0] <= prompt


@pytest.mark.parametrize("prompt, uneven", [(41, False), (71, False), (72, True), (500, True)])
def test_layers_get_different_budgets_once_the_prompt_is_twice_the_capacity_without_the_window(prompt, uneven):
    found = shares(make("pyramidkv", window=4, capacity=40), 6, prompt)
    assert (len(set(found)) > 1) == uneven and abs(sum(found) / 6 - 40) <= 0.5


@pytest.mark.parametrize("prompt", [5, 30, 40])
def test_every_layer_retains_a_prompt_within_the_capacity(prompt):
    assert min(shares(make("pyramidkv", window=4, capacity=40), 6, prompt)) >= prompt


def test_a_model_of_one_layer_has_the_capacity():
    assert shares(make("pyramidkv", window=4, capacity=40), 1, 200) == [40]


class UpsideDown(PyramidKV):
    def share(self, held):
        return super().share(replace(held, layer=held.layers - 1 - held.layer))


class AsWideAsItLikes(PyramidKV):
    def share(self, held):
        return super().share(replace(held, prompt=10 ** 6))


@pytest.mark.refuses("pyramidkv")
@pytest.mark.parametrize("wrong", variants_of(PyramidKV, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_pyramid_is_detected(wrong):
    found = [
        abs(ours - theirs)
        for layers, prompt, window, capacity, beta in PYRAMIDS
        for ours, theirs in zip(
            shares(wrong(window, capacity, beta=beta), layers, prompt),
            by_the_paper(layers, prompt, window, capacity, beta),
        )
    ]
    assert max(found) > 0.5


@pytest.mark.oracle("pyramidkv")
@pytest.mark.parametrize("architecture", BY_HAND)
def test_every_layer_of_a_pyramid_retains_its_best_slots_and_generated_tokens(architecture):
    counts, window = [13, 9, 5], 3

    def rule(seen):
        if seen.read > len(PROMPT):
            return [set(live) for live in seen.live]
        votes = seen.weights[:, -window:].unflatten(0, (len(seen.live), -1)).sum((1, 2)).tolist()
        early = [dict(zip(live[:-window], head)) for live, head in zip(seen.live, votes)]
        return [best(head, counts[seen.layer] - window) | set(seen.live[0][-window:]) for head in early]

    expected = HandRule(architecture, rule).write(PROMPT, LENGTH)
    assert (
        course(alone(make("pyramidkv", window=window, capacity=9, beta=3, kernel=1)), models(architecture)) == expected
    )
    assert [{len(head) for head in layer} for layer in expected[1][-1]] == [{count + LENGTH - 1} for count in counts]


def test_the_figure_of_a_pyramid_shows_the_slots_of_its_layers():
    session = prepare(
        pair(), [with_policy(TREE, "pyramidkv", **TIGHT["pyramidkv"])], Prompt(TEXT), Limits(max_new_tokens=8)
    )
    events = [stamped.event for stamped in session]
    (figure,) = [event for event in events if isinstance(event, Figure) and event.name == "prompt tokens kept"]
    first = next(event for event in events if isinstance(event, Cache))
    held = cache_positions(first, next(contents([first])))
    assert figure.data["values"] == [len(held[layer * first.heads]) for layer in range(first.layers)] == [13, 9, 5]


# --- one retained share for all layers ---

def curves(votes: torch.Tensor) -> list[list[float]]:
    """Share of a layer's attention that its best n tokens have, n from 0."""
    return [
        [sum(sorted(layer, reverse=True)[:n]) / sum(layer) for n in range(len(layer) + 1)] for layer in votes.tolist()
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gone", [0, 20, 100, 180])
def test_every_layer_reaches_the_level_with_the_fewest_tokens(gone, seed):
    votes = uneven(4, 50, seed)
    kept, shares_at = level(votes, gone), curves(votes)
    reached = min(shares[n] for shares, n in zip(shares_at, kept))
    missed = max(shares[n - 1] for shares, n in zip(shares_at, kept))
    assert missed <= reached + 1e-12
    assert abs(4 * 50 - sum(kept) - gone) < 5
    assert kept[0] > kept[-1] or gone == 0, "a layer that gathers its attention needs fewer"


@pytest.mark.parametrize("gone", [9, 18, 27])
def test_no_other_split_gives_the_worst_layer_a_larger_share(gone):
    votes = uneven(3, 12, 1)
    kept, shares_at = level(votes, gone), curves(votes)

    def poorest(division):
        return min(shares[n] for shares, n in zip(shares_at, division))

    others = [(a, b, sum(kept) - a - b) for a in range(13) for b in range(13) if 0 <= sum(kept) - a - b <= 12]
    assert len(others) > 20 and poorest(kept) >= max(map(poorest, others)) - 1e-12
