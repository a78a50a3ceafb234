"""Cache policies where several tokens are read in one forward, as drafts or by texts that grow side by side: each text
is that of the policy alone, which reads one token after the other.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from pairs import pair
from registry import registered
from runs import run
from toys import byte_tokenizer

from playground.bench.models.tiny_networks import tiny_network
from playground.contract import DecidesByHead, Decoder, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.acting_policy import ActingPolicy
from playground.decoding.cache_lines import Lines
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Silent
from playground.decoding.rows_in_turn import RowsInTurn
from playground.decoding.sequence import Sequence
from playground.decoding.session import prepare
from playground.engine.attention.attention_mask import EMPTY
from playground.engine.attention.segment_attention import Segment
from playground.engine.cache.kv_cache import KVCache
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Cache, Event, Note, Verdict

PROMPT = [35, 80, 12, 77, 200, 9, 51, 144, 63, 7] * 3
BUDGET = 26  # tokens: fewer than the prompt has, and so many that the draft is often right
POLICIES = [cls.name for cls in registered("cache_policy")]
AS_IT_GOES = [name for name in POLICIES if not (find(name).prompt_only or find(name).row_wise)]
UNFITTED = ["duo_attention", "kvzap"]  # they keep everything without a fit
DRAFTERS = ["draft_model", "prompt_lookup"]
# all that draft without being fitted; among them drafters of trees, and some that run the target's first layers alone
OTHER_DRAFTERS = [
    cls.name for cls in registered("drafter") if not make(cls.name).trained and cls.name not in DRAFTERS
]
# one that sums attention, one that merges, one that quantises, one that selects slots for each row
KINDS = ["h2o", "ems", "kivi", "loopserve"]
SEVERAL = [
    ("best_of_n", {"n": 3, "temperature": 0.0}), ("self_consistency", {"n": 3, "temperature": 0.0}),
    ("beam_search", {"beams": 1}),
]


def tight(name: str) -> dict:
    """Knobs with which a policy acts on the prompt, if it has a number of tokens; else its defaults."""
    return find(name).knobs_for_budget(BUDGET, len(PROMPT)) or {}


def lane_of(decoder: str, *extras: tuple[str, dict], **knobs) -> tuple[Lane, list[Event]]:
    """A lane at its end, and its events. The draft model is nearly the target."""
    models = {"target": pair().target, "draft": pair(noise=1e-4).draft}
    return run(LaneConfig(decoder, knobs, list(extras)), models, PROMPT, 20)


def decoded(decoder: str, *extras: tuple[str, dict], **knobs) -> tuple[Sequence, list[Event]]:
    """The text of a lane with its log-probabilities, and its events."""
    lane, events = lane_of(decoder, *extras, **knobs)
    return lane.main, events


def alone(name: str) -> Sequence:
    return decoded("greedy", (name, tight(name)))[0]


def speculated(name: str, drafter: str) -> tuple[Sequence, list[Event]]:
    return decoded("speculative", (drafter, {}), ("greedy_match", {}), (name, tight(name)))


def agree(one: Sequence, other: Sequence) -> bool:
    """Whether two texts are the same, and every token had the same probability."""
    return one.written == other.written and one.logprobs == pytest.approx(other.logprobs, abs=1e-9)


def claims(name: str) -> list[str]:
    return assemble(LaneConfig("speculative", {}, [("greedy_match", {}), (name, tight(name))])).claims()


@dataclass
class Dictated(Decoder):
    """Commits given tokens, one after the other."""

    text: tuple[int, ...] = ()

    def decode(self, lm):
        rows = yield lm.prefill()
        for token in self.text:
            yield lm.keep(replace(lm.pick(rows), token=token))
            rows = yield lm.extend()


def dictated(name: str, text: list[int]) -> Sequence:
    """A text that the policy reads token by token, with its log-probabilities."""
    assembly = Assembly(Dictated(tuple(text)), cache_policy=make(name, **tight(name)))
    return run(assembly, {"target": pair().target}, PROMPT, len(text))[0].main


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", POLICIES)
def test_drafts_do_not_change_the_text_of_a_policy(name, drafter):
    drafted, events = speculated(name, drafter)
    assert agree(drafted, alone(name)) and "greedy_identical" in claims(name)
    if drafter == "draft_model":
        accepted = [len(event.kept) for event in events if isinstance(event, Verdict)]
        assert max(accepted) > 0, "several tokens of one forward are committed"


@pytest.mark.matrix
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("drafter", OTHER_DRAFTERS)
def test_whatever_drafts_the_text_is_that_of_the_policy(drafter, name):
    assert agree(speculated(name, drafter)[0], alone(name))


@pytest.mark.parametrize("name", ["h2o", "tova", "key_diff", "expected_attention", "random_keep"])
def test_a_policy_that_acts_only_after_the_verdict_writes_another_text(name, monkeypatch):
    """The wrong variant: all draft tokens see the cache as it was before the first of them."""
    monkeypatch.setattr(RowsInTurn, "applies", lambda *_: False)
    assert not all(agree(speculated(name, drafter)[0], alone(name)) for drafter in DRAFTERS)


# --- how much is read in turn ---

class Turns:
    """Counts, for each layer of a forward that is read in turn, what is read one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.forwards: list[tuple[int, int, int]] = []  # attentions, depths, nodes that are followed
        self._read, self._acts = 0, 0
        attend, read = RowsInTurn.attend, Lines.read

        def counted(turns: RowsInTurn, layer: int, segment: Segment, *rest):
            before, nodes = self._read, range(segment.first, segment.end)
            output = attend(turns, layer, segment, *rest)
            depths = {segment.store.depths[node] for node in nodes}
            parents = {segment.store.parents[node] for node in nodes}
            self.forwards.append((self._read - before, len(depths), len(parents)))
            return output

        def counting(lines: Lines, *rest):
            self._read += 1
            return read(lines, *rest)

        monkeypatch.setattr(RowsInTurn, "attend", counted)
        monkeypatch.setattr(Lines, "read", counting)


# without a fit DuoAttention changes nothing
BY_HEAD = [name for name in AS_IT_GOES if issubclass(find(name), DecidesByHead) and name not in UNFITTED]


@pytest.mark.parametrize("name", BY_HEAD)
def test_the_rows_of_one_depth_are_read_together(name, monkeypatch):
    turns = Turns(monkeypatch)
    speculated(name, "token_recycling")
    assert all(read == depths for read, depths, _ in turns.forwards)
    drafted = len(turns.forwards)
    decoded("beam_search", (name, tight(name)), beams=3)
    beams = turns.forwards[drafted + pair().target.depth:]  # the first tokens were read without turns
    assert beams and all(read == 1 for read, _, _ in beams)
    assert any(nodes > depths for _, depths, nodes in turns.forwards), "a tree branches"


@pytest.mark.parametrize("name", ["kivi", "loopserve"])
def test_a_policy_that_is_not_declared_to_is_asked_for_one_text_at_a_time(name, monkeypatch):
    turns = Turns(monkeypatch)
    speculated(name, "token_recycling")
    assert turns.forwards and all(read == nodes for read, _, nodes in turns.forwards)


@pytest.mark.parametrize("name", ["h2o", "ems", "expected_attention", "random_keep", "uncomp"])
def test_a_policy_that_takes_one_text_for_another_is_refused(name, monkeypatch):
    """The wrong variant: what the policy knows of the lines is in the reverse order."""
    for_heads = find(name).for_heads
    monkeypatch.setattr(find(name), "for_heads", lambda self, layer, heads: for_heads(self, layer, heads.flip(0)))
    beam, _ = decoded("beam_search", (name, tight(name)), beams=3)
    assert not agree(beam, dictated(name, beam.written))


def test_a_policy_that_sums_over_the_heads_of_all_texts_is_refused(monkeypatch):
    """The wrong variant: the texts of a forward share their scores."""
    def summed(self, weights):
        return weights.sum(0, keepdim=True)

    monkeypatch.setattr(find("tova"), "_summed", summed)
    beam, _ = decoded("beam_search", ("tova", tight("tova")), beams=3)
    assert not agree(beam, dictated("tova", beam.written))


@pytest.mark.parametrize("name, knobs", [
    ("h2o", {"heavy": 64, "recent": 64}), ("tova", {"size": 64}), ("key_diff", {"size": 64}), ("ems", {"size": 64}),
    ("lococo", {"size": 64}), ("gear", {"buffer": 64}), ("loopserve", {"size": 8, "period": 64}),
    ("random_keep", {"size": 64}), ("uncomp", {"high": 64, "low": 64}), ("prefixkv", {"keep": 1.0}),
    ("sim_layer_kv", {"threshold": 1.0}),
])
def test_where_a_policy_changes_nothing_rows_are_read_as_without_it(name, knobs, monkeypatch):
    turns = Turns(monkeypatch)
    drafted, _ = decoded("speculative", ("draft_model", {}), ("greedy_match", {}), (name, knobs))
    assert agree(drafted, decoded("greedy", (name, knobs))[0]) and not turns.forwards


@pytest.mark.parametrize("name", AS_IT_GOES)
@pytest.mark.parametrize("tightly", [True, False])
def test_a_policy_that_rests_changes_nothing(name, tightly, monkeypatch):
    said, apply = [], ActingPolicy.act

    def checked(acting: ActingPolicy, moment: str, next_position: int):
        store = acting.store
        rests = moment == "keep" and acting.rests(store.length)
        before = contents(store)
        settled = apply(acting, moment, next_position)
        said.append(rests)
        assert not rests or contents(store) == before
        return settled

    monkeypatch.setattr(ActingPolicy, "act", checked)
    decoded("greedy", (name, tight(name) if tightly else {}))
    assert len(said) > 10


def contents(store: KVCache) -> tuple:
    return store.runs(), [[buffer.quantised_slots for buffer in buffers] for buffers in (store.keys, store.values)]


def test_a_policy_that_rests_too_often_writes_another_text(monkeypatch):
    monkeypatch.setattr(find("h2o"), "rests", lambda *_: True)
    assert not all(agree(speculated("h2o", drafter)[0], alone("h2o")) for drafter in DRAFTERS)


@pytest.mark.parametrize("name", [name for name in POLICIES if "budget_respected" in find(name).guarantee])
def test_after_accepted_drafts_a_policy_holds_no_more_slots_than_its_budget(name):
    lane = lane_of("speculative", ("draft_model", {}), ("greedy_match", {}), (name, tight(name)))[0]
    most = max(int((slots.positions != EMPTY).sum(1).max()) for slots in lane.target.store.slots)
    assert 0 < most <= make(name, **tight(name)).budget(20)


@pytest.mark.parametrize("decoder, knobs", SEVERAL, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("name", POLICIES)
def test_each_of_several_texts_is_that_of_the_policy_alone(name, decoder, knobs):
    several, _ = decoded(decoder, (name, tight(name)), **knobs)
    assert agree(several, alone(name))


@pytest.mark.parametrize("name", POLICIES)
def test_a_beam_has_the_probabilities_of_its_tokens_under_the_policy_alone(name):
    beam, _ = decoded("beam_search", (name, tight(name)), beams=3)
    assert agree(beam, dictated(name, beam.written))


def test_beams_that_see_the_uncompressed_text_have_other_probabilities(monkeypatch):
    """The wrong variant: the policy does not act on the texts that grow side by side."""
    monkeypatch.setattr(RowsInTurn, "applies", lambda *_: False)
    beam, _ = decoded("beam_search", ("h2o", tight("h2o")), beams=3)
    assert not agree(beam, dictated("h2o", beam.written))


@pytest.mark.parametrize("name", ["h2o", "lococo", "kivi", "snapkv", "think"])
def test_a_fork_goes_on_as_the_text_that_it_repeats(name):
    whole, config = alone(name), assemble(LaneConfig("greedy", {}, [(name, tight(name))]))
    target, limits = pair().target, Limits(0, 20, forced=tuple(whole.written[:6]))
    runner = Runner(Lane(PROMPT, {"target": target}, config, limits, Silent(target.tokens)), config)
    while not runner.finished:
        runner.advance()
    assert runner.lane.main.written == whole.written


def test_texts_that_grow_side_by_side_hold_caches_of_their_own():
    _, events = decoded("best_of_n", ("h2o", tight("h2o")), n=3, temperature=0.0)
    sizes = [event.bytes for event in events if isinstance(event, Cache)]
    assert max(sizes) > 2 * sizes[-1], "their memory is counted until one text is chosen"


def test_where_a_compute_policy_decides_for_all_rows_a_policy_by_path_is_refused_for_several_texts():
    with pytest.raises(Refusal, match="depends on the path of one text"):
        assemble(LaneConfig("best_of_n", {}, [("h2o", {}), ("stop_exit", {})]))


def test_where_attention_runs_in_the_library_a_policy_acts_late_and_the_lane_says_so():
    lane = LaneConfig("speculative", {}, [("greedy_match", {}), ("kivi", {})])
    assembly = assemble(lane)
    assert "greedy_identical" in assembly.claims() and not assembly.remarks()
    assembly.attends = False
    assert "greedy_identical" not in assembly.claims() and "inside the transformers library" in assembly.remarks()[0]


@pytest.mark.parametrize("architecture, claimed", [("bloom", False), ("llama", True)])
def test_the_header_of_a_run_claims_what_its_model_allows(architecture, claimed):
    network = tiny_network(architecture)
    models = Models(Model(network, byte_tokenizer(), architecture))
    lane = LaneConfig("speculative", {}, [("prompt_lookup", {}), ("greedy_match", {}), ("kivi", {})])
    session = prepare(models, [lane], Prompt("abcabcabc"), Limits(max_new_tokens=3))
    notes = [stamped.event.text for stamped in session if isinstance(stamped.event, Note)]
    assert ("greedy_identical" in session.headers[0].guarantee) == claimed
    assert any("inside the transformers library" in note for note in notes) != claimed


def test_beside_a_compute_policy_drafts_may_change_the_text_and_the_lane_says_so():
    assembly = assemble(LaneConfig("speculative", {}, [("greedy_match", {}), ("h2o", {}), ("stop_exit", {})]))
    assert "greedy_identical" not in assembly.claims() and "before the first of them" in assembly.remarks()[0]
