"""The kinds of records: the subjects of each kind, and its possible fields.

A field has its possible names in a schema, its JSON Schema, a generator of values, and a wording that states a value
in a sentence that begins with the subject. `group` nests fields in an object, `several_of` in a list of objects.
"""
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from playground.questions.world import names
from playground.questions.world.names import listing


@dataclass(frozen=True)
class FieldSpec:
    """One field of a record. `say(value)` puts a value into words, `wording` is the wording that states it as `{v}`."""
    keys: Sequence[str]
    schema: dict
    draw: Callable[[random.Random], object]
    wording: str = "{v}"
    say: Callable[[object], str] = str

    def tell(self, value):
        """Wording that states this value, with its choices unexpanded."""
        return self.wording.replace("{v}", self.say(value))


@dataclass(frozen=True)
class Kind:
    """A kind of record: the key of its subject, the possible subjects, how the text names them, and the fields."""
    key: str
    subjects: Sequence[str]
    named: str
    rows: Sequence[FieldSpec]


def text(keys, values, wording):
    return FieldSpec(keys.split(), {"type": "string"}, lambda rng: rng.choice(values), wording)


def number(keys, least, most, wording):
    return FieldSpec(keys.split(), {"type": "integer"}, lambda rng: rng.randint(least, most), wording)


def decimal(keys, most, wording):
    """A number with one nonzero decimal digit."""
    return FieldSpec(
        keys.split(), {"type": "number"}, lambda rng: (10 * rng.randrange(1, most) + rng.randint(1, 9)) / 10, wording
    )


def one_of(keys, values, wording):
    """One of a few words, an enum in the schema."""
    values = values.split() if isinstance(values, str) else list(values)
    return FieldSpec(keys.split(), {"type": "string", "enum": values}, lambda rng: rng.choice(values), wording)


def flag(keys, yes, no):
    return FieldSpec(
        keys.split(), {"type": "boolean"}, lambda rng: rng.random() < 0.5, say=lambda value: yes if value else no
    )


def maybe(keys, values, wording, nothing):
    """A word, or null, which the text states as `nothing`."""
    def say(value):
        return nothing if value is None else wording.replace("{v}", value)

    return FieldSpec(
        keys.split(), {"type": ["string", "null"]}, lambda rng: rng.choice([None, *rng.sample(values, 2)]), say=say
    )


def several(keys, values, wording, each="{v}"):
    """A list of one to four different words."""
    def say(found):
        return listing([each.replace("{v}", value) for value in found])
    schema = {"type": "array", "items": {"type": "string"}}
    return FieldSpec(keys.split(), schema, lambda rng: rng.sample(values, rng.randint(1, 4)), wording, say)


def group(keys, rows, wording):
    """An object of a few fields; `wording` refers to their values as {0}, {1} ..."""
    return FieldSpec(keys.split(), shape(rows), _object(rows), say=lambda value: _filled(wording, rows, value))


def several_of(keys, rows, wording, each):
    """A list of one to three objects with the same fields; `each` is the wording of one of them."""
    def say(found):
        return listing([_filled(each, rows, value) for value in found])
    draw = _object(rows)
    schema = {"type": "array", "items": shape(rows)}
    return FieldSpec(keys.split(), schema, lambda rng: [draw(rng) for _ in range(rng.randint(1, 3))], wording, say)


def shape(rows):
    """JSON Schema of an object with exactly these fields, under their first names."""
    return strict({row.keys[0]: row.schema for row in rows})


def strict(properties):
    """JSON Schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _object(rows):
    return lambda rng: {row.keys[0]: row.draw(rng) for row in rows}


def _filled(pattern, rows, value):
    for place, row in enumerate(rows):
        pattern = pattern.replace(f"{{{place}}}", row.say(value[row.keys[0]]))
    return pattern


def is_nested(row):
    """Whether a field contains objects."""
    return '"object"' in json.dumps(row.schema)


def is_list(row):
    """Whether a field is a list, of words or of objects."""
    return row.schema["type"] == "array"


STREETS = "Mill Mint Rose Oak Bridge Church Garden Market River Tower".split()
JOBS = ["cook", "guard", "clerk", "driver", "nurse", "singer"]
TITLES = "Rain Harbour Lanterns Winter Wolves Silence Bread Bridges Clouds Thorns".split()
DISHES = "pie stew salad pudding porridge omelette dumplings broth".split()
TIME = group("time when", [one_of("day", names.DAYS, ""), number("hour", 7, 20, "")], "[starts|begins] on {0} at {1}")
PLACE = group(
    "address place", [text("town", names.TOWNS, ""), text("street", STREETS, ""), number("number", 1, 99, "")],
    "[is|can be found] in {0}, {1} Street {2}",
)
PRICE = group(
    "price cost", [number("amount", 2, 99, ""), one_of("coin", "gold silver copper", "")], "costs {0} {1} coins"
)
MAKER = group(
    "maker master",
    [text("name", names.PEOPLE, ""), one_of("trade", "smith weaver potter mason", "")],
    "was made by {0}, a {1}",
)
GOODS = several_of(
    "goods items",
    [text("thing", names.THINGS, ""), number("count", 2, 40, "")],
    "[holds|has in store] {v}",
    "{1} {0}s",
)
COLOUR = one_of("colour tint", "red blue green white black", "is {v}")
BUILT = number("year built", 1200, 1999, "[was built in|dates from] {v}")

KINDS = dict(
    person=Kind(
        "name",
        names.PEOPLE,
        "{v}",
        [
            number("age years", 6, 90, "is {v} years old"),
            text("town home", names.TOWNS, "lives in {v}"),
            text("trade job work", names.TRADES, "[works as|is] a {v}"),
            decimal("height tall", 2, "is {v} metres tall"),
            several("pets animals", names.PETS, "[keeps|has|owns] {v}", "a {v}"),
            several("colours likes", names.COLOURS, "likes the colours {v}"),
            flag("married wed", "is married", "is not married"),
            flag("swims swimmer", "can swim", "cannot swim"),
            one_of("size shirt", "small medium large", "wears size {v}"),
            maybe("friend mate", names.PEOPLE, "is a friend of {v}", "has no friend"),
            group(
                "home house",
                [text("town", names.TOWNS, ""), number("rooms", 1, 12, "")],
                "has a house in {0} with {1} rooms",
            ),
            several_of(
                "children kids",
                [text("name", names.PEOPLE, ""), number("age", 1, 15, "")],
                "has children: {v}",
                "{0} of {1} years",
            ),
        ],
    ),
    shop=Kind(
        "owner",
        names.PEOPLE,
        "[the shop of {v}|the store that belongs to {v}]",
        [
            text("town where", names.TOWNS, "is in {v}"),
            several("sells goods", names.FOODS, "sells {v}"),
            flag("open", "is open", "is closed"),
            number("helpers staff", 1, 20, "has {v} helpers"),
            one_of("size", "small medium large", "is {v}"),
            several("days", names.DAYS, "opens on {v}"),
            decimal("rating mark", 5, "has a mark of {v}"),
            maybe("sign name", ["Red Fox", "Old Bear", "Blue Bell"], "has the sign {v}", "has no sign"),
            several_of(
                "prices list",
                [text("food", names.FOODS, ""), number("price", 1, 30, "")],
                "asks {v}",
                "{1} coins for {0}",
            ),
            PLACE,
            group(
                "boss head",
                [text("name", names.PEOPLE, ""), flag("kind", "kind", "strict")],
                "is led by {0}, who is {1}",
            ),
        ],
    ),
    house=Kind(
        "street",
        STREETS,
        "the house in {v} Street",
        [
            number("rooms", 1, 20, "has {v} rooms"),
            number("windows panes", 2, 40, "has {v} windows"),
            COLOUR,
            BUILT,
            flag("garden", "has a garden", "has no garden"),
            flag("empty free", "stands empty", "is lived in"),
            one_of("roof", "straw slate tile wood", "has a roof of {v}"),
            several("trees", "oaks limes firs apples pears birches".split(), "is surrounded by {v}"),
            PRICE,
            group("owner", [text("name", names.PEOPLE, ""), number("age", 20, 90, "")], "belongs to {0}, who is {1}"),
            several_of(
                "tenants people",
                [text("name", names.PEOPLE, ""), number("floor", 1, 5, "")],
                "is home to {v}",
                "{0} on floor {1}",
            ),
        ],
    ),
    ship=Kind(
        "ship",
        TITLES,
        "the ship {v}",
        [
            number("masts", 1, 4, "has {v} masts"),
            number("crew sailors", 3, 90, "has a crew of {v}"),
            decimal("length metres", 60, "is {v} metres long"),
            text("port harbour", names.TOWNS, "[sails from|comes from] {v}"),
            several("cargo load", names.GOODS, "carries {v}"),
            flag("armed", "has cannons", "has no cannons"),
            flag("ready", "is ready to sail", "is not ready to sail"),
            COLOUR,
            several("route stops", names.TOWNS, "calls at {v}"),
            GOODS,
            MAKER,
            TIME,
        ],
    ),
    animal=Kind(
        "name",
        names.GIRLS + names.BOYS,
        "[the animal called {v}|{v}, an animal,]",
        [
            one_of("kind species", "dog cat horse goat rabbit", "is a {v}"),
            number("age years", 1, 20, "is {v} years old"),
            decimal("weight kilos", 60, "weighs {v} kilos"),
            one_of("coat fur", "brown black white grey", "has a {v} coat"),
            several("eats food", names.FOODS, "eats {v}"),
            flag("tame", "is tame", "is wild"),
            flag("healthy well", "is healthy", "is ill"),
            maybe("owner keeper", names.PEOPLE, "belongs to {v}", "belongs to nobody"),
            group("home stable", [text("town", names.TOWNS, ""), number("box", 1, 30, "")], "lives in {0} in box {1}"),
            several_of(
                "visits doctor",
                [one_of("day", names.DAYS, ""), number("hour", 8, 18, "")],
                "sees the doctor {v}",
                "on {0} at {1}",
            ),
        ],
    ),
    book=Kind(
        "title",
        TITLES,
        "[the book {v}|the book called {v}]",
        [
            text("author writer", names.PEOPLE, "[was written|is] by {v}"),
            number("pages", 20, 900, "has {v} pages"),
            number("year", 1700, 1999, "is from {v}"),
            one_of("kind type", "novel poems travel history", "is shelved under {v}"),
            several("themes about", ["love", "war", "ships", "winter", "money", "trees"], "is about {v}"),
            flag("lent out", "is lent out", "is on the shelf"),
            flag("pictures drawn", "has pictures", "has no pictures"),
            PRICE,
            group(
                "copy print",
                [number("number", 1, 99, ""), one_of("state", "new worn torn", "")],
                "is copy number {0} and {1}",
            ),
            several_of(
                "readers lent",
                [text("name", names.PEOPLE, ""), one_of("day", names.DAYS, "")],
                "was read by {v}",
                "{0} on {1}",
            ),
        ],
    ),
    dish=Kind(
        "dish",
        DISHES,
        "[the {v} of the day|today's {v}]",
        [
            text("cook chef", names.PEOPLE, "is cooked by {v}"),
            several("parts needs", names.FOODS, "is made of {v}"),
            number("minutes time", 5, 90, "takes {v} minutes"),
            flag("hot warm", "is served hot", "is served cold"),
            flag("sweet", "is sweet", "is not sweet"),
            number("plates serves", 1, 12, "is enough for {v} people"),
            decimal("price cost", 20, "costs {v} coins"),
            one_of("meal", "breakfast lunch supper", "is eaten at {v}"),
            several_of(
                "recipe list",
                [text("food", names.FOODS, ""), number("spoons", 1, 9, "")],
                "needs {v}",
                "{1} spoons of {0}",
            ),
            group(
                "oven heat",
                [number("degrees", 100, 250, ""), flag("fan", "with fan", "without fan")],
                "is baked at {0} degrees {1}",
            ),
        ],
    ),
    journey=Kind(
        "traveller",
        names.PEOPLE,
        "[{v}, on a journey,|the traveller {v}]",
        [
            several("stops route", names.TOWNS, "[visits|goes to] {v}"),
            number("nights", 1, 40, "is away for {v} nights"),
            flag("alone", "travels alone", "travels with friends"),
            one_of("by means", "cart boat mule foot", "goes by {v}"),
            several("luggage bags", names.THINGS, "carries {v}", "a {v}"),
            decimal("miles", 300, "covers {v} miles"),
            maybe("guide leader", names.PEOPLE, "is led by {v}", "has no guide"),
            flag("paid", "has paid", "has not paid"),
            TIME,
            group("inn bed", [text("town", names.TOWNS, ""), number("room", 1, 40, "")], "sleeps in {0} in room {1}"),
            several_of(
                "stays nights_at",
                [text("town", names.TOWNS, ""), number("nights", 1, 9, "")],
                "stays {v}",
                "{1} nights in {0}",
            ),
        ],
    ),
    order=Kind(
        "customer",
        names.PEOPLE,
        "[the order of {v}|the parcel for {v}]",
        [
            several("things wares", names.THINGS, "[contains|is for] {v}", "a {v}"),
            number("price total", 2, 99, "costs {v} coins"),
            flag("paid", "is paid", "is not paid yet"),
            flag("gift", "is a gift", "is not a gift"),
            text("town to", names.TOWNS, "goes to {v}"),
            decimal("weight kilos", 40, "weighs {v} kilos"),
            one_of("speed post", "slow normal fast", "is sent by {v} post"),
            maybe("note card", ["thanks", "hurry", "fragile"], "has the note {v}", "has no note"),
            GOODS,
            TIME,
            PRICE,
            PLACE,
        ],
    ),
    meeting=Kind(
        "topic",
        ["the bridge", "the harvest", "the new school", "the fair", "the taxes", "the well"],
        "the meeting about {v}",
        [
            several("people guests", names.PEOPLE, "[brings together|is for] {v}"),
            text("town where", names.TOWNS, "is held in {v}"),
            one_of("day date", names.DAYS, "is on {v}"),
            number("hour", 7, 20, "begins at {v}"),
            flag("open public", "is open to all", "is not open to all"),
            number("seats", 5, 90, "has {v} seats"),
            several("drinks", ["tea", "milk", "cider", "water"], "offers {v}"),
            maybe("chair speaker", names.PEOPLE, "is led by {v}", "has nobody to lead it"),
            TIME,
            PLACE,
            several_of(
                "talks speakers",
                [text("name", names.PEOPLE, ""), number("minutes", 5, 60, "")],
                "hears {v}",
                "{0} for {1} minutes",
            ),
        ],
    ),
)
