"""ParallelBench: list tasks against brute force, what can be counted against closed forms, and the study's figures."""
from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import permutations, product
from random import Random

import pytest

import playground
from playground.algorithms.diffusion import parallel_lists
from playground.algorithms.diffusion.parallel_lists import (
    NAMES,
    TASKS,
    TEXTS,
    ask,
    chance_of_right,
    question,
    questions,
    steps_of,
    text_questions,
    texts,
    total_correlation,
)
from playground.bench import parallel_limits
from playground.bench.parallel_limits import counted, decoders, document, page
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.engine.checkpoint.catalogue import LISTS, PUZZLES, TABLES
from playground.errors import Refusal
from playground.events import Figure, Note

ParallelBench = find("parallelbench")
ITEMS = ("cleo", "ann", "ben", "dan")
# tasks, prompts and what makes a list of words right, written again
JUDGED = {
    "copy": ("copy cleo ann ben dan:", lambda w: w == ITEMS),
    "reverse": ("reverse cleo ann ben dan:", lambda w: w == ITEMS[::-1]),
    "sort": ("sort cleo ann ben dan:", lambda w: w == ("ann", "ben", "cleo", "dan")),
    "shuffle": ("shuffle cleo ann ben dan:", lambda w: sorted(w) == sorted(ITEMS)),
    "insert at": ("put leo at 1 into cleo ann ben dan:", lambda w: w == ("cleo", "leo", "ann", "ben", "dan")),
    "insert anywhere": ("put leo into cleo ann ben dan:",
                        lambda w: w.count("leo") == 1 and tuple(x for x in w if x != "leo") == ITEMS),
    "remove at": ("take number 0 out of cleo ann ben dan:", lambda w: w == ("ann", "ben", "dan")),
    "remove any": ("take one out of cleo ann ben dan:",
                   lambda w: len(w) == 3 and any(w == ITEMS[:i] + ITEMS[i + 1:] for i in range(4))),
    "replace at": ("change number 3 of cleo ann ben dan to leo:", lambda w: w == ("cleo", "ann", "ben", "leo")),
    "replace any": ("change one of cleo ann ben dan to leo:",
                    lambda w: len(w) == 4 and sum(a != b for a, b in zip(w, ITEMS)) == 1 and "leo" in w),
}


def by_trying(judge, length: int) -> set[tuple[str, ...]]:
    """All right answers of this length, found by trying every list of words."""
    return {words for words in product((*ITEMS, "leo"), repeat=length) if judge(words)}


# --- the tasks ---

@pytest.mark.oracle("parallelbench")
@pytest.mark.parametrize("task", JUDGED)
def test_the_answers_of_a_task_are_all_lists_that_a_judge_accepts(task):
    prompt, judge = JUDGED[task]
    asked = question(prompt)
    assert asked.task == task and len(set(asked.answers)) == len(asked.answers)
    assert set(asked.answers) == by_trying(judge, len(asked.answers[0]))


@pytest.mark.oracle("parallelbench")
def test_latin_squares_of_three_are_the_twelve_there_are():
    symbols = ITEMS[:3]
    right = {words for words in product(symbols, repeat=9)
             if all(len(set(words[3 * i:3 * i + 3])) == len(set(words[i::3])) == 3 for i in range(3))}
    assert set(question("square of cleo ann ben:").answers) == right and len(right) == 12


def test_a_prompt_that_is_no_question_and_a_repeated_word_ask_nothing():
    for prompt in ("the", "copy ann ann:", "copy:", "take number 4 out of cleo ann ben dan:", "shuffle ann ben"):
        assert question(prompt) is None
    assert question("  Shuffle  Ann ben ") is None and question(" Shuffle  Ann BEN: ").items == ("ann", "ben")


def test_targets_score_one_and_the_input_scores_nothing_where_it_must_change():
    for task in TASKS:
        asked = ask(task, 3, Random(1))
        assert all(asked.score(answer, unchanged=True) == 1 for answer in asked.answers)
        if task.split()[0] in ("shuffle", "insert", "remove", "replace"):
            assert asked.score(asked.items) == 0
    assert question("shuffle ann ben:").score(("ann", "ann")) == 0
    assert question("copy ann ben:").score(("ann", "ben", "cleo")) == 0


def test_the_bundled_table_holds_every_question_with_its_answers():
    stored = [entry["text"] for entry in json.loads(TABLES[LISTS].read_text(encoding="utf-8"))["sentences"]]
    assert stored == texts(questions()) and {one.task for one in questions()} == set(TASKS)
    model = playground.load(LISTS).target
    p = model.denoise([*model.tokens.encode("shuffle cleo ann ben:"), *[None] * 11]).exp()[5]
    assert sorted(round(float(value), 6) for value in p if value) == [0.333333] * 3


# --- puzzles and sentences ---

CELLS = "ann eva gina leo blank leo ann eva eva gina leo ann blank ann blank blank"


def is_sudoku(grid: tuple[str, ...]) -> bool:
    rows = [grid[4 * i:4 * i + 4] for i in range(4)]
    boxes = [[grid[4 * (r + i) + c + j] for i in (0, 1) for j in (0, 1)] for r in (0, 2) for c in (0, 2)]
    return all(len(set(group)) == 4 for group in [*rows, *zip(*rows), *boxes])


@pytest.mark.oracle("parallelbench")
@pytest.mark.parametrize("hidden", [4, 7])
def test_the_answers_of_a_sudoku_are_all_words_for_its_blanks_that_solve_it(hidden):
    cells, blanks = CELLS.split(), 4
    for place in (0, 5, 11):
        if blanks < hidden:
            cells[place], blanks = "blank", blanks + 1
    places = [place for place, cell in enumerate(cells) if cell == "blank"]
    right = set()
    for words in product(("ann", "eva", "gina", "leo"), repeat=len(places)):
        filled = dict(zip(places, words))
        if is_sudoku(tuple(filled.get(place, cell) for place, cell in enumerate(cells))):
            right.add(words)
    assert set(question(f"sudoku {' '.join(cells)}:").answers) == right and len(right) >= 1
    assert question(f"sudoku {' '.join(cells)}:").score(("ann",) * len(places)) == 0


def test_an_unsolvable_sudoku_and_unknown_words_ask_nothing():
    twice = CELLS.replace("gina leo blank", "leo leo blank", 1)
    for prompt in (f"sudoku {twice}:", "sudoku ann blank:", "sentence with cow and here:", "reword ann hugs ben:"):
        assert question(prompt) is None


@pytest.mark.oracle("parallelbench")
def test_sentences_are_all_those_whose_words_agree():
    singular = {"cat": True, "cats": False, "dog": True, "dogs": False, "bird": True, "birds": False}
    verbs = {"sleeps": True, "sleep": False, "runs": True, "run": False, "sings": True, "sing": False}
    right = {(count, noun, verb, place) for count, noun, verb, place in product(
        ("one", "two"), singular, verbs, ("here", "there", "outside"))
        if (count == "one") == singular[noun] == verbs[verb] and noun.startswith("dog") and place == "there"}
    asked = question("sentence with dog and there:")
    assert set(asked.answers) == right and len(right) == 6
    assert asked.score(("two", "dogs", "runs", "there")) == 0
    assert total_correlation(asked.answers, range(4), {}) == pytest.approx(2), "number, noun and verb: two bits"


def test_paraphrases_keep_who_did_what_to_whom():
    asked = question("reword ida calls hugo:")
    assert asked.score("hugo is called by ida".split()) == asked.score("it is hugo that ida calls".split()) == 1
    assert asked.score("ida is called by hugo".split()) == asked.score("ida calls hugo".split()) == 0


def test_the_bundled_puzzles_are_the_drawn_ones_and_have_one_solution():
    stored = [entry["text"] for entry in json.loads(TABLES[PUZZLES].read_text(encoding="utf-8"))["sentences"]]
    assert stored == texts(text_questions()) and {one.task for one in text_questions()} == set(TEXTS)
    assert all(len(one.answers) == 1 for one in text_questions() if one.task == "sudoku")


def test_a_decoder_that_fills_a_sentence_at_once_is_scored_against_the_ideal():
    prompt = "sentence with dog and there:"
    fill = LaneConfig("masked_diffusion", {"steps": 1, "temperature": 1.0})
    result = playground.compare([fill], prompt, models=playground.load(PUZZLES), seed=1, max_new_tokens=24)[0]
    (table, *_), words = ParallelBench().draw([result.trace]), tuple(result.text.split())
    assert table.data["values"][0][1] == float(words in question(prompt).answers)
    assert table.data["values"][0][2] == pytest.approx(2)


# --- what can be counted ---

@pytest.mark.oracle("parallelbench")
@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_at_once_is_right_as_often_as_the_closed_forms_say(n):
    items = " ".join(NAMES[:n])
    shuffled, replaced = question(f"shuffle {items}:").answers, question(f"change one of {items} to leo:").answers
    assert chance_of_right(shuffled, [range(n)]) == pytest.approx(float(Fraction(math.factorial(n), n ** n)))
    assert chance_of_right(replaced, [range(n)]) == pytest.approx((1 - 1 / n) ** (n - 1))
    assert total_correlation(shuffled, range(n), {}) == pytest.approx(n * math.log2(n) - math.log2(math.factorial(n)))


@pytest.mark.oracle("parallelbench")
def test_counting_is_the_sum_over_all_independent_draws():
    """Shuffling three words two at a time, by going through every pair and then the last word."""
    answers, found = set(permutations("abc")), Fraction(0)
    for first, second in product("abc", repeat=2):
        left = [answer for answer in answers if answer[:2] == (first, second)]
        for last in {answer[2] for answer in left}:
            found += Fraction(1, 9) * Fraction(sum(answer[2] == last for answer in left), len(left))
    assert chance_of_right([tuple(a) for a in answers], steps_of(3, 2)) == pytest.approx(float(found)) == 2 / 3


def test_steps_share_positions_evenly_as_the_decoder_does():
    assert [list(step) for step in steps_of(9, 4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [len(step) for step in steps_of(5, 2)] == [2, 2, 1] and [len(step) for step in steps_of(5, 4)] == [3, 2]


def test_fewer_together_are_right_more_often_and_one_at_a_time_always():
    for task in TASKS:
        known = ask(task, 3, Random(2)).answers
        chances = [chance_of_right(known, steps_of(len(known[0]), k)) for k in range(1, len(known[0]) + 1)]
        assert chances[0] == pytest.approx(1) and chances == sorted(chances, reverse=True) or "latin" in task
        bits = total_correlation(known, range(len(known[0])), {})
        assert chances[-1] >= 2 ** -bits - 1e-9
        assert (bits < 1e-9) == (len(known) == 1)


@pytest.mark.refuses("parallelbench")
def test_counting_without_what_was_filled_before_contradicts_the_closed_form(monkeypatch):
    monkeypatch.setattr(parallel_lists, "consistent", lambda answers, known: list(answers))
    shuffled = question("shuffle cleo ann ben:").answers
    assert chance_of_right(shuffled, steps_of(3, 1)) == pytest.approx(6 / 27) != 1


# --- real lanes over the table ---

@pytest.mark.oracle("parallelbench")
def test_lanes_over_the_table_are_right_as_often_as_counted():
    chance, right = Random(0), 0
    lane = LaneConfig("masked_diffusion", {"steps": 1, "temperature": 1.0})
    for seed in range(60):
        right += parallel_limits.answer(ask("shuffle", 3, chance), "x", lane, seed).right
    assert abs(right / 60 - 6 / 27) < 3 * math.sqrt(6 / 27 * 21 / 27 / 60)


def test_a_threshold_slows_down_by_itself_where_words_depend_on_each_other():
    lanes = decoders(4)
    copied, shuffled = (parallel_limits.answer(ask(task, 4, Random(3)), "x", lanes["threshold 0.9"], 0)
                        for task in ("copy", "shuffle"))
    assert (copied.forwards, copied.right) == (1, True) and (shuffled.forwards, shuffled.right) == (4, True)
    greedy = [parallel_limits.answer(ask(task, 4, Random(3)), "x", lanes["all at once, most probable"], 0).right
              for task in ("sort", "shuffle", "replace any")]
    assert greedy == [True, False, False]


# --- the study ---

def lanes(prompt: str, *knobs: dict) -> list:
    configs = [LaneConfig("masked_diffusion", given) for given in knobs]
    results = playground.compare(configs, prompt, models=playground.load(LISTS), max_new_tokens=16)
    return [result.trace for result in results]


def figures(events, shape: str) -> list[dict]:
    return [event.data for event in events if isinstance(event, Figure) and event.shape == shape]


def test_the_study_counts_the_bits_and_the_chance_of_each_lane():
    traces = lanes("shuffle cleo ann ben:", {"steps": 1}, {"order": "left_to_right"})
    events = make("parallelbench").draw(traces)
    (table,) = figures(events, "matrix")
    at_once, one_by_one = table["values"]
    assert at_once == pytest.approx([3, 0, 3 * math.log2(3) - math.log2(6), 6 / 27])
    assert one_by_one[2:] == pytest.approx([0, 1])
    notes = [event.text for event in events if isinstance(event, Note)]
    assert "occurs 3 times" in notes[0] and "in 1 forward." in notes[0]
    curve = [data for data in figures(events, "scalar") if data["axis"] == "words per forward"]
    assert [data["series"]["ideal, left to right"] for data in curve] == pytest.approx([1, 2 / 3, 6 / 27])


def test_the_given_order_is_right_only_if_it_is_allowed():
    (trace,) = lanes("shuffle cleo ann ben:", {"order": "left_to_right"})  # ties: the first of the strings
    scores = [figures(make("parallelbench", unchanged=allowed).draw([trace]), "matrix")[0]["values"][0][1]
              for allowed in (False, True)]
    words = tuple(trace.events[-2].event.text.split()) if trace.events[-2].event.kind == "commit" else ()
    assert scores == [float(words != ("cleo", "ann", "ben")), 1.0]


class CountsMarginalsOnly(ParallelBench):
    """Wrong: it takes every forward for independent."""

    def _table(self, runs):
        table = super()._table(runs)
        for row in table.data["values"]:
            row[2:] = [0.0, 1.0]
        return table


@pytest.mark.refuses("parallelbench")
def test_a_study_that_sees_no_dependence_contradicts_the_closed_form():
    (table,) = figures(CountsMarginalsOnly().draw(lanes("shuffle cleo ann ben:", {"steps": 1})), "matrix")
    assert table["values"][0][3] != pytest.approx(6 / 27)


def test_other_lanes_are_refused():
    results = playground.compare([LaneConfig("masked_diffusion")], "the", models=playground.load("oracle"))
    with pytest.raises(Refusal, match="oracle-lists"):
        make("parallelbench").draw([result.trace for result in results])


def test_the_page_has_a_row_for_every_task():
    assert [row[0] for row in counted()[1:]] == list(TASKS)
    found = [parallel_limits.answer(ask("copy", 4, Random(0)), lane, config, 0) for lane, config in decoders(4).items()]
    text = page(found, {"settings": {"seed": 0}})
    assert document(found, {})["totals"][0] == {
        "task": "copy", "decoder": "1 from left to right", "answers": 1, "right": 1, "words": 4, "forwards": 4}
    assert "| copy | 1.00 |" in text and "| shuffle | 3.42 |" in text.replace("3.415", "3.42")
