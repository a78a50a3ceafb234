"""Records: extraction of a JSON object from a text, under a schema given in the prompt.

`record_kinds.py` lists the kinds of records. A record has some fields of a kind, each under one of its names; the text
states them in random order, the schema in a fixed one. The prompt shows the schema in one of three notations, and
`meta["schema"]` is the JSON Schema, for a grammar or a validator. Arrays and booleans, which are hard for a small
model, are frequent.

Grades: 1 two to four plain fields; 2 with lists; 3 with a nested object; 4 with lists of objects, and with statements
in the text that are not part of the schema.
"""
import json

from playground.questions.world.item import Item, on_side
from playground.questions.world.names import listing
from playground.questions.world.record_kinds import JOBS, KINDS, is_list, is_nested, strict
from playground.questions.world.wording import Wordings, expand

TASK = "records"
GRADES = (1, 2, 3, 4)
FIELDS = {1: (1, 3), 2: (2, 4), 3: (2, 4), 4: (3, 5)}      # not counting the subject
FRAMES = Wordings("""
[Fill|Fill in|Complete] the [schema|form|record] {a} [from|with|using]: {s}
[Schema|Form|Fields|Format]: {a}\\n[Sentence|Text|Input|Note]: {s}
{s}\\n[Write|Give|Say|Put] this as JSON with {a}
[Make|Build|Create|Write] a [record|JSON object] {a}. [Text|From|Source]: {s}
[JSON, please|As JSON|In JSON]: {a}\\n{s}
[Turn|Change|Convert] the text into {a}. {s}
[Text|Input|Note]: {s}\\n[Form|Schema|Output]: {a}
Put this into the [form|format|shape] {a}: {s}
Read: {s} Then fill [in |]{a}
[Give|Show|Write] me {a} for this text: {s}
[Extract|Take|Pull] {a} from the text. {s}
[Using|With] the fields {a}, [note|write] down: {s}
[What is the record|Which JSON] for {a}? {s}
{a}\\n{s}
{s}\\n{a}
~ [Bring this in order|Tidy this up]: {s} [Wanted|Needed] is {a}
~ [A clerk needs|Our books need] {a}. [He reads|They say]: {s}
""")


def generate(rng, held_out=False, grade=None):
    """A text, a schema and the object; the held-out split hashes the object and the kind."""
    return on_side(lambda voice: _record(voice, grade or voice.rng.choice(GRADES)), rng, held_out)


def score(item, text):
    """1.0 for the same object, ignoring whitespace; otherwise half the share of correct fields."""
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    wanted = json.loads(item.answer)
    if _same(found, wanted):
        return 1.0
    if not isinstance(found, dict):
        return 0.0
    return 0.5 * sum(key in found and _same(found[key], value) for key, value in wanted.items()) / len(wanted)


def _same(one, other):
    """Whether two values are equal as JSON, in which 1 and true differ, unlike in Python."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def notation(schema):
    """The short form of a schema: {name: text, pets: [text], open: true|false}."""
    if schema["type"] == "object":
        return "{" + ", ".join(f"{key}: {notation(part)}" for key, part in schema["properties"].items()) + "}"
    if schema["type"] == "array":
        return "[" + notation(schema["items"]) + "]"
    if "enum" in schema:
        return "|".join(schema["enum"])
    return PLAIN[str(schema["type"])]


def in_words(schema):
    """The long form: name (text), pets (list of text), home (town (text), rooms (number))."""
    if schema["type"] == "object":
        return ", ".join(f"{key} ({in_words(part)})" for key, part in schema["properties"].items())
    if schema["type"] == "array":
        return "list of " + in_words(schema["items"])
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    return PLAIN[str(schema["type"])].replace("|", " or ")


PLAIN = {
    "string": "text",
    "integer": "number",
    "number": "decimal",
    "boolean": "true|false",
    "['string', 'null']": "text|null",
}
NOTATIONS = (notation, notation, notation, in_words, json.dumps)


def _record(voice, grade):
    rng = voice.rng
    name = rng.choice(sorted(KINDS))
    kind, subject = KINDS[name], rng.choice(KINDS[name].subjects)
    fields = _fields(rng, kind, grade)
    schema = strict({kind.key: {"type": "string"}} | {key: row.schema for key, row, _ in fields})
    answer = json.dumps({kind.key: subject} | {key: value for key, _, value in fields})
    statements = [expand(rng, row.tell(value)) for _, row, value in fields] + _asides(rng, grade)
    text, shown = _text(rng, kind.named.replace("{v}", subject), statements), rng.choice(NOTATIONS)(schema)
    prompt = voice.say(FRAMES, a=shown, s=text).replace("\\n", "\n")
    meta = dict(kind=f"grade {grade}, {name}", schema=schema, sentence=text, shown=shown)
    return Item(prompt, answer, TASK, meta, grade, key=f"{name} {answer}")


def _fields(rng, kind, grade):
    """(name, field, value) of some fields of a kind, with distinct names."""
    names = [kind.key] * 2
    while len(set(names)) < len(names):
        rows = _rows(rng, kind.rows, grade)
        names = [kind.key, *(rng.choice(row.keys) for row in rows)]
    return [(name, row, row.draw(rng)) for name, row in zip(names[1:], rows)]


def _rows(rng, rows, grade):
    """Some fields, as required by the grade, in the order of the kind."""
    plain = [row for row in rows if not is_nested(row) and not is_list(row)]
    lists = [row for row in rows if is_list(row) and not is_nested(row)]
    objects = [row for row in rows if is_nested(row) and not is_list(row)]
    tables = [row for row in rows if is_nested(row) and is_list(row)]
    wanted = {2: [lists], 3: [objects], 4: [objects, tables]}.get(grade, [])
    must = [rng.choice(group) for group in wanted]
    more = [row for row in (plain + lists if grade > 1 else plain) if row not in must]
    chosen = must + rng.sample(more, max(1, rng.randint(*FIELDS[grade]) - len(must)))
    return [row for row in rows if row in chosen]


def _asides(rng, grade):
    """A statement that is not part of the schema, at the highest grade."""
    return [f"was once seen by a {rng.choice(JOBS)}"] * (grade == 4 and rng.random() < 0.6)


def _text(rng, named, statements):
    """The text: all statements in random order, in sentences of one to three statements about the subject."""
    rng.shuffle(statements)
    sentences = []
    while statements:
        size = rng.randint(1, 3)
        part, statements = statements[:size], statements[size:]
        joined = (
            listing(part) if not any(" and " in words or "," in words for words in part) else ", and it ".join(part)
        )
        sentences.append(f"{expand(rng, named)} {joined}.")
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
