"""Retrieved and drafted tokens in one tree: matches in the text and proposals of a draft model."""
from __future__ import annotations

import copy
from functools import partial
from random import Random

import pytest
import torch
from tables import TableModel, distance, law, product_law

from playground.algorithms.speculative.suffix_index import BREAK, SuffixIndex
from playground.contract import Drafter, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.errors import Refusal
from playground.events import Done, Draft, Event, Forward, Verdict
from strategies.speculative.rasd import RASD, Continuations
from support.laws import AT_ONE, EXACT, WRONG
from support.online_drafting import collapses, figures, speculation, speculative_lane
from support.speculation import GREEDY

COLLAPSES = {
    "rasd": collapses(lambda *added: speculative_lane("rasd", *added, nodes=0, retrieved=0)),
}


def tables(letters: str = "abc", ends: str = "", seed: int = 0) -> dict[str, TableModel]:
    return {"target": TableModel(letters, ends, seed), "draft": TableModel(letters, ends, seed + 1)}


def ran(lane: LaneConfig | Assembly, models: dict, prompt: list[int], length: int) -> list[Event]:
    assembly = copy.deepcopy(lane) if isinstance(lane, Assembly) else assemble(lane)
    runner = Runner(Lane(prompt, models, assembly, Limits(0, length), Recorder(models["target"].tokens)), assembly)
    recorded = []
    while not runner.finished:
        recorded += runner.advance()
    assert isinstance(recorded[-1], Done), recorded[-1]
    return recorded


def looking(*texts: list[int], **knobs) -> Drafter:
    """A RASD whose stores hold these texts: the first is the one that is written, the others are documents."""
    drafter = make("rasd", **knobs)
    drafter._stores = [SuffixIndex(), SuffixIndex()]
    for text, store in zip(texts, [0, *[1] * len(texts)]):
        drafter._stores[store].begin()
        drafter._stores[store].add(text)
    return drafter


def test_the_longest_known_suffix_is_used_with_all_its_occurrences():
    drafter = looking([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], length=2)
    found = drafter.find([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 9)
    assert (found.length, found.texts) == (3, [[9, 2]]), "the end of the text itself is no occurrence"
    found = looking([7, 2, 3, 9, 2, 3, 8, 1, 2, 3], length=2).find([7, 2, 3, 9, 2, 3, 8, 1, 2, 3], 9)
    assert (found.length, found.texts) == (2, [[9, 2], [8, 1]])


def test_suffixes_outside_the_length_limits_are_not_looked_up():
    text = [1, 2, 3, 9, 1, 2, 3]
    assert looking(text, longest=2).find(text, 9).length == 2 and looking(text).find(text, 9).length == 3
    assert looking(text, shortest=4).find(text, 9).texts == []


def test_matches_and_continuations_do_not_cross_documents():
    drafter = looking([0], [5, 1], [2, 6], [1, 2], [1, 2, 4], length=9)
    assert drafter.find([1, 2], 9).texts == [[4]]
    assert drafter.find([5, 1, 2], 9).length == 2


def test_a_continuation_is_limited_by_its_length_knob_the_budget_and_its_text():
    document = [1, 2, 3, 4, 5, 6]
    assert looking([0], document, length=3).find([1, 2], 9).texts == [[3, 4, 5]]
    assert looking([0], document).find([1, 2], 2).texts == [[3, 4]]
    assert looking([0], document).find([1, 2], 9, lambda token: token == 4).texts == [[3, 4]]


def retrieved_by_scanning(texts: list[list[int]], context: list[int], longest: int, length: int) -> tuple[int, list]:
    """The longest suffix with a continuation, and all its continuations, by a scan over texts and positions."""
    for size in range(min(longest, len(context)), 0, -1):
        ending = context[len(context) - size:]
        places = [(text, i + size) for text in texts for i in range(len(text) - size) if text[i:i + size] == ending]
        if places:
            return size, [text[end:end + length] for text, end in places]
    return 0, []


def check_retrieval(drafter: type[RASD]) -> None:
    """Retrieval results in random texts and documents."""
    for seed in range(150):
        chance = Random(seed)
        texts = [[chance.randrange(3) for _ in range(chance.randrange(1, 12))] for _ in range(chance.randrange(1, 4))]
        longest, length = chance.randrange(1, 5), chance.randrange(1, 4)
        looking_up = drafter(longest=longest, shortest=1, length=length)
        looking_up._stores = looking(*texts)._stores
        found = looking_up.find(texts[0], 9)
        assert (found.length, found.texts) == retrieved_by_scanning(texts, texts[0], longest, length)


class FollowsOneOccurrence(RASD):
    def find(self, *asked):
        found = super().find(*asked)
        return Continuations(found.length, found.texts[:1])


def reading_on(store: SuffixIndex, place: int, most: int, ends) -> list[int]:
    """Wrong: a continuation that extends into the next document."""
    return [token for token in store.tokens[place:place + most + 1] if token != BREAK][:most]


class ReadsIntoTheNextDocument(RASD):
    def find(self, *asked):
        for store in self._stores:
            store.continuation = partial(reading_on, store)
        return super().find(*asked)


class PrefersShortEndings(RASD):
    def find(self, tokens, *asked):
        return super().find(tokens[-1:], *asked)


@pytest.mark.oracle("rasd")
def test_retrieval_equals_a_scan_over_all_positions():
    check_retrieval(RASD)


@pytest.mark.refuses("rasd")
@pytest.mark.parametrize("wrong", [FollowsOneOccurrence, ReadsIntoTheNextDocument, PrefersShortEndings],
                         ids=lambda cls: cls.__name__)
def test_a_wrong_retrieval_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_retrieval(wrong)


Q = torch.tensor([0.1, 0.4, 0.3, 0.2, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "prune, firsts", [(1, {1}), (2, {1, 2}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3}), (0, {0, 1, 2, 3, 4})]
)
def test_continuations_are_pruned_unless_they_begin_with_a_likely_draft_token(prune, firsts):
    texts = [[token, 4] for token in range(5)]
    assert {text[0] for text in make("rasd", prune=prune).pruned(texts, Q)} == firsts


def test_at_the_node_limit_the_most_frequent_prefixes_stay():
    texts = [[3, 1, 1], [2, 0], [2, 0, 4], [1]]
    assert make("rasd", prune=0, retrieved=1).pruned(texts, None) == [[2]]
    assert make("rasd", prune=0, retrieved=3).pruned(texts, None) == [[2], [3], [2, 0]]
    for count in range(1, 8):
        kept = make("rasd", prune=0, retrieved=count).pruned(texts, None)
        assert len(kept) == min(count, 7) and all(text[:-1] in [[], *kept] for text in kept)


def drafted() -> TokenTree:
    tree = TokenTree("rasd")
    for token, parent in [(1, ROOT), (2, ROOT), (3, 0), (4, 2)]:
        tree.add(token, parent)
    return tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.prefix(node)) for node in range(len(tree))}


def test_fusion_holds_every_path_of_both_trees_once_with_its_source():
    tree, sources = make("rasd").fused(drafted(), [[1, 3, 5], [6, 7]])
    assert paths(tree) == paths(drafted()) | {(1, 3, 5), (6,), (6, 7)} and len(tree) == len(paths(tree))
    by_path = {tuple(tree.prefix(node)): source for node, source in enumerate(sources)}
    assert by_path == {
        (1,): "both",
        (2,): "drafted",
        (1, 3): "both",
        (1, 3, 4): "drafted",
        (1, 3, 5): "retrieved",
        (6,): "retrieved",
        (6, 7): "retrieved",
    }


def test_fusing_a_known_tree_changes_nothing_and_a_disjoint_one_adds_its_nodes():
    rasd = make("rasd")
    assert paths(rasd.fused(drafted(), [[1, 3, 4], [2]])[0]) == paths(drafted())
    assert len(rasd.fused(drafted(), [[8, 9], [7]])[0]) == len(drafted()) + 3
    once, _ = rasd.fused(drafted(), [[1, 5]])
    assert paths(rasd.fused(once, [[1, 5]])[0]) == paths(once)


def test_a_shortest_suffix_above_the_longest_is_refused():
    with pytest.raises(Refusal, match="choose a smaller value"):
        make("rasd", shortest=5, longest=3)


CORPUS = {"corpus": "abcab\n\nacbba\n\nbaab", "shortest": 1}


@pytest.mark.oracle("rasd")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
@pytest.mark.parametrize(
    "knobs",
    [{"nodes": 0, "prune": 0}, {"nodes": 3, "prune": 1}, {"nodes": 4, "width": 2, "prune": 2, "retrieved": 4}],
    ids=str,
)
def test_the_output_distribution_is_the_targets_whatever_was_retrieved(knobs, verifier):
    models = tables()
    config = speculative_lane("rasd", AT_ONE, verifier=verifier, **CORPUS, **knobs)
    assert any(len(draft.tokens) > 1 for draft in ran(config, models, [0, 1, 0], 3) if isinstance(draft, Draft))
    assert distance(law(config, models, [0, 1, 0], 3), product_law(models["target"], [0, 1, 0], 3)) < EXACT


class PassesForDrawn(find("rasd")):
    """Verifies retrieved tokens as if they had been sampled from the draft."""

    drawn = "independent"

    def fused(self, tree, texts):
        tree, sources = super().fused(tree, texts)
        tree.drawn, tree.q = "independent", [torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)] * len(tree)
        return tree, sources


@pytest.mark.refuses("rasd")
def test_treating_retrieved_draft_tokens_as_sampled_is_detected():
    models = tables()
    found = law(speculation(PassesForDrawn(**CORPUS, nodes=0, prune=0), AT_ONE), models, [0, 1, 0], 3)
    assert distance(found, product_law(models["target"], [0, 1, 0], 3)) > WRONG


@pytest.mark.parametrize(
    "corpus", ["", "eddeedcbaedcabdecaba" * 9, "abcde\n\n" * 20], ids=["none", "random", "in order"]
)
def test_greedily_the_text_is_the_targets_own_whatever_was_retrieved(corpus):
    stood = set()
    for seed in range(5):
        models = tables("abcde", "e", seed)
        plain, recorded = (
            ran(config, models, [0, 1, 0, 1], 20)
            for config in (GREEDY, speculative_lane("rasd", corpus=corpus, shortest=1))
        )
        assert written(recorded) == written(plain)
        stood |= {test.kept for event in recorded if isinstance(event, Verdict) for test in event.tests}
    assert stood == {True, False}


def written(recorded: list[Event]) -> list[int]:
    return [token for event in recorded if event.kind == "commit" for token in event.ids]


def test_the_draft_model_is_not_run_if_it_neither_drafts_nor_prunes():
    recorded = ran(speculative_lane("rasd", nodes=0, prune=0, **CORPUS), tables(), [0, 1, 0], 12)
    assert any(isinstance(event, Draft) for event in recorded)
    assert {event.stream for event in recorded if isinstance(event, Forward)} == {"target"}
    pruning = ran(speculative_lane("rasd", nodes=0, prune=1, **CORPUS), tables(), [0, 1, 0], 12)
    assert {event.stream for event in pruning if isinstance(event, Forward)} == {"target", "draft"}


def retrievals(prompt: list[int], **knobs) -> list[list[int]]:
    """The drafts without a draft model for a text that repeats abcabc."""
    target = TableModel("abc", rule=lambda context: torch.eye(3, dtype=torch.float64)[(context[-1] + 1) % 3] * 9)
    recorded = ran(
        speculative_lane("rasd", nodes=0, prune=0, **knobs), {"target": target, "draft": TableModel("abc")}, prompt, 12
    )
    return [event.tokens for event in recorded if isinstance(event, Draft)]


def test_prompt_and_answer_are_looked_up_as_they_grow_unless_that_is_turned_off():
    assert retrievals([0, 1, 2, 0, 1])[0] == [2, 0, 1], "what followed ab in the prompt"
    assert retrievals([0])[0][:2] == [2, 0], "the answer came round to ab"
    assert retrievals([0], text=False) == []


@pytest.mark.parametrize("nodes, retrieved", [(0, 5), (7, 0), (7, 5), (60, 60)])
def test_a_tree_has_distinct_nodes_within_its_limit_and_ends_with_the_text(nodes, retrieved):
    models, sizes = tables("abcde", "e", seed=2), []
    for event in ran(
        speculative_lane(
            "rasd", AT_ONE, nodes=nodes, retrieved=retrieved, depth=8, width=6, corpus="abcdabc\n\nabdcabd", shortest=1
        ),
        models,
        [0, 1],
        16,
    ):
        if isinstance(event, Draft):
            sizes.append(len(event.tokens))
            assert len(event.tokens) <= nodes + retrieved
            assert len(set(zip(event.parents, event.tokens))) == len(event.tokens)
            assert not [parent for parent in event.parents if parent >= 0 and event.tokens[parent] == 4]
    assert max(sizes) > (nodes + retrieved) / 4


def test_the_draft_models_tree_holds_its_most_probable_paths():
    models, width = tables("abcd", seed=3), 2
    drafts = [
        e
        for e in ran(speculative_lane("rasd", nodes=4, width=width, depth=2, retrieved=0), models, [0], 3)
        if isinstance(e, Draft)
    ]
    first = sorted(product_law(models["draft"], [0], 1).items(), key=lambda item: -item[1])[:width]
    second = [(text, p) for text, p in product_law(models["draft"], [0], 2).items() if text[:1] in dict(first)]
    per_parent = [
        item
        for parent, _ in first
        for item in sorted((s for s in second if s[0][:1] == parent), key=lambda item: -item[1])[:width]
    ]
    expected = {text for text, _ in sorted([*first, *per_parent], key=lambda item: -item[1])[:4]}
    tree = TokenTree()
    for token, parent in zip(drafts[0].tokens, drafts[0].parents):
        tree.add(token, parent)
    assert paths(tree) == expected


def test_accepted_tokens_are_reported_by_their_source():
    recorded = ran(speculative_lane("rasd", **CORPUS), tables("abc", seed=1), [0, 1, 0], 24)
    series = figures(recorded, "draft tokens accepted so far")[-1]["series"]
    stood = sum(len(event.kept) for event in [e for e in recorded if isinstance(e, Verdict)][:-1])
    assert set(series) == {"drafted", "retrieved", "both"} and 0 < sum(series.values()) <= stood + 1
    assert figures(recorded, "first retrieved tokens, by the draft") and figures(recorded, "matched suffixes")
