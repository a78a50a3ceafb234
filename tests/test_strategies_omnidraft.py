"""A draft with another tokenizer: its draft is re-tokenised for the target, and the output distribution stays the
target's.
"""
from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from math import prod

import pytest
import torch
from pairs import network, pair
from registry import Collapse, registered, title
from tables import Enumerating, Law, Letters, TableModel, distance, product_law
from toys import byte_tokenizer, sentencepiece_tokenizer

from playground.contract import Decoder, find, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.cross_tokenizer import Lexicon
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.rng import Draws
from playground.decoding.scoring import score
from playground.decoding.session import Models, Prompt, Runner, prepare
from playground.decoding.visitor_memory import Memory
from playground.engine.model import Model
from playground.events import Done, Draft, Event, Failed, Forward, Verdict
from playground.trace import check
from playground.ui.model_menu import drafts
from strategies.speculative.omnidraft import Spellings
from support.laws import AT_ONE, EXACT, WRONG
from support.online_drafting import collapses, figures, speculation, speculative_lane
from support.speculation import GREEDY

CHAIN = speculative_lane("draft_model", AT_ONE, depth=3)


COLLAPSES = {
    "omnidraft": [
        *collapses(lambda *added: speculative_lane("omnidraft", *added, depth=0)),
        Collapse(speculative_lane("omnidraft", AT_ONE, depth=3), CHAIN),
        Collapse(speculative_lane("omnidraft", AT_ONE, depth=3, longest=1), CHAIN),
    ],
}


# --- two models with different tokens ---

class Pieces(Letters):
    """A tokenizer of letters that splits a text into the longest known pieces and skips unknown ones."""

    def encode(self, text: str) -> list[int]:
        found = []
        while text:
            piece = max(
                (p for p in self.letters if text.startswith(p) and self.letters.index(p) not in self.ends),
                key=len,
                default="",
            )
            found += [self.letters.index(piece)] if piece else []
            text = text[len(piece) or 1:]
        return found


def speaking(letters: list[str], ends: str = "", **settings) -> TableModel:
    model = TableModel(letters, ends, **settings)
    model.tokens = Pieces(letters, model.end_ids)
    return model


def strangers(seed: int = 0, ends: bool = False) -> dict[str, TableModel]:
    """The target has a token "ab", the draft "ba", and their common letters have different ids."""
    return {"target": speaking(["a", "b", "ab", *["."] * ends], "." * ends, seed=seed),
            "draft": speaking([*["!"] * ends, "b", "a", "ba"], "!" * ends, seed=seed + 1)}


def between(
    lane: LaneConfig | Assembly,
    models: dict,
    prompt: list[int],
    limits: Limits,
    draws: Draws | Enumerating | None = None,
) -> Iterator[tuple[Lane, list]]:
    """Run one lane whose draft reads the prompt in its own tokens, and look at it after each request, with what was
    told.
    """
    assembly = copy.deepcopy(lane) if isinstance(lane, Assembly) else assemble(lane)
    spelled = models["draft"].tokens.encode("".join(map(models["target"].tokens.piece, prompt)))
    lane = Lane(prompt, models, assembly, limits, Recorder(models["target"].tokens), {"draft": spelled})
    lane.draws = draws or Draws(limits.seed)
    runner = Runner(lane, assembly)
    while not runner.finished:
        recorded = runner.advance()
        assert not [event for event in recorded if isinstance(event, Failed)], recorded
        yield lane, recorded


def crossed(lane: LaneConfig | Assembly, models: dict, prompt: list[int], length: int) -> tuple[Lane, list[Event]]:
    seen = list(between(lane, models, prompt, Limits(0, length)))
    return seen[-1][0], [event for _, recorded in seen for event in recorded]


def law_between(lane: LaneConfig | Assembly, models: dict, prompt: list[int], length: int) -> Law:
    draws, found = Enumerating(), defaultdict(float)
    for course, _ in enumerate(draws.runs()):
        assert course < 50_000, "this law would take too long to sum"
        *_, (last, _) = between(lane, models, prompt, Limits(0, length), draws)
        found[tuple(last.tokens[len(prompt):])] += draws.weight
    return dict(found)


class Knowing(find("omnidraft")):
    """Knows some translations beforehand, right and wrong ones."""

    recorded = {(0, 1): 2, (1, 0): 2, (0, 0, 1): 1}

    def _begin(self, lm):
        super()._begin(lm)
        self._spellings.known.update(self.recorded)


class Nested(Knowing):
    """Knows translations of which one is a prefix of another."""

    recorded = {(0, 1): 2, (0, 1, 0): 1}


class NestedAlike(Knowing):
    """Knows two translations of one token, one a prefix of the other."""

    recorded = {(0, 1): 2, (0, 1, 0): 2}


class NestedDeeply(Knowing):
    """Knows runs that are nested prefixes three deep, and others that begin within them."""

    recorded = {(0, 1): 2, (0, 1, 0): 1, (0, 1, 1): 2, (1, 0): 2, (1, 0, 1): 0, (1, 1): 0}


class DraftsEverySpellingOfAToken(NestedAlike):
    """Two children with one token: the shorter run is reached only if the longer one was not sampled."""

    def _merges(self, tokens):
        return list(self._spellings.beginnings(tokens, self.longest))


class DraftsTheLongestRunAlone(Nested):
    """Whether a run gives a node depends on the tokens sampled after it, so below that node q is biased."""

    def _begin(self, lm):
        super()._begin(lm)
        known = self._spellings.beginnings
        self._spellings.beginnings = lambda tokens, most: list(known(tokens, most))[:1]


class InPlace(Knowing):
    """The paper's rule: the merged draft token replaces the first of its run, with the product of the probabilities of
    the run.
    """

    def merged(self, run):
        tree, self._runs, at, parent = TokenTree(run.source, run.drawn), [], 0, ROOT
        while at < len(run):
            token, length = next(self._spellings.beginnings(run.tokens[at:], self.longest), (run.tokens[at], 1))
            share, q = prod(run.confidence[at:at + length]), run.q[at].clone()
            if length > 1:
                q[run.tokens[at]] -= share
                q[token] += share
            parent = self._add(tree, run.tokens[at:at + length], tree.add(token, parent, q))
            at += length
        return tree


class MergedFirst(Knowing):
    """Tests the merged draft token before the sampled one it contains."""

    def merged(self, run):
        tree = super().merged(run)
        tree.order = sorted(tree.order, key=lambda node: (tree.parents[node], tree.q[node] is not None))
        return tree


def nearly_certain() -> dict[str, TableModel]:
    """Few courses of chance: the draft says "ab" for certain, then draws; the target draws two tokens, then writes "a".
    """
    even, a, b = ([0.5, 0.5], [0.0, 1.0], [1.0, 0.0])

    def draft(context):
        return torch.tensor([a, b, even, a][min(len(context) - 1, 3)], dtype=torch.float64).log()

    def target(context):
        return torch.tensor([0.3, 0.2, 0.5] if len(context) < 3 else [1.0, 0.0, 0.0], dtype=torch.float64).log()

    return {"target": speaking(["a", "b", "ab"], rule=target), "draft": speaking(["b", "a"], rule=draft)}


def check_nested(drafter: type[Nested]) -> None:
    models = nearly_certain()
    found = law_between(speculation(drafter(depth=3), AT_ONE), models, [0], 4)
    assert distance(found, product_law(models["target"], [0], 4)) < EXACT


@pytest.mark.oracle("omnidraft")
@pytest.mark.parametrize("drafter", [Nested, NestedAlike, NestedDeeply])
def test_the_output_distribution_is_the_targets_if_one_translation_is_a_prefix_of_another(drafter):
    check_nested(drafter)


@pytest.mark.oracle("omnidraft")
@pytest.mark.parametrize("seed", [0, 3])
def test_the_output_distribution_is_the_targets_for_random_models_with_nested_translations(seed):
    models = strangers(seed)
    for drafter in (Nested, NestedAlike, NestedDeeply):
        found = law_between(speculation(drafter(depth=3), AT_ONE), models, [0, 1, 0], 2)
        assert distance(found, product_law(models["target"], [0, 1, 0], 2)) < EXACT


@pytest.mark.refuses("omnidraft")
@pytest.mark.parametrize("wrong", [DraftsTheLongestRunAlone, DraftsEverySpellingOfAToken])
def test_drafting_a_translation_only_if_no_longer_one_was_sampled_changes_the_distribution(wrong):
    with pytest.raises(AssertionError, match="distance"):
        check_nested(wrong)


@pytest.mark.oracle("omnidraft")
@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_output_distribution_is_the_targets_whatever_translations_are_known(verifier, longest):
    for drafter in (make("omnidraft", depth=3, longest=longest), Knowing(depth=3, longest=longest)):
        models = strangers()
        found = law_between(speculation(drafter, AT_ONE, verifier=verifier), models, [0, 1, 0], 3)
        assert distance(found, product_law(models["target"], [0, 1, 0], 3)) < EXACT


def test_the_output_distribution_is_the_targets_at_text_ends_and_with_a_sampler():
    models = strangers(seed=4, ends=True)
    found = law_between(speculation(Knowing(depth=2), AT_ONE), models, [0, 1], 3)
    assert distance(found, product_law(models["target"], [0, 1], 3)) < EXACT
    found = law_between(speculation(Knowing(depth=2), ("temperature", {"t": 0.5})), models, [0, 1], 2)
    assert distance(found, product_law(models["target"], [0, 1], 2, lambda scores, history: scores / 0.5)) < EXACT


@pytest.mark.refuses("omnidraft")
@pytest.mark.parametrize("wrong", [InPlace, MergedFirst])
def test_a_wrong_position_of_the_merged_draft_token_is_detected(wrong):
    models = strangers()
    found = law_between(speculation(wrong(depth=2), AT_ONE), models, [0, 1, 0], 3)
    assert distance(found, product_law(models["target"], [0, 1, 0], 3)) > WRONG


@pytest.mark.parametrize("drafter", [make("omnidraft"), Knowing(depth=5)], ids=["learning", "misled"])
def test_greedily_the_text_is_the_targets_own(drafter):
    kinds = set()
    for seed in range(8):
        models = strangers(seed, ends=seed % 2 == 1)
        plain, _ = crossed(GREEDY, models, [0, 1], 20)
        lane, recorded = crossed(speculation(drafter), models, [0, 1], 20)
        assert lane.tokens == plain.tokens
        kinds |= {test.kept for event in recorded if isinstance(event, Verdict) for test in event.tests}
    assert kinds == {True, False}, "guesses that all stand or all fall prove nothing"


def agreeing() -> dict[str, TableModel]:
    """Both write abababab: the target in pairs, the draft letter by letter."""
    def target(context):
        return torch.tensor([0.0, 0.0, 5.0], dtype=torch.float64)

    def draft(context):
        return torch.tensor([5.0, 0.0] if context[-1] == 1 else [0.0, 5.0], dtype=torch.float64)

    return {"target": speaking(["a", "b", "ab"], rule=target), "draft": speaking(["b", "a"], rule=draft)}


def test_draft_tokens_that_spell_a_target_token_are_learned_and_merged_from_then_on():
    lane, recorded = crossed(speculative_lane("omnidraft", depth=4), agreeing(), [0, 1], 9)
    assert lane.tokens[2:] == [2] * 9
    firsts, verdicts = (
        [[draft.tokens[:1], draft.parents.count(-1)] for draft in recorded if isinstance(draft, Draft)],
        [e for e in recorded if isinstance(e, Verdict)],
    )
    assert firsts[0] == [[0], 1] and firsts[1] == [[0], 2], "the first round knows no spelling, the second does"
    assert [len(verdict.kept) for verdict in verdicts[:3]] == [0, 2, 2]
    assert figures(recorded, "known spellings")[-1]["series"] == {"spellings": 1}
    assert figures(recorded, "runs merged into one token")[0]["spans"] == [[1, 2, "a + b", 2], [2, 3, "a + b", 2]]


def test_without_merging_only_common_tokens_are_drafted():
    lane, recorded = crossed(speculative_lane("omnidraft", depth=4, longest=1), agreeing(), [0, 1], 5)
    assert lane.tokens[2:] == [2] * 5 and not [e for e in recorded if isinstance(e, Verdict) and e.kept]


def test_every_translation_of_a_chain_is_in_the_tree():
    drafter = Knowing(depth=4)
    drafter._spellings, run = Spellings(), TokenTree()
    drafter._spellings.known = {(0, 1): 2}
    for token in (0, 1, 0, 1):
        run.add(token, len(run) - 1)
    tree = drafter.merged(run)
    leaves = {tuple(tree.prefix(node)) for node in range(len(tree)) if node not in tree.parents}
    assert leaves == {(0, 1, 0, 1), (0, 1, 2), (2, 0, 1), (2, 2)}
    assert len({tuple(tree.prefix(node)) for node in range(len(tree))}) == len(tree)


def test_learned_translations_are_reused_in_the_next_run_of_the_same_pair():
    memory, series = Memory(), []
    models, prompt = Models(*agreeing().values()), Prompt("ab")
    for _ in range(2):
        session = prepare(models, [speculative_lane("omnidraft", depth=4)], prompt, Limits(0, 9), memory=memory)
        series.append([stamped.event for stamped in session])
    first = [[event for event in recorded if isinstance(event, Verdict)][0] for recorded in series]
    assert [len(verdict.kept) for verdict in first] == [0, 2]


# --- the text in the draft's own tokens ---

def test_the_draft_always_reads_the_same_text_in_its_own_tokens():
    cut = 0
    for seed in range(6):
        models, before = strangers(seed), []
        ours, theirs = (models[name].letters for name in ("target", "draft"))
        for lane, _ in between(speculative_lane("omnidraft", AT_ONE, depth=3), models, [0, 1, 0], Limits(seed, 14)):
            if "draft" not in lane._streams:
                continue
            stream = lane.stream("draft")
            read = (
                list(map(int, stream.store.keys[0].rows[0, : stream.store.length, 0].tolist()))
                if stream.store.length
                else []
            )
            whole = "".join(ours[token] for token in lane.tokens)
            assert whole.startswith("".join(theirs[token] for token in read))
            assert "".join(theirs[token] for token in [*read, *stream.unread()]) == whole
            cut += read[:len(before)] != before
            before = read
    assert cut > 3, "no text was ever spelled in another way than it was read"


def test_the_draft_takes_no_forward_within_a_character():
    ours, theirs = byte_tokenizer(60), byte_tokenizer(10)
    script = [*ours("é!")["input_ids"], ours.eos_token_id]
    assert len(script) > 3, "the letter is to have several tokens"

    def rule(context):
        return (
            torch.nn.functional.one_hot(torch.tensor(script[min(len(context), len(script)) - 1]), len(ours)).double()
            * 9
        )

    models, places = (
        {"target": TableModel(tokenizer=ours, rule=rule), "draft": TableModel(tokenizer=theirs, seed=1)},
        [],
    )
    for lane, recorded in between(speculative_lane("omnidraft"), models, ours("a")["input_ids"], Limits(0, 9)):
        places += [lane.generated for event in recorded if isinstance(event, Draft)]
    assert lane.text == "é!" and lane.reason == "end"
    whole = [place for place in range(len(script)) if "\ufffd" not in ours.decode(script[:place])]
    assert set(places) <= set(whole) and 0 in places and len(whole) < len(script)


class GoesBack(Decoder):
    """Writes four tokens, lets the draft read them, rolls some back and runs the draft again, each time for the row
    after the text.
    """

    needs, translates = ("draft",), True

    def __init__(self, count: int):
        self.count, self.rows = count, []

    def __deepcopy__(self, memo):
        return self

    def decode(self, lm):
        rows = yield lm.prefill()
        for _ in range(4):
            yield lm.keep(lm.pick(rows))
            rows = yield lm.extend()
        for count in (0, self.count):
            yield lm.roll_back(count)
            rows = yield lm.stream("draft").extend()
            self.rows.append((list(lm.tokens), rows.raw[0]))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_after_a_rollback_the_drafts_row_is_that_of_the_shorter_text(count):
    for seed in range(4):
        models, decoder = strangers(seed), GoesBack(count)
        ours, theirs = models["target"].tokens, models["draft"].tokens
        list(between(Assembly(decoder), models, [0, 1], Limits(0, 9)))
        for tokens, row in decoder.rows:
            read = theirs.encode("".join(ours.letters[token] for token in tokens[:2])) + theirs.encode(
                "".join(ours.letters[token] for token in tokens[2:])
            )
            scores = models["draft"].scores(tuple(read))
            expected = [
                float(scores[theirs.letters.index(letter)]) if letter in theirs.letters else float("-inf")
                for letter in ours.letters
            ]
            assert row.tolist() == expected


def test_of_tokens_with_equal_text_the_canonical_one_is_mapped():
    with_bytes, without = sentencepiece_tokenizer(), byte_tokenizer(20)
    name = with_bytes.convert_tokens_to_ids
    assert name("<0x61>") < name("a")
    lexicon = Lexicon(TableModel(tokenizer=without), TableModel(tokenizer=with_bytes))
    assert lexicon.theirs[without.convert_tokens_to_ids("a")] == name("a")
    assert lexicon.theirs[without.convert_tokens_to_ids("x")] == name("<0x78>")
    back = Lexicon(TableModel(tokenizer=with_bytes), TableModel(tokenizer=without))
    assert back.ours[without.convert_tokens_to_ids("a")] == name("a")


@pytest.mark.parametrize(
    "ours, theirs", [(byte_tokenizer(20), sentencepiece_tokenizer()), (sentencepiece_tokenizer(), byte_tokenizer(20))]
)
def test_tokenizers_with_different_space_handling_read_the_same_text(ours, theirs):
    names = {"a", "b", "c", "ab", "\u2581", "\u2581a", "\u0120"}
    wanted = [token for token in range(len(ours)) if ours.convert_ids_to_tokens(token) in names]

    def rule(context):
        chances = TableModel(tokenizer=None, letters=wanted, seed=1).scores(context)
        return torch.full((len(ours),), -1e9, dtype=torch.float64).index_copy(0, torch.tensor(wanted), chances)

    models = {"target": TableModel(tokenizer=ours, rule=rule), "draft": TableModel(tokenizer=theirs, seed=1)}
    *_, (lane, _) = between(speculative_lane("omnidraft", AT_ONE), models, ours("ab ba")["input_ids"], Limits(3, 14))
    stream, said = lane.stream("draft"), lane.tokens[lane.prompt_length:]
    read = (stream.store.keys[0].rows[0, :stream.store.length, 0].int().tolist() + stream.unread())[len(stream.prompt):]
    assert b"".join(map(models["draft"].tokens.bytes, read)) == b"".join(map(models["target"].tokens.bytes, said))
    assert b" " in b"".join(map(models["target"].tokens.bytes, said)) and len(stream.spellings(0)) > len(said) / 2


def test_the_drafts_end_token_maps_to_the_targets():
    def ending(place):
        return lambda context: torch.nn.functional.one_hot(torch.tensor(place), 3).double() * 9

    models = {
        "target": speaking(["a", "b", "."], ".", rule=ending(2)),
        "draft": speaking(["!", "b", "a"], "!", rule=ending(0)),
    }
    lane, recorded = crossed(speculative_lane("omnidraft"), models, [0], 5)
    assert lane.tokens == [0, 2] and lane.reason == "end"
    assert [event.tokens for event in recorded if isinstance(event, Draft)] == [[2]]


def test_a_draft_with_a_full_context_drafts_nothing():
    models = strangers()
    models["draft"].context = 6
    lane, recorded = crossed(speculative_lane("omnidraft", AT_ONE), models, [0, 1, 0], 20)
    assert lane.generated == 20 and lane.stream("draft").store.length <= 6
    assert [event for event in recorded if isinstance(event, Draft)]


def test_under_a_grammar_the_distribution_is_the_targets_among_allowed_tokens():
    ours, theirs = byte_tokenizer(60), byte_tokenizer(10)
    models = {"target": TableModel(tokenizer=ours, seed=3), "draft": TableModel(tokenizer=theirs, seed=4)}
    q, x, z = (ours.convert_tokens_to_ids(letter) for letter in "qxz")
    assert theirs.convert_tokens_to_ids("q") == q and len(theirs) < len(ours)
    first, second = (models["target"].scores(context).softmax(-1) for context in ((q, q), (q, q, q)))
    chance_of_q, chance_of_x = float(first[q] / (first[q] + first[z])), float(second[x] / (second[x] + second[z]))
    by_hand = {(q, x): chance_of_q * chance_of_x, (q, z): chance_of_q * (1 - chance_of_x), (z,): 1 - chance_of_q}
    recipe = speculative_lane("omnidraft", ("choice", {"options": "qz|qx|z"}), AT_ONE)
    assert distance(law_between(recipe, models, [q, q], 6), by_hand) < EXACT


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_networks_with_different_tokenizers_write_what_the_target_writes_alone(architecture):
    target = pair(architecture).target
    models = Models(target, Model(network(architecture), byte_tokenizer(20), "another"))
    session = prepare(
        models,
        [GREEDY, speculative_lane("omnidraft"), speculative_lane("omnidraft", ("regex", {"pattern": "[a-z ]{3,9}"}))],
        Prompt("The green bird"),
        Limits(0, 16),
    )
    recorded = [stamped for stamped in session]
    plain, crossed_ = (
        [token for s in recorded if s.lane == lane and s.event.kind == "commit" for token in s.event.ids]
        for lane in (0, 1)
    )
    assert plain == crossed_ and len(set(plain)) > 3
    assert isinstance(recorded[-1].event, Done) and check(session.trace) == []
    assert any(isinstance(s.event, Forward) and s.event.stream == "draft" for s in recorded)


# --- which lanes can use such a draft ---

def ends_of(models: Models, *recipes: LaneConfig) -> list[Event]:
    session = prepare(models, list(recipes), Prompt("ab"), Limits(0, 4))
    last = {stamped.lane: stamped.event for stamped in session}
    return [last[lane] for lane in range(len(recipes))]


def test_a_draft_with_other_tokens_is_refused_only_to_lanes_that_cannot_translate_it():
    drafters = [speculative_lane(cls.name) for cls in registered("drafter") if "draft" in cls.needs]
    others = [LaneConfig("greedy"), speculative_lane("prompt_lookup"), LaneConfig("ead")]
    for recipe, end in zip([*drafters, *others], ends_of(Models(*strangers().values()), *drafters, *others)):
        parts = [find(name) for name in (recipe.strategy, *(name for name, _ in recipe.extras))]
        bound = [cls.title for cls in parts if "draft" in cls.needs and not cls.translates]
        assert isinstance(end, Failed) == bool(bound), title(recipe)
        if bound:
            assert (
                f"which {bound[0]} cannot translate" in end.message
                and find("omnidraft").title in end.message
                and end.message.endswith(".")
            )


def test_a_draft_with_the_same_tokens_is_refused_to_no_lane():
    models = Models(TableModel("abc"), TableModel("abc", seed=1))
    assert models.differences == "" and all(
        isinstance(end, Done) for end in ends_of(models, speculative_lane("draft_model"), speculative_lane("omnidraft"))
    )


def test_models_without_a_token_in_common_are_refused():
    models = Models(speaking(["a", "b"]), speaking(["c", "d"]))
    end, = ends_of(models, speculative_lane("omnidraft"))
    assert isinstance(end, Failed) and "no token in common" in end.message


def test_the_menu_of_drafts_says_who_can_use_the_one_with_other_tokens():
    titles = {name: text for text, name in drafts()}
    assert "omnidraft" in titles["pocket-other-draft"] and "omnidraft" not in titles["pocket-draft"]


def test_a_text_is_scored_by_the_target_alone_where_the_draft_has_other_tokens():
    assert [header.model for header in score(Models(*strangers().values()), Prompt("abab")).headers] == ["table"]
    assert len(score(Models(TableModel("ab"), TableModel("ab", seed=1)), Prompt("abab")).headers) == 2
