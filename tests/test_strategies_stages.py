"""UNComp's stages: which prompt tokens later layers read, compared with attention written out over the
whole text, and the compute they save.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from pairs import pair
from tables import watch
from torch import Tensor

from playground.contract import Full, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Failed, Figure, Forward, Note
from playground.training import variants as learning
from strategies.kv_cache.uncomp import UNComp, staged
from support.budget_policies import best
from support.eviction import LENGTH, PROMPT, Wrong, alone, course, models
from support.layer_cuts import EARLY, TEXT, TREE, layer_tokens, leaning_on_earlier_layers, recorded, with_policy
from support.uncomp_by_hand import BY_HAND, UNCOMP_TIGHT, UNCompByHand, WholeText, by_eigenvalues

STAGED = {**UNCOMP_TIGHT, "stages": "1.1.1", "floor": 6}  # of 22 tokens the three layers read 22, 14 and 6
ROOMY = {"high": 2048, "low": 2048}


# --- by hand: no row sees tokens that its layer did not read ---

@dataclass
class StagedText(WholeText):
    """The whole text again for each token; of the prompt a layer's rows see `counts[layer]` tokens, chosen by the layer
    before.
    """

    counts: tuple[int, ...] = ()
    read: dict[int, list[int]] = field(default_factory=dict)  # by layer, positions of the prompt
    received: list[float] = field(default_factory=list)  # of the window's rows in the layer before

    def _seen(self, layer: int, full: Tensor, causal: Tensor) -> Tensor:
        if layer in self.live:
            return super()._seen(layer, full, causal)
        self.read[layer] = self._gets_as_far(layer, len(causal))
        self.queries[layer] = self.queries[layer][:, self.read[layer]]
        seen = torch.eye(len(causal)).bool()  # a token that was not selected sees itself and is seen by no other
        seen[:, self.read[layer]] |= causal[:, self.read[layer]]
        self.seen[layer] = seen.expand_as(full).clone()
        return self.seen[layer]

    def _gets_as_far(self, layer: int, prompt: int) -> list[int]:
        before, window = self.read.get(layer - 1, list(range(prompt))), self.rule.window
        if self.counts[layer] == len(before):
            return before
        votes = {place: self.received[place] for place in before if place < prompt - window}
        return sorted(best(votes, self.counts[layer] - window) | set(range(prompt - window, prompt)))

    def _settle(self, layer: int, full: Tensor, spread: Tensor, heads: int) -> None:
        if layer in self.live:
            super()._settle(layer, full, spread, heads)
            return
        self.received = spread[:, -self.rule.window:].sum((0, 1)).tolist()
        rows = spread.unflatten(0, (heads, -1)).sum(1)
        self.live[layer] = [
            self.rule.stays(self, layer, head, set(self.read[layer]), rows[head].tolist()) for head in range(heads)
        ]


def by_hand(counts: tuple[int, ...], architecture: str = "llama", **rooms: int) -> tuple:
    return StagedText(architecture, UNCompByHand(**rooms), counts=counts).write(PROMPT, LENGTH)


STAIRS = [("1.1.1", 6, (22, 14, 6)), ("1.2", 8, (22, 8, 8)), ("2.1", 8, (22, 22, 8)), ("1.1.1", 3, (22, 12, 3))]


@pytest.mark.oracle("uncomp")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("stages, floor, counts", STAIRS)
def test_text_and_cache_equal_decoding_by_hand(architecture, stages, floor, counts):
    knobs = {**STAGED, "stages": stages, "floor": floor}
    assert course(alone(make("uncomp", **knobs)), models(architecture)) == by_hand(counts, architecture)


@pytest.mark.parametrize("architecture", BY_HAND)
def test_without_eviction_a_layer_caches_the_prompt_tokens_it_read(architecture):
    expected = by_hand((22, 14, 6), architecture, high=999, low=999)
    ours = course(alone(make("uncomp", **STAGED | ROOMY)), models(architecture))
    assert ours == expected
    first, second, third = [{frozenset(head) for head in layer} for layer in ours[1][0]]
    assert first == {frozenset(range(22))} and [len(head) for layer in (second, third) for head in layer] == [14, 6]
    assert third.pop() < second.pop()


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_chunked_prefill_equals_a_single_prefill(chunk, monkeypatch):
    whole = course(alone(make("uncomp", **STAGED)), models())
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", chunk)
    assert course(alone(make("uncomp", **STAGED)), models()) == whole


# --- wrong variants ---

class TheLeastAttendedGoOn(UNComp):
    def _received(self, held):
        return -super()._received(held)


class OneHeadChoosesForAll(UNComp):
    def _received(self, held):
        return self.recent_attention.of(held.layer, held.positions)[:1]


class TheFirstLayerChoosesAtEveryCut(UNComp):
    def _received(self, held):
        return super()._received(replace(held, layer=0))


class TheWindowDoesNotGoOn(UNComp):
    def select_prompt(self, held):
        return super().select_prompt(held) & (held.positions < held.prompt - self.window)


class EveryStageReadsAsTheLast(UNComp):
    def _reads(self, stage, prompt):
        return super()._reads(2, prompt)


class AllGoOn(UNComp):
    def select_prompt(self, held):
        return held.live


class OneCutInsteadOfTwo(UNComp):
    def select_prompt(self, held):
        return super().select_prompt(held) if held.layer == 0 else held.live


WRONG = [
    TheLeastAttendedGoOn,
    OneHeadChoosesForAll,
    TheFirstLayerChoosesAtEveryCut,
    TheWindowDoesNotGoOn,
    EveryStageReadsAsTheLast,
    AllGoOn,
    OneCutInsteadOfTwo,
]


@pytest.mark.refuses("uncomp")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda cls: cls.__name__)
def test_a_wrong_token_selection_is_detected(wrong):
    expected = by_hand((22, 14, 6), high=999, low=999)
    assert course(alone(UNComp(**STAGED | ROOMY)), models()) == expected
    assert course(alone(wrong(**STAGED | ROOMY)), models())[1] != expected[1]


class NothingIsSafe(UNComp):
    def select_prompt(self, held):
        return torch.zeros_like(held.live)


def test_the_last_token_is_always_selected():
    _, found = course(alone(NothingIsSafe(**STAGED | ROOMY)), models())
    assert found[0] == [[set(range(22))] * 2, [{21}] * 2, [{21}] * 2]


# --- how many tokens are selected ---

@pytest.mark.parametrize("floor", [1, 3, 6, 15, 22, 40])
@pytest.mark.parametrize("longest", [0, 48, 2048])
@pytest.mark.parametrize("window", [1, 3, 40])
def test_stage_sizes_never_increase_and_never_fall_below_window_and_floor(floor, longest, window):
    policy = make("uncomp", stages="3.1.2.4", floor=floor, longest=longest, window=window, high=64, low=48)
    for prompt in (2, 21, 22, 23, 300):
        read = [policy._reads(stage, prompt) for stage in range(4)]
        assert read[0] == prompt and all(later <= earlier for earlier, later in pairwise(read))
        assert read[-1] == min(prompt, max(floor, window))


def test_stage_sizes_decrease_to_the_floor_in_equal_steps():
    """Of 1000 tokens to 100 in three steps; as long as the context, 4096 in the released code, a shorter one begins to
    lose tokens later.
    """
    def read(prompt: int, **knobs: int) -> list[int]:
        return [make("uncomp", stages="1.1.1.1", floor=100, **knobs)._reads(stage, prompt) for stage in range(4)]

    assert read(1000) == [1000, 700, 400, 100]
    assert read(1000, longest=4096) == [1000, 1000, 1000, 100] and read(4096, longest=4096) == [4096, 2764, 1432, 100]


@pytest.mark.parametrize("stages, cuts", [("1.1.1", [1, 2]), ("1.2", [1]), ("2.1", [2]), ("3", [])])
def test_selection_happens_where_stages_begin_and_without_a_floor_nowhere(stages, cuts):
    assert make("uncomp", stages=stages, floor=6).cut_layers(3) == cuts
    assert make("uncomp", stages=stages).cut_layers(3) == make("uncomp").cut_layers(3) == []


def test_without_a_floor_stages_change_nothing():
    plain = course(alone(make("uncomp", **UNCOMP_TIGHT)), models())
    assert course(alone(make("uncomp", **STAGED | {"floor": 0})), models()) == plain
    assert course(alone(make("uncomp", **STAGED | {"floor": 22})), models()) == plain
    assert course(alone(make("uncomp", **STAGED)), models()) != plain


# --- cost and cache contents ---

@pytest.mark.parametrize("chunk", [128, 7])
@pytest.mark.parametrize(
    "stages, floor", [("1.1.1", 10), ("1.1.1", 44), ("1.2", 10), ("2.1", 10), ("3", 10), ("1.1.1", 0)]
)
def test_forwards_report_exactly_the_computed_rows(stages, floor, chunk, monkeypatch):
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", chunk)
    monkeypatch.setattr("playground.decoding.stream.forwards.CHUNK", chunk)
    knobs = STAGED | {"stages": stages, "floor": floor}
    config = LaneConfig("greedy", {}, [("uncomp", knobs)])
    ours, plain = recorded(config, Forward), recorded(LaneConfig("greedy"), Forward)
    prompt = layer_tokens(plain) // 3
    sizes = [int(size) for size in stages.split(".")] if floor else [3]
    read = [make("uncomp", **knobs)._reads(stage, prompt) for stage, size in enumerate(sizes) for _ in range(size)]
    assert layer_tokens(ours) == sum(read)
    if sum(read) < 3 * prompt:
        assert sum(forward.flops for forward in ours) < sum(forward.flops for forward in plain)
        stairs, = [figure for figure in recorded(config, Figure) if figure.name == "prompt tokens read"]
        assert stairs.data["values"] == read
        assert any(
            f"{sum(read)} token-layer computations instead of {3 * prompt}" in note.text
            for note in recorded(config, Note)
        )


@pytest.mark.parametrize("knobs", [{}, {"floor": 0}, {"stages": "2.1"}, {"high": 18, "low": 5}, {"floor": 22}], ids=str)
def test_its_expected_share_equals_the_cached_share(knobs):
    policy = make("uncomp", **STAGED | knobs)
    _, found = course(alone(policy), models())
    for generated in (0, LENGTH - 1):
        slots = sum(len(head) for layer in found[generated] for head in layer)
        assert policy.expected_share(Full(22, generated, 3, 2, 8, 64)) == pytest.approx(slots / (22 + generated) / 6)


# --- combinations with other strategies ---

BESIDE = [
    LaneConfig("greedy"),
    LaneConfig("greedy", {}, [("dola", {})]),
    LaneConfig("greedy", {}, [("knn_lm", {"tokens": 16})]),
    EARLY,
    TREE,
]


@pytest.mark.parametrize("lane", BESIDE, ids=str)
def test_if_all_tokens_are_selected_rows_early_exits_and_hidden_states_are_unchanged(lane, monkeypatch):
    """In pieces of five tokens, so that what was captured of the last row comes from several forwards of each stage."""
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    session = prepare(
        pair(),
        [lane, with_policy(lane, "uncomp", **STAGED | ROOMY | {"floor": 1024}), with_policy(lane, "uncomp", **STAGED)],
        Prompt(TEXT),
        Limits(max_new_tokens=8),
    )
    assert not [stamped.event for stamped in session if isinstance(stamped.event, Failed)]
    plain, roomy, cut = (runner.lane.tokens for runner in session._runners)
    assert plain == roomy and len(cut) > len(session.headers[0].prompt_ids)


def test_a_rejected_draft_token_leaves_no_trace():
    plain = course(alone(make("uncomp", **STAGED)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make("uncomp", **STAGED)), models()) == plain


def test_a_prompt_shorter_than_the_window_is_read_by_all_layers():
    def ids(**knobs) -> list[int]:
        *_, lane = watch(alone(make("uncomp", **UNCOMP_TIGHT, **knobs)), models(), PROMPT[:2], Limits(0, 6), Draws(0))
        return lane.tokens

    assert ids(stages="1.1.1", floor=1) == ids()


# --- where stages begin ---

def test_a_stage_begins_at_a_large_drop_of_entropy_only():
    assert staged(torch.tensor([0.7, 0.6, 0.65, 0.64, 0.5, 0.4])) == "1.3.1.1"
    assert staged(torch.tensor([0.5, 0.49, 0.6])) == "3" and staged(torch.tensor([0.5])) == "1"


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
@pytest.mark.parametrize("fall", [0.0, 1.0])
def test_stages_use_the_mean_entropy_over_heads_and_texts(architecture, fall, monkeypatch):
    monkeypatch.setattr(f"{UNComp.__module__}.FALL", fall)
    texts = torch.randint(0, 200, (4, 18), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for ids in texts:
        text = StagedText(architecture, UNCompByHand(high=999, low=999), counts=(18, 18, 18))
        text.write(ids, 1)
        found.append([by_eigenvalues(text.queries[layer], len(text.live[layer]), 32) for layer in range(3)])
    levels = [sum(sum(each[layer]) for each in found) / (len(texts) * len(found[0][layer])) for layer in range(3)]
    sizes = [1]
    for before, level in pairwise(levels):
        sizes = [*sizes, 1] if level - before < -fall else [*sizes[:-1], sizes[-1] + 1]
    fitted = UNComp.fit(learning.readings(models(architecture)["target"], texts, asks=True))
    assert fitted["stages"] == ".".join(map(str, sizes))


CONTRARY = [
    ({"stages": "1.x"}, "numbers of layers"),
    ({"stages": "0.3"}, "positive numbers"),
    ({"stages": "1..2"}, "numbers of layers"),
    ({"floor": 6}, "run `fit` to print them"),
    ({"stages": "1.2", "floor": 60, "longest": 50}, "below the floor of 60"),
]


@pytest.mark.parametrize("knobs, says", CONTRARY, ids=str)
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(knobs, says):
    with pytest.raises(Refusal, match=says):
        make("uncomp", **knobs)


def failure(speakers: Models, **knobs) -> str:
    recorded = prepare(
        speakers, [LaneConfig("greedy", {}, [("uncomp", STAGED | knobs)])], Prompt(TEXT), Limits(max_new_tokens=4)
    )
    return " ".join(stamped.event.message for stamped in recorded if isinstance(stamped.event, Failed))


def test_stages_of_another_model_are_refused():
    assert failure(pair(), stages="1.1") == "The stages have 2 layers and this model has 3: run `fit` for this model."
    assert failure(pair(), stages="1.1", floor=0) == failure(pair()) == ""


def test_a_model_without_split_layers_is_refused_only_if_there_are_stages():
    leaning = Models(Model(leaning_on_earlier_layers(), pair().target.tokenizer, "leaning"))
    assert "cannot shorten the prompt for them: remove By the entropy of queries (UNComp)" in failure(leaning)
    assert failure(leaning, floor=0) == failure(leaning, stages="3") == ""
