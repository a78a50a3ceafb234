"""The small world that the pocket models are trained on: every answer is known, scored, and on one side of the
split.
"""
import itertools
import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from playground.errors import Refusal
from playground.pocket.__main__ import parse
from playground.pocket.__main__ import show as show_command
from playground.questions.world import (
    TASKS,
    arithmetic,
    chat,
    context_qa,
    edit,
    facts,
    is_held_out,
    lists,
    needle,
    programs,
    recall,
    records,
    revise,
    score,
    show,
    stories,
)
from playground.questions.world.attributes import DOES, QUESTIONS, STATEMENTS, VALUES
from playground.questions.world.wording import Wordings, count, expand
from support.pocket_items import asking, some

EACH_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
GRADED = [(task, grade) for task in TASKS.values() for grade in task.GRADES]
EACH_GRADE = pytest.mark.parametrize("task, grade", GRADED, ids=[f"{task.TASK} {grade}" for task, grade in GRADED])


# every task

@EACH_TASK
def test_the_same_seed_gives_the_same_items(task):
    assert some(task) == some(task)
    assert some(task) != some(task, seed=4)


@EACH_GRADE
def test_the_known_answer_scores_one_and_a_corrupted_one_less(task, grade):
    for item in some(task, 4, grade=grade):
        assert item.answer.strip() and item.prompt.strip()
        assert score(item, item.answer) == score(item, f" {item.answer}\n") == 1
        assert score(item, corrupted(item)) < 1
        assert score(item, "") < 1


def corrupted(item):
    """The answer of a poor model: its last digit, word or letter is wrong."""
    inner = item.meta.get("last", item)
    if inner.task == "programs":
        return item.answer.rpartition("return")[0] + "return 'nothing of the kind'"
    if item.answer[-1].isdigit():
        return item.answer[:-1] + str((int(item.answer[-1]) + 1) % 10)
    return item.answer[: len(item.answer) // 2]


@EACH_GRADE
def test_an_item_carries_its_task_its_grade_and_its_kind(task, grade):
    drills = arithmetic.GRADES[:3]
    for item in some(task, 10, grade=grade):
        assert item.task == task.TASK and item.meta["kind"]
        assert item.grade == grade or (item.task == "arithmetic" and item.grade in drills)


@EACH_TASK
def test_held_out_items_are_never_trained_on(task):
    trained, kept = some(task, 300), some(task, 60, held_out=True)
    assert not {whole(item) for item in trained} & {whole(item) for item in kept}
    if task is not facts:                   # facts are memorised; only their wordings are held out
        assert not {item.key or item.prompt for item in trained} & {item.key or item.prompt for item in kept}


def whole(item):
    return item.before, item.prompt


def test_the_split_hashes_passages_in_the_form_the_bundled_models_were_trained_with():
    statement = context_qa.Statement("Ann", "town", "Rome")
    assert str(statement) == "Told(subject='Ann', attribute='town', value='Rome')"


@pytest.mark.slow
def test_the_question_of_a_held_out_chat_is_held_out_in_its_own_task():
    trained = [item.meta["last"] for item in some(chat, 600, grade=1) if "last" in item.meta]
    kept = [item.meta["last"] for item in some(chat, 200, held_out=True, grade=1) if "last" in item.meta]
    assert trained and kept
    for item in trained + kept:
        if item.task != "facts":
            assert is_held_out(f"{item.task}:{item.key or item.prompt}") == (item in kept)


def test_a_hash_keeps_about_one_key_in_sixteen():
    assert 40 < sum(is_held_out(f"question {i}") for i in range(1000)) < 90


@pytest.mark.slow
@EACH_TASK
def test_half_of_the_held_out_items_use_words_that_training_never_shows(task):
    assert not any(item.kept_words for item in some(task, 30))
    kept = sum(item.kept_words for item in some(task, 100, held_out=True))
    assert kept == 100 if task is facts else 30 < kept < 70


# wordings

def test_choices_nest_and_may_be_left_out():
    ways = {expand(random.Random(seed), "[a|b [c|d]]x[| y]") for seed in range(200)}
    assert ways == {"ax", "ax y", "b cx", "b cx y", "b dx", "b dx y"} and count("[a|b [c|d]]x[| y]") == 6


@pytest.mark.parametrize("pattern", ["a]", "[a|b", "[a|[b]"])
def test_a_bracket_without_its_partner_is_refused(pattern):
    with pytest.raises(ValueError, match="bracket"):
        count(pattern)


def test_a_kept_line_is_only_drawn_for_the_evaluation():
    wordings, rng = Wordings("one\ntwo\n~ three"), random.Random(1)
    assert {wordings.draw(rng) for _ in range(50)} == {"one", "two"}
    assert {wordings.draw(rng, kept=True) for _ in range(50)} == {"three"}


@pytest.mark.parametrize(
    "wordings",
    [
        *facts.QUESTIONS.values(),
        *QUESTIONS.values(),
        *lists.ASK.values(),
        context_qa.FRAMES,
        records.FRAMES,
        programs.FRAMES,
        edit.FRAMES,
        edit.CHANGE,
        arithmetic.ASK,
        arithmetic.DRILL,
        needle.ASK,
        needle.HIDE,
        stories.OF_NAME,
        stories.NAMELESS,
    ],
)
def test_every_kind_of_question_has_eleven_taught_wordings_and_some_kept_ones(wordings):
    assert len(wordings) >= 11 and len(wordings) + sum(map(count, wordings.kept)) >= 12
    assert wordings.kept and not set(wordings.kept) & set(wordings.taught)


def test_every_task_can_be_put_in_hundreds_of_ways():
    assert len(facts.LEADS) * min(map(len, facts.QUESTIONS.values())) > 300
    assert len(context_qa.FRAMES) * min(map(len, QUESTIONS.values())) > 1000
    assert len(arithmetic.START) * len(arithmetic.GAIN) * len(arithmetic.ASK) > 10_000
    assert len(records.FRAMES) * len(set(records.NOTATIONS)) > 300
    assert len(edit.FRAMES) * len(edit.CHANGE) > 300
    assert sum(map(len, lists.ASK.values())) > 300
    assert len(needle.HIDE) * len(needle.ASK) > 1000
    assert len(stories.OF_NAME) + len(stories.NAMELESS) > 300
    assert sum(len(chat.INTRODUCE[what]) * len(chat.ASK_BACK[what]) for what in chat.TOLD) > 100


# --- facts, passages and arithmetic ---

# facts and context

def test_the_country_is_what_the_bundled_models_learned_by_heart():
    assert facts.COUNTRY == facts.country() and len(facts.COUNTRY) == 75
    assert facts.COUNTRY["Ritheak"]["trade"] == "clerk" and facts.COUNTRY["Nuneand"]["pet"] == "dog"


def test_facts_keep_two_wordings_of_every_form_for_the_test():
    for wordings in facts.QUESTIONS.values():
        assert len(wordings.kept) == 2
    trained = {item.prompt for item in some(facts, 3000)}
    assert not any("Do you know" in prompt or "Name the" in prompt for prompt in trained)
    passages = {item.prompt for item in some(context_qa, 1000)}
    assert any("Name the" in prompt for prompt in passages)


def test_every_attribute_can_be_stated_asked_and_asked_backwards():
    assert set(QUESTIONS) == set(STATEMENTS) == set(DOES) == set(VALUES)
    for attribute, wordings in STATEMENTS.items():
        assert all("{x}" in line and "{v}" in line for line in wordings.taught), attribute
        assert all("{x}" in line for line in QUESTIONS[attribute].taught + QUESTIONS[attribute].kept), attribute
        assert all("{v}" in line for line in DOES[attribute].taught), attribute


@pytest.mark.parametrize("grade", context_qa.GRADES)
def test_the_answer_to_a_passage_is_a_span_of_it(grade):
    for item in some(context_qa, 100, grade=grade):
        assert re.search(rf"\b{re.escape(item.answer)}\b", item.meta["passage"])


@pytest.mark.parametrize("grade", [3, 4])
def test_at_the_harder_grades_the_attribute_alone_does_not_determine_the_answer(grade):
    rng = random.Random(1)
    for statements in (context_qa.about_strangers(rng, grade) for _ in range(100)):
        for attribute in {t.attribute for t in statements}:
            values = [t.value for t in statements if t.attribute == attribute]
            assert len(values) == len({t.subject for t in statements}) >= 2 and len(set(values)) >= 2


def test_at_the_easier_grades_no_two_subjects_share_an_attribute():
    rng = random.Random(1)
    for statements in (context_qa.about_strangers(rng, grade) for grade in (1, 2) for _ in range(100)):
        assert max(Counter(t.attribute for t in statements).values()) == 1


def test_few_passages_contradict_memory_and_never_about_the_kept_attributes():
    items = some(context_qa, 3000)
    against = [item for item in items if item.meta["kind"] == "contradicts"]
    assert 0.035 < len(against) / len(items) < 0.065
    assert not any(item.meta["attribute"] in context_qa.NEVER_CONTRADICTED for item in against)
    assert all(item.meta["memory"] not in (None, item.answer) for item in against)


def test_some_passages_agree_with_memory_also_about_the_kept_attributes():
    agreeing = [item for item in some(context_qa, 3000) if item.meta["kind"] == "agrees"]
    assert 0.08 < len(agreeing) / 3000 < 0.12 and all(item.meta["memory"] == item.answer for item in agreeing)
    assert {item.meta["attribute"] for item in agreeing} >= set(context_qa.NEVER_CONTRADICTED)


def test_a_contradicting_passage_says_otherwise_than_memory():
    rng = random.Random(2)
    for item in (context_qa.contradicting(rng) for _ in range(50)):
        assert item.meta["memory"] and item.meta["memory"] != item.answer
        assert item.meta["attribute"] in context_qa.NEVER_CONTRADICTED


def test_a_backwards_question_has_one_answer():
    asked = [
        item for item in some(context_qa, 600, grade=3) if item.answer in context_qa.STRANGERS + context_qa.FAR_TOWNS
    ]
    assert any(re.search(r"Who |Which (town|place|person)", item.prompt) for item in asked)


# arithmetic

@pytest.mark.parametrize("grade", arithmetic.GRADES)
def test_every_step_of_a_worked_problem_is_true_and_leans_on_what_is_known(grade):
    rng = random.Random(grade)
    for item in (arithmetic.problem(rng, grade) for _ in range(100)):
        steps = re.findall(r"^(\d+) ([-+*/]) (\d+) = (\d+)$", item.answer, re.MULTILINE)
        assert len(steps) == grade and item.answer.endswith(f"#### {steps[-1][3]}")
        known = set(re.findall(r"\d+", item.prompt))
        for x, op, y, z in steps:
            assert calculated(x, op, y) == int(z) and {x, y} <= known
            known.add(z)


def calculated(x, op, y):
    whole, rest = divmod(int(x), int(y)) if op == "/" else (0, 0)
    assert rest == 0
    return {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y), "/": whole}[op]


def test_a_harder_problem_contains_numbers_that_do_not_matter():
    rng = random.Random(1)
    for item in (arithmetic.problem(rng, 5) for _ in range(50)):
        assert any(beside_the_point(sentence) for sentence in re.split(r"(?<=[.?]) ", item.prompt))


def beside_the_point(sentence):
    """Whether a sentence only states ages, distances, times, heights, or visible objects."""
    known = (
        "years old",
        "miles to",
        "hours",
        "feet high",
        "steps",
        "to the feast",
        "the roof",
        "the door",
        "look on",
        "the road",
    )
    return any(words in sentence for words in known)


def test_recall_asks_for_all_in_its_passage_and_for_nothing_that_is_held_out():
    rng = random.Random(4)
    for item in (recall.generate(rng) for _ in range(200)):
        (first, _), *_ = [*item.before, (item.prompt, item.answer)]
        assert all(answer in first for _, answer in [*item.before, (item.prompt, item.answer)])
    asked = [len(recall.generate(rng).before) + 1 for _ in range(200)]
    assert sum(asked) / len(asked) > 4, "one reading, several answers"


@pytest.mark.parametrize("make", [recall.strangers, recall.keys])
def test_recall_leaves_out_what_the_evaluation_may_ask(make, monkeypatch):
    monkeypatch.setattr(recall, "is_held_out", lambda key: True)
    assert make(asking(1)) == []


def test_revise_finds_the_part_that_it_asks_for():
    text = edit.Text(("A dog ran.", "A cat slept.", "A cow ate."))
    for ask, shift in ((revise._found, 0), (revise._behind, 1)):
        for seed in range(30):
            question, answer, after = ask(asking(seed), text)
            place = next((i for i, word in enumerate(edit.ORDINALS) if word in question), len(text.parts) - 1)
            assert answer == text.parts[place + shift] and after is text


def test_revise_edits_what_the_turn_before_left(monkeypatch):
    monkeypatch.setattr(revise, "ASKED", (revise._edited,) * 3)
    monkeypatch.setattr(edit, "EDITS", dict(append=edit.EDITS["append"]))
    text = edit.Text(("A dog ran.", "A cat slept."))
    turns = next(filter(None, (revise.conversation(asking(seed), text, 4) for seed in range(9))))
    shown = str(text)
    for prompt, answer in turns:
        assert answer.startswith(shown) and prompt.endswith((answer.removeprefix(shown).strip(), str(text)))
        shown = answer


def test_revise_leaves_out_the_edits_that_the_evaluation_may_ask(monkeypatch):
    monkeypatch.setattr(revise, "is_held_out", lambda key: True)
    text = edit.Text(("A dog ran.", "A cat slept.", "A cow ate."))
    assert revise.conversation(asking(1), text, 4) == []


def test_drills_are_three_in_ten_and_right():
    items = some(arithmetic, 1000)
    drills = [item for item in items if item.meta["kind"] in ("drill", "sheet")]
    assert 0.25 < len(drills) / len(items) < 0.35
    for item in drills:
        for x, op, y, z in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", item.answer):
            assert calculated(x, op, y) == int(z)


# --- stories ---

# stories

def test_there_are_at_least_three_hundred_plots_and_each_has_a_title_of_its_own():
    assert len(stories.PLOTS) >= 300
    assert (
        len({plot.about for plot in stories.PLOTS}) == len({plot.text for plot in stories.PLOTS}) == len(stories.PLOTS)
    )


def test_no_plot_is_another_with_names_changed():
    """With slots masked, no two plots share more than a twentieth of the shorter one's 4-grams."""
    runs = [skeleton(plot) for plot in stories.PLOTS]
    shared = [len(a & b) / min(len(a), len(b)) for a, b in itertools.combinations(runs, 2)]
    assert max(shared) < 0.05


def test_a_plot_with_names_changed_would_be_found():
    plot = stories.PLOTS[0]
    other = replace(plot, text=plot.text.replace("{n}", "{m}").replace("{day}", "{town}"))
    a, b = skeleton(plot), skeleton(other)
    assert len(a & b) / min(len(a), len(b)) > 0.9


def skeleton(plot, n=4):
    words = re.findall(r"\w+", re.sub(r"{\w+}", "_", plot.text).lower())
    return {tuple(words[i:i + n]) for i in range(len(words) - n + 1)}


def test_every_plot_has_several_ways_to_go_on_and_a_child_s_length():
    rng = random.Random(1)
    for plot in stories.PLOTS:
        assert count(plot.text) >= 2, plot.about
        words = stories.cast(rng) | {slot: values[0] for slot, values in plot.own.items()}
        assert 60 <= len(expand(rng, plot.text).format(**words).split()) <= 150, plot.about


def test_most_plots_go_on_in_four_ways_or_more():
    assert sum(count(plot.text) >= 4 for plot in stories.PLOTS) > 0.95 * len(stories.PLOTS)


def test_every_telling_passes_its_own_check_and_leaves_no_slot_open():
    for item in some(stories, 600):
        assert score(item, item.answer) == 1, item.meta["plot"]
        assert not set("{}[]|") & set(item.answer + item.prompt)


def test_a_story_that_loops_or_breaks_off_or_forgets_its_hero_loses_points():
    item = next(item for item in some(stories) if item.meta["hero"])
    assert score(item, item.answer + " " + item.answer) < 1
    assert score(item, item.answer.rstrip('."!?')[:-1]) < 1
    assert score(item, item.answer.replace(item.meta["hero"], "Xx")) < 1


def test_a_wish_that_leaves_the_hero_open_asks_for_none():
    free = [item for item in some(stories, 300) if not item.meta["hero"]]
    assert 10 < len(free) < 60 and all(score(item, item.answer) == 1 for item in free)


# --- chats ---

# chat

@pytest.mark.parametrize("grade", chat.GRADES)
def test_a_chat_has_as_many_turns_as_its_grade_says(grade):
    least, most = chat.BEFORE[grade]
    assert all(least <= len(item.before) <= most for item in some(chat, 60, grade=grade))


def test_what_is_recalled_was_said_in_the_first_turn():
    for item in some(chat, 200):
        if item.meta["kind"] == "recall":
            assert item.answer in item.before[0][0]


def test_running_sums_run():
    item = next(item for item in some(chat, 100, grade=3) if item.meta["kind"] == "sum")
    said = [int(answer) for _, answer in item.before] + [int(item.answer)]
    for (prompt, _), before, after in zip([*item.before[1:], (item.prompt, "")], said, said[1:]):
        by = int(re.search(r"\d+", prompt)[0])
        assert after in (before + by, before - by, before * by)


# --- the command ---

# the command

def test_the_command_prints_items_that_json_can_read(capsys):
    show_command(parse("world --task records --n 3 --grade 2 --seed 1 --json".split()))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["answer"] for row in printed] == [item.answer for item in show.items("records", 3, 1, grade=2)]
    assert all(row["grade"] == 2 and row["task"] == "records" for row in printed)


def test_the_command_prints_conversations_to_read(capsys):
    show_command(parse("world --task chat --n 1 --grade 1".split()))
    printed = capsys.readouterr().out
    assert printed.startswith("--- chat") and printed.count("Q: ") == printed.count("A: ") == 2


@pytest.mark.parametrize(
    "task, count, grade, sentence",
    [
        ("riddles", 1, None, "no task 'riddles'"),
        ("lists", 1, 9, "lists has the grades 1, 2, 3, 4"),
        ("lists", 0, None, "at least one"),
    ],
)
def test_what_there_is_none_of_is_refused_in_a_sentence(task, count, grade, sentence):
    with pytest.raises(Refusal, match=sentence):
        show.items(task, count, grade=grade)
