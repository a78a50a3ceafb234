"""Records: a sentence to a JSON object under a schema that the prompt shows.

Every kind of record lists its fields; a field knows its key, its JSON Schema, its value and the words that tell it.
The prompt shows the schema in a short notation made from the JSON Schema (`notation`); `meta["schema"]` is the
full one, for a grammar or a validator. Arrays and booleans, the hard parts for a small model, are frequent.
"""
import json

from playground.pocket.world.item import Item, on_side
from playground.pocket.world.names import (
    COLOURS,
    DAYS,
    FOODS,
    PEOPLE,
    PETS,
    SIZES,
    THINGS,
    TOWNS,
    TRADES,
    listing,
)

TASK = "records"
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
FRAMES = [
    "Fill the schema {a} from: {s}", "Schema: {a}\nSentence: {s}", "{s}\nWrite this as JSON with {a}",
    "Make a record {a}. Text: {s}",
    "JSON, please: {a}\n{s}", "Turn the text into {a}. {s}", "Text: {s}\nForm: {a}", "Put this into the form {a}: {s}",
    "Read: {s} Then fill {a}", "Give me {a} for this sentence: {s}", "Extract {a} from the text. {s}",
    "Using the fields {a}, note down: {s}",
]
ORDER = """
{name} orders {count} {colour} {thing}s for {price} coins. {state}
An order from {name}: {count} {thing}s, colour {colour}, price {price} coins. {state}
For {price} coins {name} wants {count} {thing}s in {colour}. {state}
{state} {name} asked for {count} {colour} {thing}s and the price is {price} coins.
""".strip().splitlines()
SALE = """
The {thing} is {size}, {colour} and {age} and costs {price} coins.
A {size} {colour} {thing}, {age}, is sold for {price} coins.
We sell a {age} {colour} {thing}, size {size}, at {price} coins.
For {price} coins: one {age} {thing}, {size} and {colour}.
""".strip().splitlines()
MEETING = """
{who} meet in {town} on {day} at {hour}.
On {day} at {hour} {who} meet in {town}.
Meeting of {who}: {day}, {hour} o'clock, in {town}.
In {town}, {day} at {hour}, there will be {who}.
""".strip().splitlines()
SHOP = """
The shop of {owner} in {town} sells {sold} and is {state}.
In {town} the {state} shop of {owner} has {sold}.
{owner} sells {sold} in {town}. The shop is {state}.
The shop is {state}. It belongs to {owner} from {town} and has {sold}.
""".strip().splitlines()
JOURNEY = """
{name} travels {how} to {way} for {nights} nights.
For {nights} nights {name} visits {way} {how}.
The journey of {name}, {how}, goes to {way} and takes {nights} nights.
{name} goes to {way}, {nights} nights, {how}.
""".strip().splitlines()
RECIPE = """
{cook} makes a {dish} of {needs} in {minutes} minutes and serves it {serve}.
The {dish} by {cook} needs {needs}, takes {minutes} minutes and is eaten {serve}.
Take {needs}. After {minutes} minutes the {dish} of {cook} is ready. Eat it {serve}.
Served {serve}: the {dish} of {cook}, made from {needs} in {minutes} minutes.
""".strip().splitlines()
DISHES = "pie stew salad pudding porridge".split()


def generate(rng, held_out=False):
    """A sentence, a schema and the object; split by a hash of the prompt."""
    return on_side(_record, rng, held_out)


def score(item, text):
    """1.0 for the same object, whatever the spacing; for another one, half the share of fields that are right."""
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    wanted = json.loads(item.answer)
    if found == wanted or not isinstance(found, dict):
        return float(found == wanted)
    return 0.5 * sum(found.get(key) == value for key, value in wanted.items()) / len(wanted)


def shape(properties):
    """A JSON Schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def choice(values):
    """A JSON Schema of one of a few strings."""
    return {"type": "string", "enum": list(values)}


def notation(schema):
    """The short form of a schema that a prompt shows: {name: text, pets: [text], open: true|false}."""
    if schema["type"] == "object":
        return "{" + ", ".join(f"{key}: {notation(part)}" for key, part in schema["properties"].items()) + "}"
    if schema["type"] == "array":
        return "[" + notation(schema["items"]) + "]"
    if "enum" in schema:
        return "|".join(schema["enum"])
    return {"string": "text", "integer": "number", "boolean": "true|false"}[schema["type"]]


def _record(rng):
    name, make = rng.choice(sorted(KINDS.items()))
    sentence, fields = make(rng)
    schema = shape({key: part for key, part, _ in fields})
    value = {key: v for key, _, v in fields}
    prompt = rng.choice(FRAMES).format(a=notation(schema), s=sentence)
    return Item(prompt, json.dumps(value), TASK, dict(kind=name, schema=schema, sentence=sentence))


def _person(rng):
    name, pets, colours = rng.choice(PEOPLE), _some(rng, PETS), _some(rng, COLOURS)
    age, town, trade, married = rng.randint(6, 90), rng.choice(TOWNS), rng.choice(TRADES), _flip(rng)
    known = [
        ("age", NUMBER, age, f"is {age} years old"),
        ("town", TEXT, town, f"lives in {town}"),
        ("trade", TEXT, trade, f"works as a {trade}"),
        ("pets", TEXTS, pets, "keeps a " + listing(pets)),
        ("colours", TEXTS, colours, "likes " + listing(colours)),
        ("married", FLAG, married, "is married" if married else "is not married"),
    ]
    told = sorted(rng.sample(range(len(known)), rng.randint(2, 4)))
    said = listing([known[i][3] for i in rng.sample(told, len(told))])
    return f"{name} {said}.", [("name", TEXT, name)] + [known[i][:3] for i in told]


def _order(rng):
    name, thing, colour = rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(COLOURS)
    count, price, paid = rng.randint(2, 20), rng.randint(2, 99), _flip(rng)
    state = "It is paid." if paid else "It is not paid yet."
    said = rng.choice(ORDER).format(name=name, thing=thing, colour=colour, count=count, price=price, state=state)
    item = ("item", shape(dict(thing=TEXT, colour=TEXT)), dict(thing=thing, colour=colour))
    numbers = [("count", NUMBER, count), ("price", NUMBER, price)]
    return said, [("customer", TEXT, name), item, *numbers, ("paid", FLAG, paid)]


def _sale(rng):
    thing, colour, size, price, new = (*map(rng.choice, (THINGS, COLOURS, SIZES)), rng.randint(2, 99), _flip(rng))
    said = rng.choice(SALE).format(thing=thing, colour=colour, size=size, price=price, age="new" if new else "used")
    looks = [("size", choice(SIZES), size), ("colour", TEXT, colour)]
    return said, [("thing", TEXT, thing), *looks, ("price", NUMBER, price), ("new", FLAG, new)]


def _meeting(rng):
    people = _some(rng, PEOPLE, least=2)
    town, day, hour = rng.choice(TOWNS), rng.choice(DAYS), rng.randint(7, 20)
    said = rng.choice(MEETING).format(who=listing(people), town=town, day=day, hour=hour)
    time = ("time", shape(dict(day=choice(DAYS), hour=NUMBER)), dict(day=day, hour=hour))
    return said, [("people", TEXTS, people), ("place", TEXT, town), time]


def _shop(rng):
    owner, town, goods, is_open = rng.choice(PEOPLE), rng.choice(TOWNS), _some(rng, FOODS, 4), _flip(rng)
    said = rng.choice(SHOP).format(owner=owner, town=town, sold=listing(goods), state="open" if is_open else "closed")
    return said, [("owner", TEXT, owner), ("town", TEXT, town), ("goods", TEXTS, goods), ("open", FLAG, is_open)]


def _journey(rng):
    name, stops, nights, alone = rng.choice(PEOPLE), _some(rng, TOWNS, 4, least=2), rng.randint(2, 30), _flip(rng)
    how = "alone" if alone else "with friends"
    said = rng.choice(JOURNEY).format(name=name, how=how, way=listing(stops), nights=nights)
    way = [("stops", TEXTS, stops), ("nights", NUMBER, nights)]
    return said, [("traveller", TEXT, name), *way, ("alone", FLAG, alone)]


def _recipe(rng):
    dish, cook, parts = rng.choice(DISHES), rng.choice(PEOPLE), _some(rng, FOODS, 4, least=2)
    minutes, hot = rng.randint(5, 90), _flip(rng)
    words = dict(dish=dish, cook=cook, needs=listing(parts), minutes=minutes, serve="hot" if hot else "cold")
    named = [("dish", TEXT, dish), ("cook", TEXT, cook), ("parts", TEXTS, parts)]
    return rng.choice(RECIPE).format(**words), named + [("minutes", NUMBER, minutes), ("hot", FLAG, hot)]


def _flip(rng):
    return rng.random() < 0.5


def _some(rng, words, most=3, least=1):
    return rng.sample(words, rng.randint(least, most))


KINDS = dict(
    person=_person, order=_order, sale=_sale, meeting=_meeting, shop=_shop, journey=_journey, recipe=_recipe,
)
