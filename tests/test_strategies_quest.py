"""Quest: pages are chosen by the largest product that a key within their ranges could have."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.engine.attention import segment_attention
from playground.engine.attention.attention_mask import RowsAndSlots
from strategies.kv_cache import quest
from support.budget_policies import roomy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.wrong_variants import variants_of

Quest = find("quest")
COLLAPSES = {"quest": roomy("quest", size=2048)}
HEADS, GROUP, SLOTS, D, PAGE = 2, 3, 22, 4, 4


def states(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(query: list, keys: list, visible: list[int], position: int, pages: int) -> set[int]:
    """What one row of one head reads, of visible tokens: query [group][d], keys [m][d]."""
    bounds = {}
    for page in {p // PAGE for p in visible}:
        inside = [keys[p] for p in visible if p // PAGE == page]
        low, high = ([edge(column) for column in zip(*inside)] for edge in (min, max))
        bounds[page] = sum(max(q * a, q * b) for one in query for q, a, b in zip(one, low, high))
    own = position // PAGE
    others = sorted((page for page in bounds if page != own), key=lambda page: -bounds[page])[:pages - 1]
    return {p for p in visible if p // PAGE in {own, *others}}


def check(cls: type) -> None:
    """Two rows of a tree: siblings at position 20 and 21 of a text whose last tokens are drafts."""
    for seed in range(10):
        policy, keys, query = cls(size=12, page=PAGE, full_layers=1), states(HEADS, SLOTS, D, seed=seed), None
        query = states(HEADS, GROUP, 2, D, seed=seed + 50)
        positions, rows = torch.tensor([[*range(20), 20, 20]]), [19, 20]
        visible = torch.zeros(1, 2, SLOTS, dtype=torch.bool)
        visible[0, 0, :20], visible[0, 1, [*range(20), 21]] = True, True
        chosen = policy.select_by_states(1, query, keys, RowsAndSlots(rows, positions, visible)) & visible
        for head in range(HEADS):
            for row, slots in enumerate(([*range(20)], [*range(20), 21])):
                named = {p: slot for p, slot in zip(positions[0, slots].tolist(), slots)}
                held = [keys[head, named.get(p, 0)].tolist() for p in range(21)]
                expected = by_hand(query[head, :, row].tolist(), held, sorted(named), rows[row], 3)
                found = {p for p, slot in named.items() if chosen[head, row, slot]}
                assert found == expected
        assert policy.select_by_states(0, query, keys, RowsAndSlots(rows, positions, visible)).all()


class MeanKeys(Quest):
    """Ranks pages by the product with the middle of the range."""

    def _row(self, query, keys, visible, pages, own, known):
        middle = keys.clone()
        for page in range(own + 1):
            inside = (pages == page) & visible
            for head in range(len(keys)):
                middle[head, inside[head]] = keys[head, inside[head]].mean(0)
        return super()._row(query, middle, visible, pages, own, known)


class CountsSiblings(Quest):
    def _row(self, query, keys, visible, pages, own, known):
        return super()._row(query, keys, torch.ones_like(visible), pages, own, known)


class ForgetsItsOwnPage(Quest):
    def _row(self, query, keys, visible, pages, own, known):
        return super()._row(query, keys, visible, pages, own, known) & (pages != own)


class OneQueryHead(Quest):
    def _row(self, query, keys, visible, pages, own, known):
        return super()._row(query[:, :1], keys, visible, pages, own, known)


@pytest.mark.oracle("quest")
def test_the_pages_with_the_largest_bounds_are_read():
    check(Quest)


@pytest.mark.refuses("quest")
@pytest.mark.parametrize("wrong", [MeanKeys, ForgetsItsOwnPage, OneQueryHead], ids=lambda cls: cls.__name__)
def test_a_wrong_bound_is_refused(wrong):
    assert wrong in variants_of(Quest, __name__)
    with pytest.raises(AssertionError):
        check(wrong)


def test_a_bound_is_never_below_a_product_with_a_key_of_the_page():
    from strategies.kv_cache.quest import page_bounds, page_ranges
    keys, query = states(HEADS, SLOTS, D, seed=1), states(HEADS, GROUP, D, seed=2)
    pages = (torch.arange(SLOTS) // PAGE).expand(HEADS, -1)
    low, high = page_ranges(keys, pages, torch.ones(HEADS, SLOTS, dtype=torch.bool), 6)
    bounds, products = page_bounds(query, low, high), query @ keys.transpose(1, 2)
    assert (bounds.gather(2, pages[:, None].expand(-1, GROUP, -1)) >= products - 1e-12).all()


# --- what is read ---

KEPT = {"size": 8, "page": 4, "full_layers": 1}
LONG = PROMPT * 4


class Reads:
    """Counts the slots of the layers that select which each step loads: to find pages, and to attend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        models()  # whose loading tries forwards, too
        self.ranged, self.attended = [], []
        ranges, attend = quest.page_ranges, segment_attention.attend

        def counted(keys, *rest):
            self.ranged.append(keys.shape[1])
            return ranges(keys, *rest)

        def attending(query, keys, *rest):
            if query.shape[1] == 1:
                self.attended.append(keys.shape[1])
            return attend(query, keys, *rest)

        monkeypatch.setattr(quest, "page_ranges", counted)
        monkeypatch.setattr(segment_attention, "attend", attending)


def test_a_row_loads_its_pages_and_the_keys_of_the_newest_page_only(monkeypatch):
    reads = Reads(monkeypatch)
    course(alone(make("quest", **KEPT)), models(), LONG)
    layers = models()["target"].depth
    selecting = [slots for step, slots in enumerate(reads.attended) if step % layers]
    assert len(selecting) >= (layers - 1) * (LENGTH - 1) and max(selecting) <= KEPT["size"] < len(LONG)
    assert max(reads.ranged) <= KEPT["page"], "the ranges of complete pages are known"
    assert min(slots for step, slots in enumerate(reads.attended) if step % layers == 0) > len(LONG)


def test_the_text_is_that_of_pages_that_are_masked(monkeypatch):
    """Ranges of all pages from their keys at every step, and every key and value loaded."""
    kept = course(alone(make("quest", **KEPT)), models(), LONG)
    monkeypatch.setattr(Quest, "_known", lambda self, layer, keys, around: quest.Ranges.none(keys))
    monkeypatch.setattr(segment_attention, "_selected", lambda *whole: whole)
    assert course(alone(make("quest", **KEPT)), models(), LONG) == kept


def test_ranges_that_outlive_their_tokens_are_refused():
    """The wrong variant keeps the ranges of tokens that were taken back; the strategy reads the new ones."""
    def same(forgets: bool) -> bool:
        policy, query = make("quest", size=8, page=PAGE, full_layers=0), states(HEADS, GROUP, 1, D, seed=9)
        for seed, committed in ((1, 20), (2, 8), (2, 20)):
            before = dict(policy._ranges)
            keys = torch.cat([states(HEADS, 8, D, seed=0), states(HEADS, SLOTS - 8, D, seed=seed)], 1)
            positions = torch.arange(committed + 1)[None]
            around = RowsAndSlots([committed], positions, torch.ones(1, 1, committed + 1, dtype=torch.bool), committed)
            found = policy.select_by_states(0, query, keys[:, :committed + 1], around)
            policy._ranges = policy._ranges if forgets else policy._ranges | before
        anew = make("quest", size=8, page=PAGE, full_layers=0).select_by_states(0, query, keys[:, :21], around)
        return torch.equal(found, anew)

    assert same(forgets=True) and not same(forgets=False)


def test_nothing_is_evicted_and_the_text_changes():
    knobs = {"size": 4, "page": 2, "full_layers": 0}
    ours, held = course(alone(make("quest", **knobs)), models())
    plain, _ = course(Assembly(make("greedy")), models())
    assert ours[0] == plain[0] and ours != plain
    for number, layers in enumerate(held):
        assert all(head == set(range(len(PROMPT) + number)) for layer in layers for head in layer)
