"""Records, edits, programs and lists of the small world: each has an answer that can be checked."""
import json
import random
import re
from collections import Counter
from dataclasses import replace

import jsonschema
import pytest

from playground.questions.world import edit, lists, needle, program_steps, programs, record_kinds, records, score
from support.pocket_items import asking, some

# --- records ---

# records

@pytest.mark.parametrize("grade", records.GRADES)
def test_records_follow_their_schema_and_the_prompt_shows_it(grade):
    for item in some(records, 60, grade=grade):
        jsonschema.validate(json.loads(item.answer), item.meta["schema"])
        assert item.meta["shown"] in item.prompt
        assert item.meta["shown"] in {shown(item.meta["schema"]) for shown in records.NOTATIONS}


def test_what_a_record_says_is_reported_in_its_sentence():
    for item in some(records, 200):
        for word in re.findall(r'"(\w+)"(?!:)|(\d+)', item.answer):
            assert (word[0] or word[1]) in item.meta["sentence"], item


def test_a_record_with_a_missing_field_breaks_its_schema():
    item = some(records, 1)[0]
    value = json.loads(item.answer)
    value.popitem()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, item.meta["schema"])


def test_the_grades_of_records_bring_lists_objects_and_lists_of_objects():
    schemas = {
        grade: [json.dumps(item.meta["schema"]) for item in some(records, 60, grade=grade)] for grade in records.GRADES
    }
    assert not any('"array"' in schema or schema.count('"object"') > 1 for schema in schemas[1])
    assert all('"array"' in schema and schema.count('"object"') == 1 for schema in schemas[2])
    assert all(schema.count('"object"') == 2 for schema in schemas[3])
    assert all('"items": {"type": "object"' in schema for schema in schemas[4])


def test_arrays_booleans_numbers_enums_and_null_are_frequent():
    answers = [item.answer for item in some(records, 400)]
    for mark, least in {"[": 160, "true": 80, "false": 80, "null": 15}.items():
        assert sum(mark in answer for answer in answers) > least, mark
    assert sum(bool(re.search(r"\d\.\d", answer)) for answer in answers) > 40
    assert sum("enum" in json.dumps(item.meta["schema"]) for item in some(records, 400)) > 100


def test_true_is_not_one_in_a_record():
    item = replace(some(records, 1)[0], answer='{"open": true, "count": 1}')
    assert score(item, '{"count": 1, "open": true}') == 1
    assert score(item, '{"open": 1, "count": 1}') == 0.25


def test_the_notations_show_nested_schemas():
    schema = record_kinds.strict({"name": {"type": "string"}, "list": {"type": "array", "items": {"type": "integer"}}})
    assert records.notation(schema) == "{name: text, list: [number]}"
    assert records.in_words(schema) == "name (text), list (list of number)"


# --- edits ---

# edit

@pytest.mark.parametrize("grade", edit.GRADES)
def test_an_edit_changes_the_text_but_little(grade):
    for item in some(edit, 60, grade=grade):
        before, after = item.meta["before"].split(), item.answer.split()
        # a record of two entries may lose one
        assert before != after and len(set(before) & set(after)) >= 0.2 * len(set(before))
        assert len(item.meta["edits"]) == edit.INSTRUCTIONS[grade] and item.meta["before"] in item.prompt


@pytest.mark.parametrize(
    "order, wanted",
    [
        ("change", "A dog ran. Tom saw a dog. End."),
        ("delete", "Tom saw a cat. End."),
        ("turn", "End. Tom saw a cat. A cat ran."),
        ("move", "Tom saw a cat. End. A cat ran."),
    ],
)
def test_an_edit_follows_its_instruction(order, wanted):
    text = edit.Text(("A cat ran.", "Tom saw a cat.", "End."))
    made = {str(edit.EDITS[order](asking(seed), text)[1]) for seed in range(300)}
    assert wanted in made


def test_only_whole_words_are_replaced():
    assert str(edit.Text(("A cat in a catalogue.",)).replaced("cat", "dog")) == "A dog in a catalogue."


# --- programs ---

# programs

@pytest.mark.parametrize("code", [
    "import os\ndef work(items): return 1", "def work(items):\n    while True: pass",
    "def work(items): return open('x', 'w')", "def work(items): return ().__class__", "def work(",
])
def test_a_program_may_not_import_loop_forever_or_touch_files(code):
    assert programs.run(code, "work") is None
    assert programs.run("def work(items): return 1", "work") == [1] * len(programs.INPUTS["numbers"])


EACH_STEP = [step for steps in program_steps.STEPS.values() for step in dict.fromkeys(steps)]


@pytest.mark.parametrize("step", EACH_STEP, ids=lambda step: step.says)
def test_a_step_makes_what_it_says_it_makes(step):
    for value in programs.INPUTS[step.takes]:
        space = {"it": list(value) if step.takes != "text" else value}
        exec(step.code.replace("{k}", "3"), space)
        made = space["it"]
        wanted = dict(numbers=int, words=str).get(step.makes)
        assert isinstance(made, str) if step.makes == "text" else all(isinstance(x, wanted) for x in made)


def test_there_are_hundreds_of_different_programs_apart_from_their_numbers():
    shapes = {re.sub(r"\d+", "k", item.meta["body"]) for item in some(programs, 600)}
    assert len(shapes) > 450


def test_the_tests_of_a_program_can_distinguish_it_from_another():
    assert all(len(set(map(str, item.meta["results"]))) > 1 for item in some(programs, 100))


def test_a_program_with_other_numbers_or_other_steps_fails_its_tests():
    item = next(item for item in some(programs, 300, grade=1) if "return sum(items)\n" in item.answer + "\n")
    assert score(item, item.answer.replace("return sum(items)", "return sum(items) + 1")) == 0
    assert (
        score(
            item,
            item.answer.replace("return sum(items)", "total = 0\n    for x in items: total += x\n    return total"),
        )
        == 1
    )


@pytest.mark.parametrize(
    "grade, wanted", [(3, r"return 0|return -1|return None|return \[\]|items"), (4, r"\ndef \w+\(items\)")]
)
def test_harder_programs_have_cases_and_helpers(grade, wanted):
    answers = [item.answer for item in some(programs, 30, grade=grade)]
    assert all(answer.count("def ") == (2 if grade == 4 else 1) for answer in answers)
    assert any(re.search(wanted, answer) for answer in answers)


def test_what_a_program_returns_for_nothing_is_reported_in_its_words():
    for seed in range(40):
        case = programs._case(random.Random(seed), "items")
        assert case.code.rsplit(maxsplit=1)[1] in case.says.split()


# --- needles and lists ---

# needle and lists

@pytest.mark.parametrize("grade", needle.GRADES)
def test_a_needle_occurs_once_in_a_passage_of_its_length(grade):
    for item in some(needle, 10, grade=grade):
        assert item.meta["sentences"] == needle.LENGTHS[grade - 1]
        assert 0 <= item.meta["distance"] <= item.meta["sentences"]
        assert item.answer in item.prompt


def test_a_list_answer_is_what_the_operation_gives():
    oracle = dict(
        copy=lambda x: x,
        reverse=lambda x: x[::-1],
        first=lambda x: x[:1],
        last=lambda x: x[-1:],
        count=lambda x: [str(len(x))],
        unique=lambda x: sorted(set(x), key=x.index),
        smallest=lambda x: [min(x, key=int)],
        largest=lambda x: [max(x, key=int)],
        downwards=lambda x: sorted(x, key=int, reverse=True),
        sort=lambda x: sorted(x, key=lambda y: int(y) if y.isdigit() else y),
    )
    for item in some(lists, 400):
        if item.meta["kind"] in oracle:
            given = re.search(r"\[(.*)\]", item.key)[1].replace("'", "").split(", ")
            assert ", ".join(given) in item.prompt
            assert ", ".join(oracle[item.meta["kind"]](given)) == item.answer, item


def test_sorting_starts_small_and_is_asked_for_often():
    easy = [item for item in some(lists, 400, grade=1) if item.meta["kind"] == "sort"]
    assert len(easy) > 40 and max(item.meta["length"] for item in easy) == 3
    kinds = Counter(item.meta["kind"] for item in some(lists, 1000))
    assert sum(kinds[kind] for kind in ("sort", "downwards", "smallest", "largest")) > 350


def test_a_shuffled_list_may_come_in_any_order():
    shuffled = (item for item in some(lists, 200) if item.meta["kind"] == "shuffle")
    item = next(item for item in shuffled if item.meta["length"] > 2)
    words = item.answer.split(", ")
    assert score(item, ", ".join(words[::-1])) == 1 and score(item, ", ".join(words[1:])) == 0
