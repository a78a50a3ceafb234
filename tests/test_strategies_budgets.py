"""Cache policies that keep so many tokens of each head: which ones stay, held against the library's own attention, and the bound for all of them."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from tables import TableModel, watch, write
from test_store import exact_softmax
from test_strategies_eviction import LENGTH, PROMPT, ByHand, Wrong, alone, course, lives, models
from transformers import AttentionInterface

from playground.draws import Draws
from playground.errors import Refusal
from playground.events import Cache, Figure
from playground.lane import Limits
from playground.parts.votes import heaviest
from playground.recipe import Assembly, Recipe, assemble
from playground.retention import Held
from playground.session import Prompt, prepare
from playground.strategy import make
from strategies.kv_cache.dapq import DapQ
from strategies.kv_cache.key_norm import KeyNorm
from strategies.kv_cache.oracle_keep import OracleKeep
from strategies.kv_cache.prefixkv import PrefixKV, level
from strategies.kv_cache.pyramidkv import PyramidKV
from strategies.kv_cache.random_keep import RandomKeep
from strategies.kv_cache.sink_window import SinkWindow
from strategies.kv_cache.tova import Tova

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
TEXT = "The green bird sings, and the red fox listens."
TREE = Recipe("speculative", {}, [("draft_model", {"width": 2, "depth": 3})])
TIGHT = {"tova": {"size": 9}, "key_norm": {"size": 9, "recent": 2}, "random_keep": {"size": 9, "recent": 2},
         "pyramidkv": {"window": 3, "capacity": 9, "beta": 3}, "dapq": {"capacity": 9, "pretending": 5, "recent": 2},
         "prefixkv": {"keep": 0.5, "tail": 4}}
BUDGETED = [name for name in TIGHT if "budget_respected" in make(name).guarantee]
every_policy = pytest.mark.parametrize("name, knobs", TIGHT.items(), ids=TIGHT)


def with_policy(lane: Recipe, name: str, **knobs) -> Recipe:
    return replace(lane, extras=[*lane.extras, (name, knobs)])


def roomy(name: str, **knobs) -> list[Collapse]:
    """Token by token, and a tree at a time: with room for the whole text nothing changes."""
    return [Collapse(with_policy(plain, name, **knobs), plain) for plain in (Recipe("greedy"), TREE)]


ALIKE = {"window": 3, "capacity": 4, "kernel": 3}
COLLAPSES = {
    "tova": roomy("tova", size=2048), "key_norm": roomy("key_norm", size=2048), "random_keep": roomy("random_keep", size=2048),
    "pyramidkv": [*roomy("pyramidkv", capacity=2048),
                  Collapse(with_policy(TREE, "pyramidkv", beta=1, **ALIKE), with_policy(TREE, "snapkv", **ALIKE))],
    "dapq": roomy("dapq", capacity=2048), "prefixkv": roomy("prefixkv", keep=1.0),
    "oracle_keep": [*roomy("oracle_keep", size=2048), Collapse(with_policy(Recipe("beam_search"), "oracle_keep", size=2048), Recipe("beam_search"))],
}


# --- by hand, with the library alone ---

@dataclass
class Seen:
    """One layer after a forward, as the library has it."""

    layer: int
    weights: torch.Tensor  # of the new rows, [heads, rows, slots]
    keys: torch.Tensor  # [kv_heads, slots, d]
    live: list[list[int]]  # positions of the slots, by KV head
    read: int  # tokens


class HandRule(ByHand):
    """The rule is asked layer by layer: rule(seen) -> positions that stay, by KV head."""

    def _settle(self, layer, weights, places):
        pool = self.cache.layers[layer]
        if layer == len(self.live):
            self.live.append([[] for _ in range(pool.keys.shape[1])])
        live = [[*head, *places] for head in self.live[layer]]
        stays = self.rule(Seen(layer, weights, pool.keys[0], live, self.read))
        kept = torch.tensor([[slot for slot, p in enumerate(head) if p in chosen] for head, chosen in zip(live, stays)])
        index = kept[None, :, :, None].expand(1, -1, -1, pool.keys.shape[3])
        pool.keys, pool.values = pool.keys.gather(2, index), pool.values.gather(2, index)
        self.live[layer] = [[head[slot] for slot in row] for head, row in zip(live, kept.tolist())]


def best(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=lambda p: (scores[p], p), reverse=True)[:count])


def least_attended_goes(size: int) -> Callable[[Seen], list[set[int]]]:
    def rule(seen):
        shared = dict(zip(seen.live[0], seen.weights[:, -1].mean(0).tolist()))
        return [best(shared, size)] * len(seen.live)
    return rule


def long_keys_go(size: int, recent: int) -> Callable[[Seen], list[set[int]]]:
    def rule(seen):
        late = {p for p in seen.live[0] if p >= seen.read - recent}
        lengths = [dict(zip(live, (keys ** 2).sum(-1).tolist())) for live, keys in zip(seen.live, seen.keys)]
        return [late | best({p: -length for p, length in head.items() if p not in late}, size - recent) for head in lengths]
    return rule


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("size", [1, 6, 13])
def test_tova_writes_and_holds_what_decoding_by_hand_does(architecture, size):
    expected = HandRule(architecture, least_attended_goes(size)).write(PROMPT, LENGTH)
    assert course(alone(make("tova", size=size)), models(architecture)) == expected


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("size, recent", [(1, 0), (9, 0), (9, 4), (5, 5)])
def test_key_norm_writes_and_holds_what_decoding_by_hand_does(architecture, size, recent):
    expected = HandRule(architecture, long_keys_go(size, recent)).write(PROMPT, LENGTH)
    assert course(alone(make("key_norm", size=size, recent=recent)), models(architecture)) == expected


class EachHeadForItself(Tova):
    def attended(self, layer, weights, queries, keys):
        self.votes.replace(layer, weights[:, -1:], keys)


class VotesAddUp(Tova):
    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights[:, -1:].sum(0, keepdim=True), keys)


class TheNewestIsSafe(Tova):
    def retain(self, held):
        newest = held.positions == held.next - 1
        return newest | heaviest(self.votes.of(held.layer, held.positions), self.size - 1, held.live & ~newest)


class TheWholePromptCutsItself(Tova):
    def wants(self, position, prompt):
        return True

    def attended(self, layer, weights, queries, keys):
        self.votes.replace(layer, weights.sum((0, 1), keepdim=True), keys)


class LongKeysStay(KeyNorm):
    def retain(self, held):
        return heaviest(held.read("keys").norm(dim=-1), self.size, held.live)


class ValuesAreMeasured(KeyNorm):
    def retain(self, held):
        return heaviest(-held.read("values").norm(dim=-1), self.size, held.live)


class OneHeadIsMeasured(KeyNorm):
    def retain(self, held):
        return heaviest(-held.read("keys").norm(dim=-1)[:1], self.size, held.live)


@pytest.mark.parametrize("wrong", [*Tova.__subclasses__(), *KeyNorm.__subclasses__()], ids=lambda cls: cls.__name__)
def test_a_wrong_way_to_choose_is_found_out(wrong):
    right = wrong.__base__
    rule = least_attended_goes(13) if right is Tova else long_keys_go(13, 0)
    _, expected = HandRule("llama", rule).write(PROMPT, LENGTH)
    assert course(alone(right(size=13)), models())[1] == expected
    assert course(alone(wrong(size=13)), models())[1] != expected


# --- a pyramid ---

def by_the_paper(layers: int, prompt: int, window: int, capacity: int, beta: int) -> list[float]:
    """Tokens of the prompt that each layer keeps, before they are rounded, as the paper's authors work them out."""
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


PYRAMIDS = [(6, 200, 8, 40, 20), (6, 200, 8, 40, 1), (3, 22, 3, 9, 3), (32, 4000, 16, 128, 10), (5, 50, 8, 40, 20), (2, 41, 8, 40, 40)]


@pytest.mark.parametrize("layers, prompt, window, capacity, beta", PYRAMIDS)
def test_the_layers_of_a_pyramid_keep_what_the_paper_says_and_the_capacity_on_average(layers, prompt, window, capacity, beta):
    found = shares(make("pyramidkv", window=window, capacity=capacity, beta=beta), layers, prompt)
    assert all(abs(ours - theirs) <= 0.5 for ours, theirs in zip(found, by_the_paper(layers, prompt, window, capacity, beta)))
    assert abs(sum(found) / layers - capacity) <= 0.5
    assert found == sorted(found, reverse=True) and found[0] <= prompt


@pytest.mark.parametrize("prompt", [5, 30, 40])
def test_a_prompt_within_the_capacity_is_kept_whole_by_every_layer(prompt):
    assert min(shares(make("pyramidkv", window=4, capacity=40), 6, prompt)) >= prompt


def test_a_model_of_one_layer_has_the_capacity():
    assert shares(make("pyramidkv", window=4, capacity=40), 1, 200) == [40]


class UpsideDown(PyramidKV):
    def share(self, held):
        return super().share(replace(held, layer=held.layers - 1 - held.layer))


class AsWideAsItLikes(PyramidKV):
    def share(self, held):
        return super().share(replace(held, prompt=10 ** 6))


@pytest.mark.parametrize("wrong", PyramidKV.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_pyramid_is_found_out(wrong):
    found = [abs(ours - theirs) for layers, prompt, window, capacity, beta in PYRAMIDS
             for ours, theirs in zip(shares(wrong(window, capacity, beta=beta), layers, prompt), by_the_paper(layers, prompt, window, capacity, beta))]
    assert max(found) > 0.5


@pytest.mark.parametrize("architecture", BY_HAND)
def test_every_layer_of_a_pyramid_keeps_its_own_best_and_what_is_generated(architecture):
    counts, window = [13, 9, 5], 3

    def rule(seen):
        if seen.read > len(PROMPT):
            return [set(live) for live in seen.live]
        votes = seen.weights[:, -window:].unflatten(0, (len(seen.live), -1)).sum((1, 2)).tolist()
        early = [dict(zip(live[:-window], head)) for live, head in zip(seen.live, votes)]
        return [best(head, counts[seen.layer] - window) | set(seen.live[0][-window:]) for head in early]

    expected = HandRule(architecture, rule).write(PROMPT, LENGTH)
    assert course(alone(make("pyramidkv", window=window, capacity=9, beta=3, kernel=1)), models(architecture)) == expected
    assert [{len(head) for head in layer} for layer in expected[1][-1]] == [{count + LENGTH - 1} for count in counts]


def test_the_figure_of_a_pyramid_is_what_its_layers_hold():
    session = prepare(pair(), [with_policy(TREE, "pyramidkv", **TIGHT["pyramidkv"])], Prompt(TEXT), Limits(max_new_tokens=8))
    events = [stamped.event for stamped in session]
    (figure,) = [event for event in events if isinstance(event, Figure) and event.name == "prompt tokens kept"]
    first = next(event for event in events if isinstance(event, Cache))
    assert figure.data["values"] == [len(told(first)[layer * first.heads]) for layer in range(first.layers)] == [13, 9, 5]


# --- a rehearsal of the answer ---

@torch.inference_mode()
def cast_by(architecture: str, pretended: list[int]) -> list[torch.Tensor]:
    """Attention the prompt gets from tokens that follow it, summed over them, by layer [heads, prompt]."""
    library = network(architecture)
    library.set_attn_implementation("eager")
    layers = library(input_ids=torch.tensor([PROMPT + pretended]), use_cache=False, output_attentions=True).attentions
    return [weights[0, :, len(PROMPT):, :len(PROMPT)].sum(1) for weights in layers]


def by_the_answer(architecture: str, pretended: list[int], capacity: int, recent: int = 0) -> Callable[[Seen], list[set[int]]]:
    """The prompt is cut by what such an answer would attend to; all else stays."""
    votes, cut = cast_by(architecture, pretended), len(PROMPT) - recent

    def rule(seen):
        if seen.read > len(PROMPT):
            return [set(live) for live in seen.live]
        heads = votes[seen.layer].unflatten(0, (len(seen.live), -1)).sum(1).tolist()
        return [best(dict(enumerate(head[:cut])), capacity - recent) | set(range(cut, len(PROMPT))) for head in heads]
    return rule


REHEARSED = [
    (dict(pretending=6, first=2), PROMPT[:2] + PROMPT[-4:]), (dict(pretending=1, first=0), PROMPT[-1:]), (dict(pretending=3, first=8), PROMPT[:3]),
    (dict(pretending=4, content="repeated"), PROMPT[-1:] * 4), (dict(pretending=128), PROMPT), (dict(pretending=5, recent=4), PROMPT[:2] + PROMPT[-3:]),
]


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs, pretended", REHEARSED, ids=lambda value: str(value)[:40])
def test_dapq_keeps_what_such_an_answer_attends_to_and_writes_on_as_if_it_had_never_been(architecture, knobs, pretended):
    expected = HandRule(architecture, by_the_answer(architecture, pretended, 9, knobs.get("recent", 0))).write(PROMPT, LENGTH)
    assert make("dapq", capacity=9, **knobs).rehearsal(PROMPT) == pretended
    assert course(alone(make("dapq", capacity=9, **knobs)), models(architecture)) == expected


class TheFirstOneSpeaksForAll(DapQ):
    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights[:, :1], keys)


class OnlySharesOfThePromptCount(DapQ):
    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights / weights.sum(-1, keepdim=True), keys)


class TheStartLendsTheMost(DapQ):
    def rehearsal(self, text):
        return text[:self.pretending - self.first] + text[-self.first:]


class ReadOnePlaceLate(DapQ):
    """The right tokens, but behind one more of them."""

    def rehearsal(self, text):
        return super().rehearsal(text)[:1] + super().rehearsal(text)


@pytest.mark.parametrize("wrong", DapQ.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_rehearsal_is_found_out(wrong):
    expected = HandRule("llama", by_the_answer("llama", PROMPT[:2] + PROMPT[-6:], 9)).write(PROMPT, LENGTH)
    assert course(alone(DapQ(capacity=9, pretending=8)), models()) == expected
    assert course(alone(wrong(capacity=9, pretending=8)), models()) != expected


def test_a_rehearsal_stays_within_the_positions_a_model_has_and_a_short_prompt_needs_none():
    model = models("gpt2")["target"]
    long = [7, 9, 54] * (model.context // 3)
    lane = write(alone(make("dapq", capacity=16)), models("gpt2"), long[:model.context - 3], Limits(0, 50), Draws(0))
    assert (lane.generated, lane.reason) == (3, "length")
    assert make("dapq", capacity=9).rehearsal(PROMPT[:9]) == [] != make("dapq", capacity=9).rehearsal(PROMPT[:10])


def test_a_fork_rehearses_behind_what_it_was_given():
    _, found = course(alone(make("dapq", capacity=9)), models(), forced=(5, 6, 7))
    given = set(range(len(PROMPT), len(PROMPT) + 3))
    assert all(given <= head and len([p for p in head if p < len(PROMPT)]) == 9 for layer in found[-1] for head in layer)


# --- one level for all layers ---

def uneven(layers: int, length: int, seed: int = 0) -> torch.Tensor:
    """Votes of layers that gather their attention more and more, [layers, length]."""
    votes = torch.rand(layers, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return votes ** torch.arange(1, layers + 1)[:, None]


def curves(votes: torch.Tensor) -> list[list[float]]:
    """Share of its votes that the best n tokens of a layer have, n from 0."""
    return [[sum(sorted(layer, reverse=True)[:n]) / sum(layer) for n in range(len(layer) + 1)] for layer in votes.tolist()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gone", [0, 20, 100, 180])
def test_one_level_is_reached_by_every_layer_and_by_none_with_a_token_less(gone, seed):
    votes = uneven(4, 50, seed)
    kept, shares_at = level(votes, gone), curves(votes)
    reached = min(shares[n] for shares, n in zip(shares_at, kept))
    missed = max(shares[n - 1] for shares, n in zip(shares_at, kept))
    assert missed <= reached + 1e-12
    assert abs(4 * 50 - sum(kept) - gone) < 5
    assert kept[0] > kept[-1] or gone == 0, "a layer that gathers its attention needs fewer"


@pytest.mark.parametrize("gone", [9, 18, 27])
def test_no_other_division_leaves_the_poorest_layer_a_larger_share(gone):
    votes = uneven(3, 12, 1)
    kept, shares_at = level(votes, gone), curves(votes)

    def poorest(division):
        return min(shares[n] for shares, n in zip(shares_at, division))

    others = [(a, b, sum(kept) - a - b) for a in range(13) for b in range(13) if 0 <= sum(kept) - a - b <= 12]
    assert len(others) > 20 and poorest(kept) >= max(map(poorest, others)) - 1e-12


@pytest.mark.parametrize("keep, sinks", [(0.05, 1), (0.5, 0), (0.5, 8), (0.8, 1), (1.0, 1)])
def test_what_the_layers_forget_adds_up(keep, sinks):
    forgotten = make("prefixkv", keep=keep, sinks=sinks).counts(uneven(5, 60))
    assert sum(forgotten) == min(round((1 - keep) * 300), 5 * (59 - sinks))
    assert all(0 <= count <= 59 - sinks for count in forgotten)


@torch.inference_mode()
def received(architecture: str) -> torch.Tensor:
    """Attention every token of the prompt gets from all of it, over all heads, [layers, prompt]."""
    library = network(architecture)
    library.set_attn_implementation("eager")
    layers = library(input_ids=torch.tensor([PROMPT]), use_cache=False, output_attentions=True).attentions
    return torch.stack([weights[0].sum((0, 1)) for weights in layers])


def one_level(architecture: str, policy: PrefixKV) -> Callable[[Seen], list[set[int]]]:
    """The prompt is cut by what it attends to; then, token by token, the oldest of the tail goes where the layer holds more than its ratio."""
    votes, length = received(architecture), len(PROMPT)
    forgotten = policy.counts(votes)

    def rule(seen):
        live, gone = seen.live[0], forgotten[seen.layer]
        if seen.read == length:
            candidates = {p: -vote for p, vote in enumerate(votes[seen.layer].tolist()) if policy.sinks <= p < length - 1}
            worst = sorted(candidates, key=lambda p: (candidates[p], -p), reverse=True)[:gone]
            return [set(live) - set(worst)] * len(seen.live)
        oldest = length - gone - policy.tail if length - gone > policy.tail else (length - gone) // 2
        surplus = len(live) > seen.read * (1 - gone / length) + 1 - 1e-9
        return [set(live) - ({live[oldest]} if surplus else set())] * len(seen.live)
    return rule


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", [dict(keep=0.5, tail=4), dict(keep=0.3, tail=25, sinks=0), dict(keep=0.75, tail=1, sinks=3)], ids=str)
def test_prefixkv_writes_and_holds_what_decoding_by_hand_does(architecture, knobs):
    policy = make("prefixkv", **knobs)
    expected = HandRule(architecture, one_level(architecture, policy)).write(PROMPT, LENGTH)
    assert course(alone(policy), models(architecture)) == expected


@pytest.mark.parametrize("lane", [Recipe("greedy"), TREE], ids=lambda lane: lane.strategy)
def test_every_layer_holds_to_its_ratio_as_the_text_grows(lane):
    generated = 0
    for state in watch(assemble(with_policy(lane, "prefixkv", keep=0.4, tail=6)), models(), PROMPT, Limits(0, 30), Draws(0)):
        if state.generated > generated:
            generated, read = state.generated, state.target.store.length
            for forgotten, heads in zip(state.assembly.cache_policy._forgotten, lives(state)):
                wanted = read * (1 - forgotten / len(PROMPT))
                assert all(-1e-9 < len(head) - wanted < 1 for head in heads)
    assert generated == 30


class EveryLayerTheSame(PrefixKV):
    def counts(self, votes):
        return [sum(super().counts(votes)) // len(votes)] * len(votes)


class TheNewestGoes(PrefixKV):
    def _with_the_tail_moved_on(self, held):
        return super()._with_the_tail_moved_on(held).flip(1)


class TheBeginningIsNotSafe(PrefixKV):
    def _cut(self, held):
        safe, self.sinks = self.sinks, 0
        kept = super()._cut(held)
        self.sinks = safe
        return kept


class TheLastRowVotes(PrefixKV):
    def wants(self, position, prompt):
        return position == prompt - 1


@pytest.mark.parametrize("wrong", PrefixKV.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_level_is_found_out(wrong):
    found = []
    for knobs in (dict(keep=0.75, sinks=3, tail=4), dict(keep=0.3, sinks=8, tail=4)):
        _, expected = HandRule("llama", one_level("llama", PrefixKV(**knobs))).write(PROMPT, LENGTH)
        assert course(alone(PrefixKV(**knobs)), models())[1] == expected
        found.append(course(alone(wrong(**knobs)), models())[1] != expected)
    assert any(found)


# --- chance ---

def at_random(policy: RandomKeep, heads: int, length: int) -> torch.Tensor:
    """How often each position was among those that stayed of a text that grew token by token, over all heads, [length]."""
    positions = torch.arange(policy.size)[None].expand(heads, -1)
    for next_position in range(policy.size + 1, length + 1):
        positions = torch.cat([positions, torch.full((heads, 1), next_position - 1)], 1)
        held = Held(0, 1, "keep", 0, next_position, positions, read=lambda part: torch.zeros(heads, 1, 1))
        positions = positions[policy.retain(held)].view(heads, -1)
    return torch.bincount(positions.flatten(), minlength=length)


def unevenness(kind: type[RandomKeep]) -> float:
    """Chi-square of 32 positions over 600 heads, 31 degrees of freedom, where a quarter of the text stays.

    For an even sample 31 with a deviation of 8; an unevenness of a tenth of a position's chances adds 600 * 0.25 * 0.01 / 0.75 for each, 64 in all.
    """
    counts = sum(at_random(kind(size=8, dice=dice), 6, 32) for dice in range(100)).float()
    return float(((counts - 150) ** 2 / (150 * 0.75)).sum() * 31 / 32)


class DrawnAnewForEveryKeep(RandomKeep):
    """The longer a token has been there, the more often it had to be lucky."""

    def scores(self, held):
        chance = torch.Generator().manual_seed(self.dice * 1000 + held.next)
        return torch.rand(held.positions.shape, generator=chance)


class LateOnesAreLuckier(RandomKeep):
    def scores(self, held):
        return super().scores(held) + held.positions / held.next / 4


def test_tokens_that_stay_by_chance_are_an_even_sample_of_the_text():
    assert unevenness(RandomKeep) < 31 + 5 * 8


@pytest.mark.parametrize("wrong", RandomKeep.__subclasses__(), ids=lambda cls: cls.__name__)
def test_an_uneven_sample_is_found_out(wrong):
    assert unevenness(wrong) > 31 + 5 * 8


def test_heads_layers_and_dice_choose_apart_and_a_run_repeats():
    _, held = course(alone(make("random_keep", size=8)), models())
    assert len({frozenset(head) for layer in held[-1] for head in layer}) == 6
    assert course(alone(make("random_keep", size=8)), models())[1] == held
    assert course(alone(make("random_keep", size=8, dice=1)), models())[1] != held


def test_what_stays_by_chance_does_not_depend_on_how_many_tokens_came_at_once():
    policy = make("random_keep", size=5)

    def kept(positions: list[int]) -> list[int]:
        at = Held(0, 1, "keep", 0, max(positions) + 1, torch.tensor([positions]), read=lambda part: torch.zeros(1, 1, 1))
        return at.positions[policy.retain(at)].tolist()

    one_by_one = list(range(5))
    for position in range(5, 300):
        one_by_one = kept([*one_by_one, position])
    assert one_by_one == kept(list(range(300)))


# --- what they have in common ---

@pytest.mark.parametrize("name, knobs", [(name, TIGHT[name]) for name in BUDGETED], ids=BUDGETED)
def test_no_layer_and_no_head_exceeds_the_budget_whatever_is_kept_at_once(name, knobs):
    budget = make(name, **knobs).budget
    for lane in (Recipe("greedy"), TREE):
        found, generated = [], 0
        for state in watch(assemble(with_policy(lane, name, **knobs)), models(), PROMPT, Limits(0, LENGTH), Draws(0)):
            if state.generated > generated:
                generated = state.generated
                found.append(lives(state))
                assert max(len(head) for layer in found[-1] for head in layer) <= budget(generated)
        assert max(len(head) for layer in found[0] for head in layer) < len(PROMPT), "the prompt was not cut"
        assert found[0] != found[-1], "nothing changed while the text grew"


@every_policy
def test_a_rejected_guess_leaves_no_trace(name, knobs):
    plain = course(alone(make(name, **knobs)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make(name, **knobs)), models()) == plain


@every_policy
def test_a_prompt_read_in_pieces_is_cut_as_one_read_at_once(name, knobs, monkeypatch):
    whole = course(alone(make(name, **knobs)), models())
    monkeypatch.setattr("playground.stream.WATCHED_CHUNK", 5)
    monkeypatch.setattr("playground.stream.CHUNK", 5)
    assert course(alone(make(name, **knobs)), models()) == whole


@every_policy
@pytest.mark.parametrize("lane", [Recipe("greedy"), TREE], ids=lambda lane: lane.strategy)
def test_events_tell_what_was_kept_and_what_was_evicted_in_every_layer_and_head(name, knobs, lane):
    session = prepare(pair(), [with_policy(lane, name, **knobs)], Prompt(TEXT), Limits(max_new_tokens=12))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    for before, after in pairwise(caches):
        fresh = set(range(before.length, after.length))
        evicted = [(old | fresh) - new for old, new in zip(told(before), told(after))]
        assert all(new <= old | fresh for old, new in zip(told(before), told(after)))
        assert sum(map(len, evicted)) == after.evicted
    assert told(caches[-1]) == [head for layer in lives(session._runners[0].lane) for head in layer]


def told(cache: Cache) -> list[set[int]]:
    """Positions held by each layer and head, one after the other; one layer or head may stand for all."""
    heads = [heads * (cache.heads if len(heads) == 1 else 1) for heads in cache.live * (cache.layers if len(cache.live) == 1 else 1)]
    return [{p for start, stop in runs for p in range(start, stop)} for layer in heads for runs in layer]


def test_lanes_that_share_their_forwards_keep_what_each_keeps_alone():
    recipes = [with_policy(Recipe("greedy"), name, **knobs) for name, knobs in {**TIGHT, **ROW_WISE}.items()]

    def run(*together: Recipe) -> list:
        session = prepare(pair(), list(together), Prompt(TEXT), Limits(max_new_tokens=10))
        shared = sum(getattr(stamped.event, "lanes", 1) > 1 for stamped in session)
        assert bool(shared) == (len(together) > 1)
        return [(runner.lane.tokens, lives(runner.lane)) for runner in session._runners]

    alone = [run(recipe)[0] for recipe in recipes]
    assert [run(*recipes[at:at + 4]) for at in (0, 4)] == [alone[0:4], alone[4:8]]


@pytest.mark.parametrize("name, knobs", [(name, TIGHT[name]) for name in BUDGETED], ids=BUDGETED)
def test_a_table_that_pays_no_attention_is_held_to_the_budget_all_the_same(name, knobs):
    lane = write(alone(make(name, **knobs)), {"target": TableModel("abc")}, [0, 1, 2] * 5, Limits(0, 6), Draws(0))
    assert len(lives(lane)[0][0]) <= make(name, **knobs).budget(6)


@pytest.mark.parametrize("name, knobs, says", [
    ("key_norm", dict(size=4, recent=5), "raise size"), ("random_keep", dict(size=4, recent=5), "raise size"),
    ("dapq", dict(capacity=8, recent=9), "raise capacity"),
    ("pyramidkv", dict(window=8, capacity=8), "raise capacity above it"), ("pyramidkv", dict(kernel=4), "take 5"),
])
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(name, knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make(name, **knobs)
    assert str(refusal.value).count(".") == 1


# --- attention written out by hand over the whole text, for policies that act on rows ---

Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""change(queries [heads, n, d], keys [heads, n, d], causal scores [heads, n, n], scaling) -> scores"""


@torch.inference_mode()
def written_out(architecture: str, change: Change, length: int = LENGTH) -> list[int]:
    """Greedy decoding that reads the whole text again for each token, with the scores of attention changed."""
    def attention(module, query, key, value, mask, scaling, **others):
        q, (k, v) = query[0], (part[0].repeat_interleave(query.shape[1] // part.shape[1], 0) for part in (key, value))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(~torch.ones(q.shape[1], q.shape[1]).tril().bool(), float("-inf"))
        return (change(q, k, scores, scaling).softmax(-1) @ v).transpose(0, 1)[None], None

    AttentionInterface.register("written_out", attention)
    by_hand, ids = network(architecture), list(PROMPT)
    by_hand.set_attn_implementation("written_out")
    for _ in range(length):
        ids.append(int(by_hand(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT):]


def only_the_largest(size: int, groups: int) -> Change:
    def change(q, k, scores, scaling):
        weights = scores.softmax(-1).unflatten(0, (groups, -1)).sum(1)
        least = weights.sort(-1, descending=True).values[..., min(size, weights.shape[-1]) - 1, None]
        seen = (weights >= least).repeat_interleave(len(scores) // groups, 0)
        seen[:, :len(PROMPT)] = True
        return scores.masked_fill(~seen, float("-inf"))
    return change


class EveryHeadSeesTheSame(OracleKeep):
    def focus(self, layer, weights, queries):
        return super().focus(layer, weights.sum(0, keepdim=True), queries).expand_as(weights)


class TheSmallestAreSeen(OracleKeep):
    def focus(self, layer, weights, queries):
        return super().focus(layer, -weights.masked_fill(weights == 0, 9), queries)


class TheLatestAreSeen(OracleKeep):
    def focus(self, layer, weights, queries):
        return super().focus(layer, torch.arange(weights.shape[-1]).expand(weights.shape).double(), queries)


@pytest.mark.parametrize("architecture, groups", [("llama", 2), ("qwen3", 2), ("gpt_neox", 4), ("gpt2", 4)])
@pytest.mark.parametrize("size", [1, 4, 11])
def test_an_oracle_lets_every_row_see_what_it_attends_to_most(architecture, groups, size):
    ids, held = course(alone(make("oracle_keep", size=size)), models(architecture))
    assert ids == written_out(architecture, only_the_largest(size, groups))
    assert {len(head) for layer in held[-1] for head in layer} == {len(PROMPT) + LENGTH - 1}


@pytest.mark.parametrize("wrong", OracleKeep.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_oracle_is_found_out(wrong):
    assert any(course(alone(wrong(size=size)), models())[0] != written_out("llama", only_the_largest(size, 2)) for size in (1, 4))


def test_an_oracle_under_soft_capped_scores():
    """gemma2's scores are squeezed, and some of its layers see a window alone, within which the oracle chooses."""
    with exact_softmax():
        plain = course(alone(make("oracle_keep", size=64)), models("gemma2"))
    assert plain[0] == course(Assembly(make("greedy")), models("gemma2"))[0]
    assert course(alone(make("oracle_keep", size=2)), models("gemma2"))[0] != plain[0]


ROW_WISE = {"oracle_keep": {"size": 5}, "sink_window": {"sinks": 2, "window": 5, "positions": "renumbered"}}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("name, knobs", ROW_WISE.items(), ids=ROW_WISE)
def test_rows_that_go_by_themselves_may_be_checked_a_tree_at_a_time(name, knobs, architecture):
    plain = course(alone(make(name, **knobs)), models(architecture))[0]
    for drafter in (make("draft_model", width=2, depth=3), make("prompt_lookup"), Wrong()):
        decoder = make("speculative", verifier="greedy_match")
        decoder.drafter = drafter
        assembly = Assembly(decoder, cache_policy=make(name, **knobs))
        assert course(assembly, models(architecture))[0] == plain
        assert "greedy_identical" in assembly.guarantee()
    assert plain != course(Assembly(make("greedy")), models(architecture))[0]


@pytest.mark.parametrize("size", [1, 5])
def test_no_other_choice_keeps_as_much_attention_as_the_oracles(size):
    weights = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(0)) ** 4
    kept = (weights * make("oracle_keep", size=size).focus(0, weights, torch.arange(3))).sum(-1)
    for seed in range(50):
        others = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :size]
        assert (weights.gather(-1, others).sum(-1) <= kept).all()
    assert torch.allclose(kept, weights.sort(-1).values[..., -size:].sum(-1))


def test_the_figure_is_the_share_of_attention_that_was_kept():
    def shares_of(size: int) -> list[Figure]:
        session = prepare(pair(), [with_policy(TREE, "oracle_keep", size=size)], Prompt(TEXT), Limits(max_new_tokens=8))
        return [stamped.event for stamped in session if isinstance(stamped.event, Figure) and stamped.event.name == "attention kept"]

    whole, narrow = shares_of(2048), shares_of(2)
    assert [figure.data["x"] for figure in whole] == list(range(1, len(whole) + 1))
    assert all(list(figure.data["series"]) == ["layer 0", "layer 1", "layer 2"] for figure in whole)
    assert all(abs(share - 1) < 1e-9 for figure in whole for share in figure.data["series"].values())
    assert all(0 < share < 1 for figure in narrow for share in figure.data["series"].values())


# --- places in the cache ---

def numbered_by_the_cache(sinks: int, window: int) -> Change:
    """Unrotate every query and key, and rotate them again, row by row, by their place among what the row sees."""
    def change(q, k, scores, scaling):
        changed = scores.clone()
        for row in range(len(PROMPT), q.shape[1]):
            seen = [p for p in range(row + 1) if p < sinks or row - p < window]
            places = torch.arange(len(seen))
            query, keys = rotated(q[:, row:row + 1], torch.tensor([len(seen) - 1 - row])), rotated(k[:, seen], places - torch.tensor(seen))
            changed[:, row] = float("-inf")
            changed[:, row, seen] = (query * keys).sum(-1) * scaling
        return changed
    return change


def rotated(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rows [heads, n, d] turned on by so many positions [n]; the numbers of a pair stand half a row apart."""
    half = rows.shape[-1] // 2
    theta = network("llama").config.rope_parameters["rope_theta"]
    angles = by[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(rows[..., :half], rows[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


class TurnedTheOtherWay(SinkWindow):
    def skipped(self, query):
        return -super().skipped(query)


class OneTooFew(SinkWindow):
    def skipped(self, query):
        return (super().skipped(query) - 1).clamp(min=0)


class EverythingIsFar(SinkWindow):
    def far(self, key):
        return key >= 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("sinks, window", [(2, 5), (4, 1), (0, 6), (4, 40)])
def test_renumbered_rows_and_tokens_stand_at_their_place_in_the_cache(architecture, sinks, window):
    ours = course(alone(make("sink_window", sinks=sinks, window=window, positions="renumbered")), models(architecture))
    true = course(alone(make("sink_window", sinks=sinks, window=window)), models(architecture))
    assert ours[0] == written_out(architecture, numbered_by_the_cache(sinks, window))
    assert ours[1] == true[1]
    assert (ours[0] == true[0]) == (sinks == 0 or sinks + window > len(PROMPT) + LENGTH)


@pytest.mark.parametrize("wrong", SinkWindow.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_renumbering_is_found_out(wrong):
    assert course(alone(wrong(sinks=2, window=5, positions="renumbered")), models())[0] != written_out("llama", numbered_by_the_cache(2, 5))


def test_no_token_is_further_away_than_the_cache_is_long():
    policy = make("sink_window", sinks=3, window=7, positions="renumbered")
    for query in range(200):
        at = torch.tensor([query])
        seen = policy.visible(at[:, None], torch.arange(query + 1))[0].nonzero().flatten()
        distances = query - seen - policy.skipped(at) * policy.far(seen)
        assert distances.sort(descending=True).values.tolist() == list(range(min(query + 1, 10)))[::-1]


def test_turning_queries_back_moves_them_to_an_earlier_position():
    model = pair("llama").target
    rows = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    back = torch.tensor([0, 1, 7, 30, 100])
    assert torch.allclose(model.turn_back(rows, back), rotated(rows, -back), atol=1e-5)  # the model's table of angles is in float32


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_positions_that_cannot_be_renumbered_are_refused_in_one_sentence(architecture):
    with pytest.raises(Refusal, match="leave them true") as refusal:
        course(alone(make("sink_window", positions="renumbered")), models(architecture))
    assert str(refusal.value).count(".") == 1


