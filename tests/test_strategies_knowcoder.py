"""The answers that KnowCoder's mask allows, against a check by Python's own parser."""
from __future__ import annotations

import ast
import json
from itertools import product

import pytest
from pairs import pair

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Note
from playground.grammar.matcher import GrammarEngine
from support.texts_of_masks import TOKENIZER, engine  # noqa: F401

KnowCoder = find("knowcoder")
SCHEMA = '''
class Entity:
    def __init__(self, name: str): ...
class Person(Entity):
    """Description: a human being."""
class Poet(Person): ...
class Place(Entity): ...
class Relation:
    pass
class LivesIn(Relation):
    def __init__(self, head: Person, tail: Place): ...
'''
SENTENCE = 'The poet Ann-Marie said "no" in Ulm.'
WORDS = ["The", "poet", "Ann-Marie", "said", "no", "in", "Ulm"]


def legal(text: str) -> bool:
    """By Python's parser and the rules of the schema, written out: names, arguments and words."""
    kinds = {"Person": ["Person", "Poet"], "Place": ["Place"]}
    try:
        (statement,) = ast.parse(text).body
        items = statement.value.elts
    except (SyntaxError, ValueError, AttributeError):
        return False
    spans = {SENTENCE[SENTENCE.index(WORDS[a]):SENTENCE.index(WORDS[b]) + len(WORDS[b])]
             for a in range(7) for b in range(a, 7)}

    def entity(node, names) -> bool:
        return (isinstance(node, ast.Call) and node.func.id in names and len(node.args) == 1
                and isinstance(node.args[0], ast.Constant) and node.args[0].value in spans)

    def item(node) -> bool:
        if not isinstance(node, ast.Call) or node.keywords:
            return False
        if node.func.id == "LivesIn":
            return len(node.args) == 2 and all(map(entity, node.args, kinds.values()))
        return entity(node, ["Person", "Poet", "Place"])

    return all(map(item, items)) and text == f"results = [{', '.join(map(ast.unparse, items))}]".replace("'", '"')


SOUND = {"knowcoder": [({"schema": SCHEMA, "sentence": "poet Ann-Marie", "most": 1}, legal)]}
ITEMS = ['Person("Ann-Marie")', 'Poet("The poet")', 'Place("Ulm")', 'Place("Ul")', 'Entity("Ulm")', 'Town("Ulm")',
         'LivesIn(Poet("Ann-Marie"), Place("Ulm"))', 'LivesIn(Place("Ulm"), Place("Ulm"))', 'LivesIn(Person("no"))',
         'Person("in Ulm.")', 'Person("Bremen")', 'Person("The poet", "Ulm")', "Person()", "Relation()"]


def check(cls: type[KnowCoder], engine: GrammarEngine) -> None:  # noqa: F811
    """A text is complete in the grammar if and only if the checker by hand accepts it."""
    compiled = engine.compile(*cls(schema=SCHEMA, sentence=SENTENCE).grammar())
    texts = ["results = []", "results = [", "[]", "results = [,]"]
    texts += [f"results = [{', '.join(items)}]" for count in (1, 2) for items in product(ITEMS[:8], repeat=count)]
    texts += [f"results = [{item}]" for item in ITEMS]
    accepted = 0
    for text in texts:
        matcher = compiled.matcher()
        tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        fits = all(matcher.advance(token) for token in tokens) and matcher.accepting
        assert fits == legal(text), text
        accepted += fits
    assert accepted > 12


class AnyString(KnowCoder):
    """Wrong: strings need not be in the sentence."""

    def _strings(self):
        from strategies.constrained.knowcoder import FREE
        return FREE


class EveryClass(KnowCoder):
    """Wrong: a class without a base is an item too."""

    def grammar(self):
        kind, source = super().grammar()
        return kind, source.replace("item: c1", "item: c0 | c1")


@pytest.mark.oracle("knowcoder")
def test_the_grammar_accepts_what_pythons_parser_and_the_schema_do(engine):  # noqa: F811
    check(KnowCoder, engine)


@pytest.mark.refuses("knowcoder")
@pytest.mark.parametrize("wrong", [AnyString, EveryClass])
def test_free_strings_or_base_classes_fail(engine, wrong):  # noqa: F811
    with pytest.raises(AssertionError):
        check(wrong, engine)


@pytest.mark.strategy("knowcoder")
def test_words_that_are_in_no_sentence_are_free_without_one(engine):  # noqa: F811
    compiled = engine.compile(*KnowCoder(schema=SCHEMA).grammar())
    for text, right in [('results = [Place("a \\" b")]', True), ('results = [Place("a"b")]', False)]:
        matcher = compiled.matcher()
        tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert (all(matcher.advance(token) for token in tokens) and matcher.accepting) == right


@pytest.mark.strategy("knowcoder")
@pytest.mark.parametrize("sentence", ['Say "no" \\ to Zürich', "One\ntwo", "a\tb's c"])
def test_gold_survives_text_and_parser(engine, sentence):  # noqa: F811
    from strategies.constrained.knowcoder import items_in, spans_of
    spans = spans_of(sentence)
    assert len(spans) > 2 and all(span in sentence for span in spans)
    text = "results = [" + ", ".join(f"Place({json.dumps(span, ensure_ascii=False)})" for span in spans) + "]"
    matcher = engine.compile(*KnowCoder(schema=SCHEMA, sentence=sentence).grammar()).matcher()
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert all(map(matcher.advance, tokens)) and matcher.accepting
    assert [item.args[0].value for item in items_in(text)] == spans
    assert len(items_in(text[:-8])) == len(spans) - 1, "an item that is cut off counts"


@pytest.mark.strategy("knowcoder")
def test_a_list_has_at_most_as_many_objects_as_asked(engine):  # noqa: F811
    compiled = engine.compile(*KnowCoder(schema=SCHEMA, sentence=SENTENCE, most=2).grammar())
    for count in (0, 1, 2, 3):
        matcher, text = compiled.matcher(), f"results = [{', '.join(ITEMS[:1] * count)}]"
        tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert (all(map(matcher.advance, tokens)) and matcher.accepting) == (count < 3)


@pytest.mark.strategy("knowcoder")
def test_a_repeated_right_answer_lowers_the_precision():
    from strategies.constrained.knowcoder import scored
    assert scored(["a", "b"], ["b", "a"]) == (1, 1, 1) and scored([], []) == (0, 0, 1)
    assert scored(["a", "a", "c"], ["a", "b"]) == (1 / 3, 1 / 2, 0.4) and scored([], ["a"]) == (0, 0, 0)


@pytest.mark.strategy("knowcoder")
@pytest.mark.parametrize("knobs, message", [
    ({"schema": "class"}, "not valid Python"),
    ({"schema": ""}, "between 1 and 20"),
    ({"schema": "class A: ..."}, "between 1 and 20"),
    ({"schema": "class A(B): ..."}, "base class 'B' of 'A'"),
    ({"schema": "class A: ...\nclass B(A):\n  def __init__(self, x: int): ..."}, "has the type 'int'"),
    ({"sentence": "a " * 65}, "has 65 words"),
])
def test_what_cannot_be_used_is_refused_in_a_sentence(knobs, message):
    with pytest.raises(Refusal, match=message) as found:
        KnowCoder(**knobs).grammar()
    assert found.value.about in knobs


@pytest.mark.strategy("knowcoder")
def test_a_schema_is_never_run(tmp_path):
    trap = tmp_path / "ran"
    KnowCoder(schema=f"open({str(trap)!r}, 'w')\nclass A: ...\nclass B(A): x = open({str(trap)!r}, 'w')").grammar()
    assert not trap.exists()


@pytest.mark.strategy("knowcoder")
def test_a_lane_says_what_it_found():
    knobs = {"schema": SCHEMA, "sentence": SENTENCE}
    config = LaneConfig("greedy", {}, [("knowcoder", knobs), ("temperature", {"t": 2.0})], seed=1)
    session = prepare(pair(), [config], Prompt("x"), Limits(0, 100))
    events = [event for lane in session for event in [lane.event]]
    notes = [event.text for event in events if isinstance(event, Note) and event.text.startswith("Found: ")]
    text = session._runners[0].lane.text
    assert text.startswith("results = [") and len(notes) == len(items_of(text))


def items_of(text: str) -> list:
    from strategies.constrained.knowcoder import items_in
    return items_in(text)


@pytest.mark.strategy("knowcoder")
def test_the_prompt_is_classes_request_and_sentence():
    from strategies.constrained.knowcoder import prompt_of
    tree = ast.parse(prompt_of(SCHEMA, SENTENCE))
    assert [type(node).__name__ for node in tree.body] == ["ClassDef"] * 6 + ["Expr", "Assign"]
    assert tree.body[-1].targets[0].id == "sentence" and tree.body[-1].value.value == SENTENCE
