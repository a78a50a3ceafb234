"""DSEE against a training by hand with the library's loss and plain lists, planted matrices, and wrong variants."""
from __future__ import annotations

import pairs
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from toys import network

from playground.contract import find
from playground.engine.weights.linear_blocks import LinearBlocks
from playground.errors import Refusal
from strategies.weights import dsee
from strategies.weights.dsee import SmallChange, highest, sparse_part, support
from support.wrong_variants import refused

DSEE = find("dsee")
TEXTS = torch.randint(3, 320, (2, 16), generator=torch.Generator().manual_seed(0)).tolist()  # both in every step
SMALL = {"rank": 3, "entries": 5, "steps": 3, "recovery": 2, "rate": 0.01, "samples": 2}
SHARES = {"ratio": 0.3, "tuned_ratio": 0.5}
TUNED = ("q_proj", "v_proj")


class HandMadeChange(nn.Module):
    """W S1 + alpha / rank (B A + S2), with a dense S2 that a mask holds at zero elsewhere."""

    def __init__(self, start: SmallChange):
        super().__init__()
        self.down, self.up = nn.Parameter(start.down.detach().clone()), nn.Parameter(start.up.detach().clone())
        self.single = nn.Parameter(torch.zeros_like(start.weight))
        self.allowed = torch.zeros(start.weight.numel()).scatter(0, start.places, 1).view_as(start.weight)
        self.mask = torch.ones_like(start.weight)

    def update(self) -> torch.Tensor:
        return 32 / 3 * (self.up @ self.down + self.single * self.allowed)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask + self.update()


def train(model: nn.Module, changes: list[HandMadeChange], steps: int) -> None:
    numbers = [number for change in changes for number in change.parameters()]
    optimiser = torch.optim.AdamW(numbers, lr=0.01, weight_decay=0.0)
    for _ in range(steps):
        optimiser.zero_grad()
        ids = torch.tensor(TEXTS)
        model(input_ids=ids, labels=ids).loss.backward()  # texts of one length: the mean of both is that of all tokens
        optimiser.step()


def masks(scores: list[torch.Tensor], share: float) -> list[torch.Tensor]:
    """1 for what stays, of one list over all matrices."""
    every = sorted((value, number, at) for number, score in enumerate(scores)
                   for at, value in enumerate(score.flatten().tolist()))
    found = [torch.ones(score.numel()) for score in scores]
    for _, number, at in every[:int(share * len(every))]:
        found[number][at] = 0
    return [mask.view_as(score) for mask, score in zip(found, scores)]


def by_hand() -> dict[str, torch.Tensor]:
    """All matrices afterwards, by name."""
    model, chance = network(), torch.Generator().manual_seed(0)
    layers = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
    tuned = {name: layer for name, layer in layers.items() if name.endswith(TUNED)}
    starts = [SmallChange.started(layer.weight.detach(), DSEE(**SMALL), chance) for layer in tuned.values()]
    changes = [*map(HandMadeChange, starts)]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer, change in zip(tuned.values(), changes):
        parametrize.register_parametrization(layer, "weight", change)
    train(model, changes, SMALL["steps"])
    for change, mask in zip(changes, masks([change.update().detach().abs() for change in changes], 0.5)):
        change.mask = mask
    others = [layer for name, layer in layers.items() if name not in tuned]
    for layer, mask in zip(others, masks([layer.weight.abs() for layer in others], 0.3)):
        layer.weight.data = layer.weight * mask
    train(model, changes, SMALL["recovery"])
    return {name: layer.weight.detach() for name, layer in layers.items()}


def changed(cls: type, **knobs) -> LinearBlocks:
    blocks = LinearBlocks(network(), TEXTS)
    cls(**SMALL | SHARES | knobs).change(blocks)
    return blocks


def check_fit(cls: type) -> None:
    found, expected = changed(cls), by_hand()
    assert set(found.layers) == set(expected)
    for name, weight in expected.items():
        assert torch.allclose(found.weight(name), weight, atol=2e-4), name


class PrunesEachMatrix(DSEE):
    def kept(self, changes):
        return [highest([own.scored(self.score)], self.tuned_ratio)[0] for own in changes]


class KeepsByMagnitude(DSEE):
    def kept(self, changes):
        return highest([own.weight.abs() for own in changes], self.tuned_ratio)


class DoesNotRecover(DSEE):
    def change(self, blocks):
        self.recovery = 0
        super().change(blocks)


class PrunesTheChangeToo(DSEE):
    def kept(self, changes):
        kept = super().kept(changes)
        for own, mask in zip(changes, kept):
            own.whole = lambda own=own, mask=mask: (own.weight + own.update()) * mask
        return kept


@pytest.mark.oracle("dsee")
def test_both_trainings_and_both_masks_are_those_by_hand():
    check_fit(DSEE)


@pytest.mark.refuses("dsee")
@pytest.mark.parametrize("wrong", [PrunesEachMatrix, KeepsByMagnitude, DoesNotRecover, PrunesTheChangeToo])
def test_other_fits_are_noticed(wrong):
    refused(check_fit, wrong)


@pytest.mark.parametrize("knobs", [{"steps": 0, "recovery": 0}, {"rank": 0, "entries": 0}])
def test_without_zeros_and_without_a_change_every_tensor_is_kept(knobs):
    blocks = LinearBlocks(network(), TEXTS)
    before = {name: layer.weight for name, layer in blocks.layers.items()}
    DSEE(**SMALL | {"ratio": 0.0, "tuned_ratio": 0.0} | knobs).change(blocks)
    assert all(layer.weight is before[name] for name, layer in blocks.layers.items())


def test_before_a_training_nothing_is_changed_but_by_pruning():
    plain, found = LinearBlocks(network()), changed(DSEE, steps=0, recovery=0, score="weight")
    for name in plain.layers:
        assert torch.equal(found.weight(name), plain.weight(name) * (found.weight(name) != 0))


def test_exactly_the_share_of_each_group_becomes_zero():
    found = changed(DSEE, steps=0, recovery=0, score="weight")
    for is_tuned, share in ((True, 0.5), (False, 0.3)):
        weights = [found.weight(name) for name in found.layers if name.endswith(TUNED) is is_tuned]
        assert sum(int((weight == 0).sum()) for weight in weights) == int(share * sum(map(torch.numel, weights)))


class Noted(DSEE):
    """Keeps what it masked."""

    def kept(self, changes):
        self.noted = super().kept(changes)
        return self.noted


@pytest.mark.parametrize("score", dsee.SCORES)
def test_what_is_pruned_stays_out_and_the_rest_is_a_product_of_the_rank(score):
    plain, found, change = LinearBlocks(network()), LinearBlocks(network(), TEXTS), Noted(
        **SMALL | SHARES | {"entries": 0, "score": score})
    change.change(found)
    names = [name for name in found.layers if name.endswith(TUNED)]
    for name, mask in zip(names, change.noted):
        values = torch.linalg.svdvals(found.weight(name) - plain.weight(name) * mask)
        assert values[2] > 1e-4 and values[3] < 1e-6


def test_single_entries_change_at_their_places_only():
    plain, found = LinearBlocks(network()), changed(DSEE, rank=0, ratio=0.0, tuned_ratio=0.0)
    names, chance = [name for name in found.layers if name.endswith(TUNED)], torch.Generator().manual_seed(0)
    for name in names:
        start = SmallChange.started(plain.weight(name), DSEE(**SMALL | {"rank": 0}), chance)
        moved = (found.weight(name) != plain.weight(name)).flatten().nonzero()[:, 0]
        assert sorted(moved.tolist()) == sorted(start.places.tolist()) and len(moved) == 5


def test_a_change_by_weight_ignores_it_and_the_opposite_keeps_what_the_other_drops():
    chance = torch.Generator().manual_seed(3)
    own = SmallChange.started(torch.randn(8, 10, generator=chance), DSEE(**SMALL), chance)
    with torch.no_grad():
        own.up += torch.randn(own.up.shape, generator=chance)
    assert torch.equal(own.scored("weight"), own.weight.abs())
    by_update, opposite = (highest([own.scored(score)], 0.5)[0] for score in ("update", "opposite"))
    assert torch.equal(by_update, ~opposite)


# --- where single entries are ---

def planted() -> tuple[torch.Tensor, set[int]]:
    """A product of rank 2, little noise and ten entries that stand out, though not as the largest ones."""
    size, chance = 96, torch.Generator().manual_seed(1)
    product = 0.5 * torch.randn(size, 2, generator=chance) @ torch.randn(2, size, generator=chance)
    places = torch.randperm(size * size, generator=chance)[:10]
    noise = 0.01 * torch.randn(size, size, generator=chance)
    spikes = torch.zeros(size * size).index_fill(0, places, 0.8).view(size, size)
    return product + noise + spikes, set(places.tolist())


def check_support(find_places) -> None:
    weight, places = planted()
    assert set(find_places(weight).tolist()) == places


@pytest.mark.oracle
def test_planted_entries_are_found_where_a_product_explains_the_rest():
    check_support(lambda weight: support(weight, 10, torch.Generator().manual_seed(0), most=6))


@pytest.mark.refuses
def test_the_largest_weights_are_other_places():
    refused(check_support, lambda weight: weight.abs().flatten().topk(10).indices)


def test_the_product_explains_more_as_its_rank_grows():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    left = [float(sparse_part(weight, torch.Generator().manual_seed(0), most).norm()) for most in (1, 11, 31)]
    assert left[0] > left[1] > left[2] > 0


def test_bits_count_what_is_kept_the_product_and_the_places():
    chance = torch.Generator().manual_seed(0)
    own = SmallChange.started(torch.randn(16, 16, generator=chance), DSEE(rank=2, entries=4), chance)
    assert own.bits() == 16 + (16 * 2 * 32 + 4 * (16 + 8)) / 256
    own.kept = highest([own.weight.abs()], 0.5)[0]
    assert own.bits() == 9 + (16 * 2 * 32 + 4 * (16 + 8)) / 256


def test_a_model_without_such_projections_is_refused():
    with pytest.raises(Refusal, match="has none that are layers of their own"):
        DSEE().change(LinearBlocks(pairs.network("gpt_neox"), TEXTS))
