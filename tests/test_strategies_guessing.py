"""Guessing without a second model of its own kind: what was written before, the input, the model's corrections of itself, and trees by odds."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from itertools import permutations
from math import prod
from time import thread_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pair
from registry import Collapse
from tables import Enumerating, TableModel, distance, law, product_law, watch, write
from test_strategies_trees import AT_ONE, EXACT, GREEDY, WRONG, Judged, at_rest, first_drafts, guessing, ids, off

from playground import load
from playground.draws import Draws
from playground.errors import Refusal
from playground.events import Draft, Failed, Figure, Forward
from playground.lane import Lane, Limits
from playground.memory import Memory
from playground.parts.drafting import guess_row
from playground.parts.suffixes import BREAK, Suffixes
from playground.parts.tree import ROOT, TokenTree
from playground.parts.urn import Ranking, Urn
from playground.parts.verification import reject
from playground.recipe import Assembly, Recipe, assemble
from playground.recorder import Silent
from playground.session import Models, Prompt, Runner, prepare
from playground.strategy import find, make
from playground.trace import metrics

ONE_GUESS = guessing("draft_model", "rejection", AT_ONE, depth=1)
COLLAPSES = {
    "suffix_decoding": at_rest("suffix_decoding", alpha=0),
    "aggressive": at_rest("aggressive", block=0),
    "dyspec": [*at_rest("dyspec", nodes=0), Collapse(guessing("dyspec", "rejection", AT_ONE, nodes=1), ONE_GUESS)],
    "jacobi": at_rest("jacobi", window=0),
    "lookahead": at_rest("lookahead", window=0, guesses=0),
    "stand": at_rest("stand", nodes=0),
    "aded": [*at_rest("aded", nodes=0), *at_rest("aded", gain=0, prompt=False)],
}

def told(recipe: Recipe, memory: Memory | None = None, prompt: str = "The green bird", length: int = 24, models: Models | None = None, **more):
    """A session that has run to its end, and its events."""
    session = prepare(models or pair(), [recipe], Prompt(prompt, **more), Limits(0, length), memory=memory)
    return session, [stamped.event for stamped in session]


def passes(session) -> int:
    return metrics(session.trace)["target_forwards"]


def letters(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def follows(answer: list[int], start: int, size: int = 26) -> TableModel:
    """Writes this answer after a prompt of `start` tokens, whatever was guessed."""
    return TableModel("abcdefghijklmnopqrstuvwxyz"[:size],
                      rule=lambda context: torch.eye(size, dtype=torch.float64)[answer[min(len(context) - start, len(answer) - 1)]] * 50)


# --- what followed every ending ---

def stored(*texts: Iterable[int]) -> Suffixes:
    store = Suffixes()
    for text in texts:
        store.begin()
        for token in text:
            store.add([token])
    return store


def count(texts: list[list[int]], words: list[int]) -> int:
    """How often these words occur in the texts, one by one."""
    return sum(text[i:i + len(words)] == words for text in texts for i in range(len(text) - len(words) + 1))


some_texts = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=4)


@settings(deadline=None, max_examples=120)
@given(texts=some_texts, context=st.lists(st.integers(0, 2), min_size=1, max_size=6), kept=st.integers(0, 4))
def test_endings_and_what_followed_them_are_counted_as_by_hand_before_and_after_texts_were_forgotten(texts, context, kept):
    store, left = stored(*texts), texts[-kept:] if kept else []
    for known in (texts, left):
        found = dict(store.occurrences(context))
        endings = {n: context[-n:] for n in range(1, len(context) + 1)}
        assert {n: len(places) for n, places in found.items()} == {n: count(known, words) for n, words in endings.items() if count(known, words)}
        for n, places in found.items():
            followers = {token: len(after) for token, after in store.followers(places).items()}
            assert followers == {token: many for token in range(3) if (many := count(known, [*endings[n], token]))}
            assert sum(followers.values()) <= len(places)
        store.only_last(kept)
        assert store.digest() == stored(*left).digest()


def guess(texts: list[list[int]], context: list[int], budget: int = 64, **knobs):
    return find("suffix_decoding")(**knobs).guess(stored(*texts), context, budget)


@pytest.mark.parametrize("text, expected, match", [("abcabcab", "cab", 5), ("xabyabxab", "yab", 3)])
def test_suffix_decoding_guesses_what_was_worked_out_by_hand(text, expected, match):
    found = guess([letters(text)], letters(text))
    assert (found.tree.tokens, found.match, found.score) == (letters(expected), match, 1.5)


def by_the_paper(texts: list[list[int]], context: list[int], depth: int, alpha: float, least: float) -> tuple[float, int]:
    """Score and length of the best guess, every ending tried and every frequency counted anew. Of equally frequent tokens the last read."""
    best = (0.0, 0)
    context = context[-depth:]
    for match in range(1, len(context)):
        words, chance, score, length = context[-match:], 1.0, 0.0, 0
        while length < min(int(alpha * match + 1e-6), depth - match) and count(texts, words):
            after = {token: count(texts, [*words, token]) for token in range(3)}
            chance *= max(after.values()) / count(texts, words)
            if not any(after.values()) or chance < least:
                break
            words, score, length = [*words, max(after, key=lambda token: (after[token], last_read(texts, [*words, token])))], score + chance, length + 1
        if score and score >= best[0]:
            best = (score, length)
    return best


def last_read(texts: list[list[int]], words: list[int]) -> tuple[int, int]:
    return max(((number, i) for number, text in enumerate(texts) for i in range(len(text)) if text[i:i + len(words)] == words), default=(-1, -1))


@settings(deadline=None, max_examples=150)
@given(texts=some_texts, context=st.lists(st.integers(0, 2), min_size=1, max_size=9), depth=st.sampled_from([4, 8]),
       alpha=st.sampled_from([0.5, 1.0, 2.5]), least=st.sampled_from([0.1, 0.3, 0.9]))
def test_suffix_decoding_is_the_search_over_all_endings(texts, context, depth, alpha, least):
    found = guess(texts, context, depth=depth, alpha=alpha, min_prob=least)
    score, length = by_the_paper(texts, context, depth, alpha, least)
    assert found.score == pytest.approx(score) and len(found.tree) == length


def test_a_guess_is_twice_as_long_after_an_ending_twice_as_long_until_both_fill_the_depth():
    text = list(range(40))
    lengths = [len(guess([text], [99, *text[:match]], depth=16).tree) for match in (2, 4, 8, 12)]
    assert lengths == [2, 4, 8, 8], "of twelve known tokens the last eight may guess eight"


def test_where_only_certain_guesses_count_a_text_never_guesses_itself_and_earlier_ones_do():
    text = letters("abcab")
    assert len(guess([text], text, min_prob=1.0).tree) == 0, "its own end has nothing after it"
    assert guess([letters("abcd")], letters("xxab"), min_prob=1.0).tree.tokens == letters("cd")


def test_a_tree_of_suffixes_takes_the_likeliest_paths_and_the_chain_is_among_them():
    texts = [letters(text) for text in ("abcd", "abcd", "abce", "abx")]
    tree = guess(texts, letters("zab"), alpha=2.0, branching=True).tree
    assert [tuple(tree.prefix(node)) for node in range(len(tree))] == [tuple(letters(path)) for path in ("c", "cd", "x", "ce")]
    assert guess(texts, letters("zab"), alpha=2.0).tree.tokens == letters("cd")


def test_nothing_is_guessed_after_a_token_that_ends_the_text():
    drafter = make("suffix_decoding", alpha=4.0)
    assert drafter.guess(stored(letters("abcde")), letters("xab"), 9, ends=lambda token: token == 3).tree.tokens == letters("cd")


def suffixes(**knobs) -> Recipe:
    return guessing("suffix_decoding", "greedy_match", **knobs)


def test_an_answer_that_was_written_before_costs_few_passes_and_only_the_same_visitor_has_that():
    memory = Memory()
    (cold, first), (warm, second), (other, _) = (told(suffixes(), kept, length=60) for kept in (memory, memory, Memory()))
    assert ids(first) == ids(second) and passes(other) == passes(cold)
    assert passes(warm) <= 1 + 6 + 2, "guesses double from one token on until answer and guess fill the depth"
    assert passes(cold) > 2 * passes(warm)


def remembered(memory: Memory) -> list[int]:
    (store,) = memory._things.values()
    return store.tokens


class Poisoned(find("suffix_decoding")):
    """Remembers refused guesses as if they had been written."""

    def observe(self, tree, rows, verdict):
        self._past.add(tree.tokens)


@pytest.mark.parametrize("cls, right", [(find("suffix_decoding"), True), (Poisoned, False)], ids=["kept", "refused too"])
def test_memory_holds_what_was_written_to_the_last_token_and_neither_prompts_nor_refused_guesses(cls, right):
    assembly, memory = assemble(suffixes()), Memory()
    assembly.decoder.drafter = cls(alpha=4.0)
    model = TableModel("abcde", seed=2)
    for prompt in ([0, 1, 0, 1, 0], [2, 3, 2, 3]):
        lane = write_with(assembly, model, prompt, memory)
        written = [BREAK, *lane.tokens[len(prompt):]]
        assert (remembered(memory)[-len(written):] == written) == right


def write_with(assembly: Assembly, model: TableModel, prompt: list[int], memory: Memory) -> Lane:
    """Run one lane of a visitor who remembers to its end."""
    lane = Lane(prompt, {"target": model}, deepcopy(assembly), Limits(0, 20), Silent(model.tokens), memory=memory)
    runner = Runner(lane, lane.assembly)
    while not runner.finished:
        assert not [event for event in runner.advance() if isinstance(event, Failed)]
    return lane


def test_of_more_answers_than_are_to_be_remembered_the_oldest_are_forgotten_and_without_any_nothing_is_touched():
    memory = Memory()
    for prompt in ("one", "two", "three"):
        _, events = told(suffixes(requests=2), memory, prompt, length=8)
    before = list(remembered(memory))
    assert before.count(BREAK) == 2 and before[-8:] == ids(events)
    told(suffixes(requests=0), memory, "four", length=8)
    assert remembered(memory) == before


class TakenForDrawn(find("suffix_decoding")):
    """The most frequent follower, said to be drawn by its frequency."""

    drawn = "independent"

    def propose(self, lm, budget):
        yield from ()
        tree = TokenTree(self.name, self.drawn)
        if budget:
            q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
            tree.add(0, ROOT, q)
        return tree


def test_frequencies_are_no_chances_a_guess_was_drawn_with():
    assert off(TakenForDrawn(), Judged(reject)) > WRONG
    assert off(make("suffix_decoding", alpha=4.0), Judged(reject)) < EXACT


# --- prompt lookup as others have it ---

def looked_up(text: list[int], length: int, **knobs) -> list[int]:
    return make("prompt_lookup", **knobs).guess(text, length, lambda token: token == 99)


def test_the_three_public_ways_to_look_a_prompt_up_differ_where_they_are_known_to():
    text, ending = [1, 2, 3, 4, 2, 3], [5, 6, 99, 7, 5, 6]
    assert [looked_up(text, 4, variant=v) for v in ("transformers", "vllm", "original")] == [[4, 2, 3], [4, 2, 3], []]
    assert looked_up(text, 3, variant="original") == [4, 2, 3]
    assert [looked_up(ending, 2, variant=v) for v in ("transformers", "vllm", "original")] == [[], [99, 7], [99, 7]]


@settings(deadline=None, max_examples=150)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=14), n_max=st.integers(1, 5), length=st.integers(1, 5))
def test_the_original_takes_the_longest_ending_that_a_whole_guess_follows(text, n_max, length):
    whole = [(-n, i) for n in range(1, n_max + 1) for i in range(len(text) - n) if text[i:i + n] == text[len(text) - n:] and i + n + length <= len(text)]
    n, start = min(whole, default=(0, 0))
    assert looked_up(text, length, n_max=n_max, variant="original") == (text[start - n:start - n + length] if n else [])


# --- aggressive decoding ---

def joined(source: str, answer: str, **knobs) -> int | None:
    drafter = make("aggressive", **knobs)
    drafter.read(letters(source))
    return drafter.join(letters(answer))[0]


@pytest.mark.parametrize("answer, place", [("ba", 3), ("a", None), ("xa", None), ("c", 4), ("x", None), ("", None)])
def test_an_answer_joins_its_input_after_the_shortest_ending_that_stands_there_once(answer, place):
    assert joined("abac", answer) == place


def test_what_is_ambiguous_at_its_longest_is_no_place():
    assert joined("abcxabcy", "abc") is None
    assert joined("abcxabcy", "xabc", max_gram=4) == 7


SOURCE = letters("thequickbrownfx")
EDITS = {
    "nothing changed": (SOURCE, 1),
    "one letter for another": ([*SOURCE[:5], 25, *SOURCE[6:]], 3),  # up to it; the letter after it alone; from there on
    "one letter left out": ([*SOURCE[:5], *SOURCE[6:]], 2),  # what stands in its place is in the input once, so it joins at once
    "one letter put in": ([*SOURCE[:5], 25, *SOURCE[5:]], 3),
}


class Stubborn(find("aggressive")):
    """Goes on at its old place in the input after a mismatch, where it should look for a new one."""

    def follow(self, answer):
        copied = super().follow(answer)
        self._place = len(answer) if self._place is None else self._place
        return copied


def passes_of(drafter, answer: list[int], source: list[int] = SOURCE) -> int:
    """Passes of the target after the prompt for an answer to a source; every answer is written right."""
    model, assembly = follows(answer, len(source)), assemble(guessing("aggressive", "greedy_match"))
    assembly.decoder.drafter = drafter
    lane = write(assembly, {"target": model}, source, Limits(0, len(answer)), Draws(0))
    assert lane.tokens[len(source):] == answer
    return model.forwards - 1


@pytest.mark.parametrize("answer, expected", EDITS.values(), ids=EDITS)
def test_a_copy_costs_one_pass_and_every_edit_those_until_it_joins_again(answer, expected):
    assert passes_of(make("aggressive"), answer) == expected


def test_one_that_keeps_its_place_after_a_mismatch_is_found_out():
    for edit in ("one letter left out", "one letter put in"):
        answer, expected = EDITS[edit]
        assert passes_of(Stubborn(), answer) > expected + 2


def test_a_block_ends_the_guess_and_the_next_goes_on_where_it_ended():
    assert passes_of(make("aggressive", block=4), SOURCE) == 3, "five tokens a pass"


def first_guess(recipe: Recipe, **prompt) -> str:
    _, events = told(recipe, **prompt)
    return "".join(next(event for event in events if isinstance(event, Draft)).pieces)


def test_the_input_is_the_passage_or_the_prompt_or_what_follows_some_words_of_it():
    recipe = guessing("aggressive", "greedy_match")
    assert first_guess(recipe, context="A red fox.", prompt="Copy it.") == "A red fox."
    assert first_guess(recipe, prompt="Copy me.") == "Copy me."
    assert first_guess(guessing("aggressive", "greedy_match", after="this:"), prompt="Mend this: a rad fox.") == "a rad fox."


def test_words_that_are_not_in_the_prompt_are_refused_in_one_sentence():
    _, events = told(guessing("aggressive", "greedy_match", after="that:"), prompt="Mend this: a rad fox.")
    assert isinstance(events[-1], Failed) and events[-1].message.startswith("The prompt does not hold 'that:'")


# --- DySpec ---

@pytest.mark.parametrize("most", [1, 3, 5, 9])
def test_without_chance_the_likeliest_are_taken_in_turn_and_what_is_left_is_what_was_not_taken(most):
    chances = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)
    ranking, taken = Ranking(chances, most), 0.0
    for token in [1, 3, 4, 0, 2][:most]:
        assert ranking.left == pytest.approx(1 - taken)
        assert ranking.take() == (token, float(chances[token]))
        taken += float(chances[token])
    assert ranking.left == 0


def drawn_from(odds: dict[str, list[float]], size: int = 3) -> TableModel:
    """A model whose odds go by the letters after the prompt; evenly where none are given."""
    def rule(context):
        return torch.tensor(odds.get("".join("abc"[token] for token in context[1:]), [1 / size] * size), dtype=torch.float64).log()

    return TableModel("abcdefghijklmnopqrstuvwxyz"[:size], rule=rule)


def tree_of(recipe: Recipe, models: dict, length: int = 20) -> TokenTree:
    ((_, tree, _),) = first_drafts(recipe, models, length)
    return tree


def paths(tree: TokenTree) -> list[str]:
    return ["".join(chr(97 + token) for token in tree.prefix(node)) for node in range(len(tree))]


BY_HAND = {"": [0.6, 0.3, 0.1], "a": [0.9, 0.05, 0.05], "aa": [0.5, 0.3, 0.2], "b": [0.2, 0.7, 0.1]}


def test_the_tree_of_dyspec_grows_in_the_order_worked_out_by_hand():
    models = {"target": TableModel("abc"), "draft": drawn_from(BY_HAND)}
    assert paths(tree_of(guessing("dyspec", "greedy_match", nodes=5), models)) == ["a", "aa", "aaa", "b", "bb"]


def test_a_sure_draft_makes_a_chain_and_an_unsure_one_makes_siblings():
    sure = TableModel("abc", rule=lambda context: torch.tensor([50.0, 0.0, 0.0], dtype=torch.float64))
    even = TableModel("abcdefghij", rule=lambda context: -1e-9 * torch.arange(10, dtype=torch.float64))  # so that there is an order
    for draft, shape in ((sure, ["a" * n for n in range(1, 7)]), (even, list("abcdef"))):
        assert paths(tree_of(guessing("dyspec", "greedy_match", nodes=6), {"target": TableModel(draft.letters), "draft": draft})) == shape


@pytest.mark.parametrize("nodes", [3, 7, 12])
def test_level_by_level_the_tree_is_the_same_where_the_threshold_is_the_last_chance(nodes):
    models = {"target": TableModel("abcd"), "draft": TableModel("abcd", seed=6)}
    one_by_one = tree_of(guessing("dyspec", "greedy_match", nodes=nodes), models)
    least = min(needed(one_by_one.tokens, one_by_one.parents, one_by_one.confidence))
    drafter = find("dyspec")(nodes=64, mode="threshold", threshold=least - 1e-9)
    assembly = assemble(guessing("dyspec", "greedy_match"))
    seen = []
    assembly.decoder.drafter = drafter
    assembly.decoder.verifier = recording(seen)
    for lane in watch(assembly, models, [0], Limits(0, 20), Draws(0)):
        if lane.generated:
            break
    assert sorted(paths(seen[0])) == sorted(paths(one_by_one))


def recording(trees: list):
    class Recording(find("greedy_match")):
        def judge(self, lm, tree, rows):
            trees.append(tree)
            return super().judge(lm, tree, rows)

        def __deepcopy__(self, memo):
            return self

    return Recording()


def needed(tokens: list[int], parents: list[int], q: list[float]) -> list[float]:
    """The chance that each guess is needed: all above it stand, all before it at its own parent and at theirs are refused."""
    shares, chances = [], []
    for node, parent in enumerate(parents):
        before = [sibling for sibling in range(node) if parents[sibling] == parent]
        shares.append(q[node] / (1 - sum(q[sibling] for sibling in before)))
        above = 1.0 if parent == ROOT else chances[parent] * shares[parent]
        chances.append(above * prod(1 - shares[sibling] for sibling in before))
    return chances


def test_every_guess_shows_the_chance_it_was_needed_with_and_none_is_likelier_than_one_before_it():
    _, events = told(guessing("dyspec", "rejection", AT_ONE, nodes=20))
    drafts = [event for event in events if isinstance(event, Draft)]
    figures = [event.data["values"] for event in events if isinstance(event, Figure)]
    assert len(drafts) == len(figures) > 5
    for draft, (root, *values) in zip(drafts, figures):
        assert root == 1 and values == pytest.approx(needed(draft.tokens, draft.parents, draft.q), abs=1e-9)
        assert all(later <= earlier + 1e-12 for earlier, later in zip(values, values[1:]))


def test_a_budget_of_guesses_stands_longer_where_it_is_spent_by_odds_than_in_a_fixed_shape():
    models = {"target": TableModel("abcd", seed=3, spread=3), "draft": TableModel("abcd", seed=3, spread=3)}
    spent = [sum(weight * len(verdict.kept) for weight, _, verdict in first_drafts(recipe, models, 4))
             for recipe in (guessing("dyspec", "rejection", AT_ONE, nodes=3), guessing("rsd_c", "rejection", AT_ONE, branching="1 2"))]
    assert spent[0] > spent[1]


def test_level_by_level_the_draft_is_asked_once_a_level():
    _, events = told(guessing("dyspec", "greedy_match", mode="threshold", threshold=0.05))
    asked, drafts = 0, []
    for event in events:
        asked += isinstance(event, Forward) and event.stream == "draft"
        if isinstance(event, Draft):
            drafts.append((asked, TokenTree(parents=event.parents, tokens=event.tokens).depth()))
            asked = 0
    assert len(drafts) > 3 and all(asked <= depth + 1 for asked, depth in drafts)


class TakesTheBest(find("dyspec")):
    """The most probable tokens, passed for drawn."""

    def _draw(self, lm, tree, urn, parent, position):
        left = urn.left
        node = tree.add(urn.take(lambda rest: int(rest.argmax())), parent, urn.q)
        return node, float(urn.q[tree.tokens[node]]) / left


class DropsTheUnlikely(find("dyspec")):
    """Draws more than it needs and feeds those that turned out likely."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        return tree.only([node for node in range(len(tree)) if tree.confidence[node] > 0.3 and tree.parents[node] == ROOT])


class JudgesAtAnotherTemperature(find("dyspec")):
    """Draws at one temperature and tells another's q."""

    def _urn(self, lm, tree, rows, parent):
        urn = Urn((guess_row(lm, tree, rows, parent).log() / 0.3).softmax(-1))
        urn.q = guess_row(lm, tree, rows, parent)
        return urn


def test_a_tree_by_odds_has_the_targets_law_and_the_wrong_ones_have_not():
    for right in (make("dyspec", nodes=4), make("dyspec", nodes=4, temperature=0.3), make("dyspec", mode="threshold", threshold=0.2)):
        assert off(right, Judged(reject)) < EXACT
    for wrong in (TakesTheBest(2), DropsTheUnlikely(3), JudgesAtAnotherTemperature(2)):
        assert off(wrong, Judged(reject)) > WRONG, type(wrong).__name__


# --- Jacobi ---

def constant(size: int = 3) -> TableModel:
    odds = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    return TableModel("abc"[:size], rule=lambda context: odds[:size])


def test_a_window_that_is_right_from_the_start_is_kept_whole():
    same = TableModel("abc", rule=lambda context: torch.eye(3, dtype=torch.float64)[context[-1]] * 50)
    write(assemble(guessing("jacobi", "greedy_match", window=4, init="repeat")), {"target": same}, [1], Limits(0, 20), Draws(0))
    assert same.forwards == 1 + 20 / 5


@pytest.mark.parametrize("init", ["random", "uniform", "repeat"])
def test_of_a_model_that_ignores_its_text_every_guess_made_anew_stands(init):
    """Then p is the q it was drawn from. Guesses of a first window and of new places may fall."""
    anew = []
    for seed in range(5):
        kept, expected = [], 0
        assembly = assemble(guessing("jacobi", "rejection", AT_ONE, window=6, init=init))
        verdicts: list = []
        assembly.decoder.verifier = recording_rejections(verdicts)
        write(assembly, {"target": constant()}, [0], Limits(seed, 40), Draws(seed))
        for tree, verdict in verdicts:
            kept = len(verdict.kept)
            assert kept >= min(expected, len(tree))
            expected = max(0, len(tree) - kept - 1)
            anew.append(expected)
    assert sum(anew) > 20


def recording_rejections(found: list):
    class Recording(find("rejection")):
        def judge(self, lm, tree, rows):
            found.append((tree, super().judge(lm, tree, rows)))
            return found[-1][1]

        def __deepcopy__(self, memo):
            return self

    return Recording()


@pytest.mark.parametrize("init", ["random", "uniform", "repeat"])
def test_drawn_windows_have_the_targets_law_over_several_rounds(init):
    models = {"target": TableModel("ab", seed=4)}
    found = law(guessing("jacobi", "rejection", AT_ONE, window=2, init=init), models, [0, 1], 4)
    assert distance(found, product_law(models["target"], [0, 1], 4)) < EXACT


class KeepsTheOldGuess(find("jacobi")):
    """A guess that was not looked at stays, and passes for drawn from its new row."""

    def _redrawn(self, lm, node, place):
        old = self._rows.tree.tokens[node + 1:]
        token, q = super()._redrawn(lm, node, place)
        return (old[0] if old else token), q


class OffByOne(find("jacobi")):
    """Tells the row of the place before."""

    def _redrawn(self, lm, node, place):
        token, _ = super()._redrawn(lm, node, place)
        return token, self._rows.chances(node - 1)


@pytest.mark.parametrize("wrong", [KeepsTheOldGuess, OffByOne])
def test_a_window_that_is_not_drawn_anew_from_its_rows_is_found_out(wrong):
    assembly = assemble(guessing("jacobi", "rejection", AT_ONE))
    assembly.decoder.drafter = wrong(3, "uniform")
    models = {"target": TableModel("ab", seed=4)}
    assert distance(law(assembly, models, [0, 1], 4), product_law(models["target"], [0, 1], 4)) > WRONG


def test_without_chance_and_with_all_chance_on_one_token_it_is_the_same_iteration():
    forwards = []
    for samplers in ([], [("top_k", {"k": 1})]):
        model = TableModel("abcde", seed=1, spread=4)
        write(assemble(guessing("jacobi", "rejection", *samplers, window=5, init="repeat")), {"target": model}, [0, 1], Limits(0, 30), Draws(0))
        forwards.append(model.forwards)
    assert forwards[0] == forwards[1] <= 31


def test_how_a_window_begins_changes_the_passes_and_not_the_text():
    texts = [ids(told(guessing("jacobi", "greedy_match", init=init))[1]) for init in ("random", "uniform", "repeat")]
    assert texts == [ids(told(GREEDY)[1])] * 3


# --- lookahead ---

lookahead = __import__(find("lookahead").__module__, fromlist=["Pool"])


def test_a_pool_keeps_the_latest_of_each_token_and_gives_the_latest_first():
    pool = lookahead.Pool(2)
    for following in [(1, 2), (3, 4), (1, 2), (5, 6)]:
        pool.add(7, following)
    assert pool.after(7) == [[5, 6], [1, 2]] and pool.after(8) == [] and len(pool) == 2
    pool.read([1, 2, 3, 4], 2)
    assert pool.after(1) == [[2, 3]] and pool.after(2) == [[3, 4]] and pool.after(3) == []


STEP = [3, 0, 4, 7, 8, 2, 1, 5, 6]  # which letter follows each


def stepping() -> TableModel:
    """Its next letter depends on the last alone."""
    return TableModel("abcdefghi", rule=lambda context: torch.eye(9, dtype=torch.float64)[STEP[context[-1]]] * 50)


class Askew(find("lookahead")):
    """Moves its window without dropping what came to stand at the end of the text."""

    def _moved(self, said):
        return [self._rows[1][:-1], *self._rows[2:], said]


def pooled(drafter, model: TableModel, length: int = 60) -> dict:
    """All n-grams that were in the pool while a text was written."""
    assembly, found = assemble(guessing("lookahead", "greedy_match")), {}
    assembly.decoder.drafter = drafter
    for lane in watch(assembly, {"target": model}, [0, 5, 2, 2, 8], Limits(0, length), Draws(0)):
        pool = getattr(lane.assembly.decoder.drafter, "_pool", None)
        found |= {(token, *following): None for token, row in (pool.known if pool else {}).items() for following in row}
    return found


@pytest.mark.parametrize("n, window", [(3, 2), (4, 5), (5, 7)])
def test_every_n_gram_is_a_way_the_model_itself_would_go(n, window):
    found = pooled(find("lookahead")(n, window, 7, prompt=False), stepping())
    assert found and all(len(gram) == n and all(STEP[a] == b for a, b in zip(gram, gram[1:])) for gram in found)


def test_a_window_that_moves_askew_is_found_out():
    found = pooled(Askew(4, 5, 7, prompt=False), stepping())
    assert not all(STEP[a] == b for gram in found for a, b in zip(gram, gram[1:]))


def test_once_the_pool_is_filled_a_pass_writes_a_whole_n_gram():
    assembly, found = assemble(guessing("lookahead", "greedy_match", n=5)), []
    assembly.decoder.verifier = recording_rejections(found)
    write(assembly, {"target": stepping()}, [0], Limits(0, 80), Draws(0))
    lengths = [len(verdict.kept) + 1 for _, verdict in found]
    assert max(lengths[:3]) < 5 <= min(lengths[-9:-1])


def test_a_window_takes_a_node_for_each_place_and_columns_hang_on_the_first_row():
    drafter = find("lookahead")(4, 3, 0)
    drafter._rows, drafter._nodes = [[1, 2], [3, 4, 5], [6, 7, 8]], {}
    tree = TokenTree()
    columns = [drafter._column(tree, column) for column in range(3)]
    assert [tuple(tree.prefix(column[-1])) for column in columns] == [(3, 6), (1, 4, 7), (1, 2, 5, 8)]
    assert [[tree.tokens[node] for node in column if node != ROOT] for column in columns] == [[3, 6], [1, 4, 7], [2, 5, 8]]
    assert len(tree) == 2 + 3 + 3, "the text's own end is in no tree"


def test_more_guesses_than_a_tree_may_have_are_refused_in_one_sentence():
    with pytest.raises(Refusal, match=r"^A round would check 420 guesses.*\.$"):
        make("lookahead", n=8, window=30, guesses=30)


# --- STAND ---

stand = __import__(find("stand").__module__, fromlist=["Thoughts"])
aded = __import__(find("aded").__module__, fromlist=["TriGrams"])


def row(*p: float) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64)


def test_what_is_remembered_is_the_mean_of_what_was_thought():
    thoughts = stand.Thoughts()
    for p, mean in [(row(0.8, 0.2), (0.8, 0.2)), (row(0.2, 0.8), (0.5, 0.5)), (row(0.2, 0.8), (0.4, 0.6))]:
        thoughts.learn([7], p, 1, 10)
        likely, _ = thoughts.after([7], 1)
        assert [likely[token] for token in (0, 1)] == pytest.approx(mean)


def test_the_longest_ending_that_is_known_is_asked_and_its_chances_sum_to_one():
    thoughts = stand.Thoughts()
    thoughts.learn([1, 2, 3], row(0.5, 0.3, 0.2), 3, 2)
    thoughts.learn([9, 3], row(0.0, 0.0, 1.0), 1, 2)
    assert thoughts.after([1, 2, 3], 3) == (pytest.approx({0: 0.625, 1: 0.375}), 3)
    assert thoughts.after([5, 2, 3], 3)[1] == 2 and thoughts.after([5, 5, 3], 3)[1] == 1 and thoughts.after([3, 5], 3) == ({}, 0)
    assert thoughts.after([1, 2, 3], 1)[0] != thoughts.after([1, 2, 3], 3)[0]


class Primed(find("stand")):
    """Believes the same after every text from the beginning."""

    beliefs = {0: 0.6, 1: 0.3, 2: 0.1}

    def _begin(self, lm):
        super()._begin(lm)
        self._thoughts.known = {(token,): (dict(self.beliefs), 1) for token in range(3)}


def test_siblings_are_drawn_from_memory_without_replacement():
    found, draws = defaultdict(float), Enumerating()
    assembly = assemble(guessing("stand", "rejection", AT_ONE))
    assembly.decoder.drafter = Primed(2)
    seen: list = []
    assembly.decoder.verifier = recording_rejections(seen)
    for _ in draws.runs():
        seen.clear()
        for lane in watch(assembly, {"target": constant()}, [0], Limits(0, 2), draws):
            if lane.generated:
                break
        found[tuple(seen[0][0].tokens)] += draws.weight
    p = Primed.beliefs
    assert distance(found, {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in permutations(range(3), 2)}) < EXACT
    assert found[0, 1] == pytest.approx(0.45)


class PassedForDrawn(Primed):
    """The likeliest tokens, said to be drawn."""

    def _children(self, lm, tree, parent, likely, width, like):
        q = torch.zeros_like(like)
        q[list(likely)] = torch.tensor(list(likely.values()), dtype=like.dtype)
        return [tree.add(token, parent, q) for token in list(likely)[:width]]


class NotScaledUp(Primed):
    """Tells what was stored, though only the likeliest were."""

    def _children(self, lm, tree, parent, likely, width, like):
        children = super()._children(lm, tree, parent, likely, width, like)
        for child in children:
            tree.q[child] = tree.q[child] * 0.7
        return children


def test_whatever_memory_holds_the_law_is_the_targets_and_wrong_ways_to_use_it_are_found_out():
    for right in (Primed(3), Primed(3, stochastic=False)):
        assert off(right, Judged(reject)) < EXACT
    for wrong in (PassedForDrawn(2), NotScaledUp(2)):
        assert off(wrong, Judged(reject)) > WRONG, type(wrong).__name__


def test_memory_that_agrees_with_the_model_has_its_first_guesses_stand():
    assembly = assemble(guessing("stand", "rejection", AT_ONE))
    found: list = []
    assembly.decoder.verifier = recording_rejections(found)
    write(assembly, {"target": constant()}, [0], Limits(0, 60), Draws(0))
    warm = [verdict for tree, verdict in found if len(tree)]
    assert len(warm) > 5 and all(verdict.kept[:1] == [0] for verdict in warm)


@pytest.mark.parametrize("name, knob", [("stand", "share"), ("aded", None), ("suffix_decoding", None)])
def test_a_second_answer_to_a_prompt_takes_fewer_passes(name, knob):
    memory = Memory()
    cold, warm = (passes(told(guessing(name, "sample_match", AT_ONE), memory, length=40)[0]) for _ in range(2))
    assert warm < 0.8 * cold
    if knob:
        memory = Memory()
        assert [passes(told(guessing(name, "sample_match", AT_ONE, **{knob: False}), memory, length=40)[0]) for _ in range(2)] == [cold, cold]
        assert len(memory) == 0


def test_memory_of_one_prompt_says_nothing_about_another():
    memory = Memory()
    recipe = guessing("stand", "sample_match", AT_ONE)
    told(recipe, memory, "The green bird")
    assert passes(told(recipe, memory, "A red fox")[0]) == passes(told(recipe, Memory(), "A red fox")[0])


# --- ADED ---

def table(known: dict) -> object:
    made = aded.TriGrams()
    made.known = known
    return made


def searching(known: dict, **knobs):
    drafter = make("aded", **knobs)
    drafter._table = table(known)
    return drafter


def test_a_tri_gram_gains_weight_with_every_use_up_to_the_cap():
    grams = table({})
    grams.reinforce([1, 2, 3, 4], 0.04, 3.0)
    assert grams.known == {(1, 2): {3: 0.04}, (2, 3): {4: 0.04}}
    for _ in range(99):
        grams.reinforce([1, 2, 3, 4], 0.04, 3.0)
    assert grams.known == {(1, 2): {3: 3.0}, (2, 3): {4: 3.0}}


def test_a_prompt_is_read_as_shares_and_what_is_known_stays():
    grams = table({(1, 2): {9: 0.5}})
    grams.read([1, 2, 3, 1, 2, 3, 1, 2, 4], 2)
    assert grams.known[1, 2] == pytest.approx({3: 2 / 3, 4: 1 / 3, 9: 0.5}) and grams.known[2, 3] == {1: 1.0}


def test_a_search_visits_its_places_as_often_as_worked_out_by_hand():
    root = searching({(1, 2): {3: 0.9, 4: 0.1}}).search((1, 2))
    assert (root.visits, [child.visits for child in root.children]) == (150, [139, 11])


def test_a_way_goes_on_below_the_tree_as_it_does_on_average():
    known = {(0, 1): {1: 0.5, 2: 1.5}, (1, 1): {0: 1.0}, (1, 2): {1: 0.2, 2: 0.6}}
    expected = 0.25 * (0.5 + 1.0) + 0.75 * (1.5 + 0.25 * 0.2 + 0.75 * 0.6)
    assert searching(known)._on_average((0, 1), 2, {}) == pytest.approx(expected)


def test_scores_change_a_search_that_weights_alone_would_lead_elsewhere():
    known = {(0, 1): {2: 1.0, 3: 1.0}, (1, 2): {4: 0.01}, (1, 3): {4: 3.0}}
    visits = [[child.visits for child in searching(known, score=score, c1=1.0).search((0, 1)).children] for score in ("weights", "one")]
    assert visits[0][1] > 1.5 * visits[0][0] and visits[1][0] == visits[1][1]


def test_ways_become_guesses_one_token_longer_than_they_were_searched():
    ring = {(a, (a + 1) % 9): {(a + 2) % 9: 1.0} for a in range(9)}
    drafter = searching(ring)
    assert max(drafter.ways(drafter.search((0, 1))), key=len) == [2, 3, 4, 5]


def test_guesses_fit_their_number_and_those_of_most_tokens_go_first():
    drafter = make("aded", nodes=8)
    assert drafter._within([[1, 2, 3], [1], [1, 2, 3, 4], [4, 5], [1]]) == [[1, 2, 3], [1], [4, 5]]


def test_a_ring_is_written_five_tokens_a_pass_once_its_table_knows_it():
    size = 9
    ring = TableModel("abcdefghi", rule=lambda context: torch.eye(size, dtype=torch.float64)[(context[-1] + 1) % size] * 50)
    write(assemble(guessing("aded", "greedy_match")), {"target": ring}, [*range(9), 0, 1], Limits(0, 40), Draws(0))
    assert ring.forwards == 1 + 40 / 5


class Swallows(find("aded")):
    """Refused guesses gain weight as if they had been written."""

    def observe(self, tree, rows, verdict):
        for node in range(len(tree)):
            self._table.reinforce([*rows.committed[-2:], *tree.prefix(node)], self.gain, self.cap)


@pytest.mark.parametrize("cls, right", [(find("aded"), True), (Swallows, False)], ids=["kept", "refused too"])
def test_the_table_gains_only_what_was_written(cls, right):
    assembly = assemble(guessing("aded", "greedy_match"))
    assembly.decoder.drafter = cls(prompt=False, gain=0.5)
    model = TableModel("abc", seed=3)
    lane = write(assembly, {"target": model}, [0, 1, 0, 2, 0, 1], Limits(0, 30), Draws(0))
    text = lane.tokens
    written = {tuple(text[i:i + 3]) for i in range(len(text) - 2)}
    grams = next(iter(lane._recalled.values())).known
    heaviest = max(weight for known in grams.values() for weight in known.values())
    assert ({(*pair_, token) for pair_, known in grams.items() for token in known} == written and heaviest <= 3.0) == right


# --- what guessing costs beside the forwards ---

class Dense(dict):
    """Twelve successors of every pair."""

    def get(self, pair_, default=None):
        return {(3 * pair_[0] + 5 * pair_[1] + i * i) % 100: 0.1 + i / 20 for i in range(12)}


class DenseTable(aded.TriGrams):
    """Knows everything and learns nothing."""

    def __init__(self):
        self.known = Dense()

    def __deepcopy__(self, memo):
        return self

    def reinforce(self, tokens, more, cap):
        pass


def full(name: str):
    """A drafter with so much in its memory that its trees are as large as they can be."""
    if name == "dyspec":
        drafter = find(name)(64)
    elif name == "aded":
        drafter = find(name)(prompt=False)
        drafter._table = DenseTable()
    elif name == "stand":
        drafter = find(name)(64)
        drafter._thoughts = stand.Thoughts()
        drafter._thoughts.known = {(token,): ({(token + i * i) % 100: 0.1 for i in range(10)}, 3) for token in range(8000)}
    else:
        drafter = find(name)(alpha=4.0, offset=8.0, min_prob=0.0, branching=True)
    return drafter


@pytest.mark.parametrize("name, least", [("stand", 60), ("aded", 30), ("suffix_decoding", 10), ("dyspec", 60)])
def test_the_guesses_of_a_round_take_two_milliseconds_at_most(name, least, monkeypatch):
    """Of this thread's own time, so that whatever else the machine does is not counted, and without the forwards that a draft model takes."""
    models, costs, cls = load(), [], find(name)
    original = cls.propose

    def timed(drafter, lm, budget):
        steps, seconds, answer = original(drafter, lm, budget), 0.0, None
        while True:
            start = thread_time()
            try:
                said = steps.send(answer)
            except StopIteration as end:
                costs.append((len(end.value), seconds + thread_time() - start))
                return end.value
            seconds += thread_time() - start
            answer = yield said

    monkeypatch.setattr(cls, "propose", timed)
    judged = ["greedy_match"] if name == "dyspec" else ["sample_match", AT_ONE]  # by chance each of its draws looks at the whole row
    assembly = assemble(guessing(name, *judged))
    assembly.decoder.drafter = full(name)
    prompt = models.target.tokens.encode("Mia had a red boat. Mia had a green boat. Mia had a red boat and a green bird. Mia had a ")
    write(assembly, {"target": models.target, "draft": models.draft}, prompt, Limits(0, 40), Draws(0))
    large = [seconds for nodes, seconds in costs[1:] if nodes >= least]
    assert large and min(large) < 0.002
