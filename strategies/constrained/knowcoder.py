"""KnowCoder's answers: a schema as Python classes, and a list of their objects found in a sentence."""
from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar

from playground.contract import Constraint, knob
from playground.errors import Refusal
from playground.events import Event, Note
from playground.grammar.limits import check_text

EXAMPLE = '''class Entity:
    def __init__(self, name: str): ...

class Person(Entity):
    """Description: a human being. Examples: Anna, Mr Hill"""

class Place(Entity):
    """Description: a town, a country or a river. Examples: Bremen, the Rhine"""
'''
LEADING = "results = ["
LONGEST_SPAN, LONGEST_SENTENCE, MOST_CLASSES = 12, 64, 20  # words, words, classes
FREE = r'/"([^"\\\n]|\\["\\n])*"/'  # a string of anything


class KnowCoder(Constraint):
    """The answer is `results = [...]`, a list of objects of the classes in a schema, whose strings are words of the
    sentence that they are found in.

    The schema is Python: classes with base classes, docstrings for the model, and `__init__` with parameters of type
    `str`, or of a class, for which its subclasses stand too. A class without a base only serves others. It is parsed
    and never run. Strings are runs of at most 12 words of the sentence; without a sentence they are free. So types and
    spans are right in form; whether they are the right ones is the model's part. The mask adds no prompt: that of the
    paper is the classes, a docstring that asks for their objects, and `sentence = "..."`, which `prompt_of` writes. The
    paper trains a model of seven billion parameters on 30,000 types, and its gains are those of the training: no
    bundled model has seen such a task. Engine: llguidance. Li et al. 2024, arXiv 2403.07969.
    """

    name, title, paper, sheet = "knowcoder", "Schema as classes (KnowCoder)", "2403.07969", "overlays/knowcoder"
    guarantee, reconstruction, sure = ("constraint_sound",), True, "medium"

    schema: str = knob(EXAMPLE, multiline=True, file=True, help="the classes, as Python; they are never run")
    sentence: str = knob("", multiline=True, help="the sentence whose words the strings are; empty for any string")
    most: int = knob(16, 1, 64, step=1, help="objects after which the list ends")

    begins: ClassVar[int]  # these come with the lane
    spelling: ClassVar[Callable[[int], bytes]]

    def grammar(self):
        classes = read_schema(self.schema)
        check_text("sentence", self.sentence)
        names = {name: f"c{number}" for number, name in enumerate(classes)}
        items = " | ".join(names[name] for name, (bases, _) in classes.items() if bases)
        more = f' (", " item){{0,{self.most - 1}}}' if self.most > 1 else ""
        start = f'start: {json.dumps(LEADING)} [item{more}] "]"'
        objects = (_rule(name, classes, names) for name in classes)
        return "lark", "\n".join([start, f"item: {items}", f"STRING: {self._strings()}", *objects])

    def _strings(self) -> str:
        """The strings of the grammar: runs of words of the sentence, or any."""
        return " | ".join(_quoted(_quoted(span)) for span in spans_of(self.sentence)) or FREE

    def begin(self, start, spelling):
        self.begins, self.spelling = start, spelling

    def explain(self, history, token) -> Iterator[Event]:
        if b")" not in self.spelling(token):
            return
        before = b"".join(map(self.spelling, history[self.begins:]))
        known, now = (items_in(text.decode("utf-8", "replace")) for text in (before, before + self.spelling(token)))
        for item in now[len(known):]:
            yield Note(f"Found: {ast.unparse(item)}.")


def read_schema(source: str) -> dict[str, tuple[list[str], list[str]]]:
    """For each class its bases and the types of its parameters, which may be inherited. Raises Refusal."""
    check_text("schema", source)
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Refusal("The schema is not valid Python: write classes such as `class Person(Entity): ...`.", "schema"
                      ) from None
    classes: dict[str, tuple[list[str], list[str]]] = {}
    for node in [node for node in body if isinstance(node, ast.ClassDef)]:
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        unknown = next((base for base in bases if base not in classes), None)
        if unknown:
            raise Refusal(f"The base class {unknown[:60]!r} of {node.name[:60]!r} is not above it: write it there.",
                          "schema")
        inherited = next((classes[base][1] for base in bases if classes[base][1]), ["str"])
        classes[node.name] = bases, _parameters(node) or inherited
    if not 0 < sum(bool(bases) for bases, _ in classes.values()) <= MOST_CLASSES:
        raise Refusal(f"The schema has to name between 1 and {MOST_CLASSES} classes with a base class: "
                      "write `class Person(Entity): ...` below `class Entity: ...`.", "schema")
    _check_types(classes)
    return classes


def _parameters(node: ast.ClassDef) -> list[str]:
    """The types of the parameters of a class's own `__init__`; none if it has none."""
    made = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if made is None:
        return []
    return ["str" if given.annotation is None else ast.unparse(given.annotation) for given in made.args.args[1:]]


def _check_types(classes: dict[str, tuple[list[str], list[str]]]) -> None:
    wrong = next(((name, kind) for name, (_, kinds) in classes.items() for kind in kinds
                  if kind != "str" and kind not in classes), None)
    if wrong:
        raise Refusal(f"A parameter of {wrong[0][:60]!r} has the type {wrong[1][:60]!r}: use str or a class of the "
                      "schema.", "schema")


def _rule(name: str, classes: dict[str, tuple[list[str], list[str]]], names: dict[str, str]) -> str:
    """The grammar rule of the objects of one class."""
    given = ' ", " '.join(_argument(kind, classes, names) for kind in classes[name][1])
    return f'{names[name]}: {json.dumps(name + "(")} {given} ")"'


def _argument(kind: str, classes: dict[str, tuple[list[str], list[str]]], names: dict[str, str]) -> str:
    if kind == "str":
        return "STRING"
    return f"({' | '.join(names[name] for name in classes if kind in _ancestors(name, classes))})"


def _ancestors(name: str, classes: dict[str, tuple[list[str], list[str]]]) -> set[str]:
    """A class and all it derives from."""
    return {name}.union(*(_ancestors(base, classes) for base in classes[name][0]))


def _quoted(text: str) -> str:
    """As a string of Python, and of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def spans_of(sentence: str) -> list[str]:
    """All runs of at most 12 words of a sentence, each once, without marks at their ends. Raises Refusal."""
    words = [word.span() for word in re.finditer(r"\w+(?:[^\w\s]+\w+)*", sentence)]
    if len(words) > LONGEST_SENTENCE:
        raise Refusal(f"The sentence has {len(words)} words, and {LONGEST_SENTENCE} are the most: shorten it.",
                      "sentence")
    runs = [sentence[words[first][0]:words[last][1]] for first in range(len(words))
            for last in range(first, min(len(words), first + LONGEST_SPAN))]
    return list(dict.fromkeys(runs))


def prompt_of(schema: str, sentence: str) -> str:
    """The prompt of the paper's form, in our words."""
    asked = '"""\nThis is an object-oriented programming task: instantiate all objects of the classes above that the ' \
            'sentence names.\n"""'
    return f"{schema.strip()}\n\n{asked}\nsentence = {_quoted(sentence)}\n"


def items_in(text: str) -> list[ast.expr]:
    """The complete items of an answer, which may be cut off; parsed, never run."""
    body = text.strip().removeprefix(LEADING)
    for end in [len(body), *(found.end() for found in reversed(list(re.finditer(r"\)", body))))]:
        try:
            read = ast.parse(f"[{body[:end].rstrip(', ').removesuffix(']')}]", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return [item for item in read.elts if isinstance(item, ast.Call)] if isinstance(read, ast.List) else []
    return []


def scored(found: list[str], gold: list[str]) -> tuple[float, float, float]:
    """Precision, recall and F1; each right item counts once, so that repeating it lowers the precision."""
    right = sum((Counter(found) & Counter(gold)).values())
    precision, recall = right / len(found) if found else 0.0, right / len(gold) if gold else 0.0
    return precision, recall, 2 * right / (len(found) + len(gold)) if found or gold else 1.0
