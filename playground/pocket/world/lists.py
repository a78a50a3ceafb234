"""Lists: copy, reverse, sort, shuffle, replace, drop, first, last.

Small, with an order that matters: which positions a model can fill at once, and which need their neighbours.
"""
from playground.pocket.world.item import Item, exact, on_side
from playground.pocket.world.names import FOODS, PETS, THINGS

TASK = "lists"
ASK = dict(
    copy="""
Copy: {s}
Repeat this list: {s}
Write the list again: {s}
Say once more: {s}
The same list, please: {s}
Do not change anything: {s}
""",
    reverse="""
Reverse: {s}
Write backwards: {s}
Turn the list around: {s}
From last to first: {s}
Put the last one first: {s}
In opposite order: {s}
""",
    sort="""
Sort: {s}
Put in order: {s}
Sort the list: {s}
From small to large: {s}
Arrange in order: {s}
Bring into order: {s}
""",
    shuffle="""
Shuffle: {s}
Mix up: {s}
Any other order: {s}
Put in random order: {s}
Stir the list: {s}
Shuffle the list: {s}
""",
    first="""
First item: {s}
What comes first in {s}
Give me the first of {s}
The first one of {s}
Which is first: {s}
Start of the list {s}
""",
    last="""
Last item: {s}
What comes last in {s}
Give me the last of {s}
The last one of {s}
Which is last: {s}
End of the list {s}
""",
    replace="""
Replace {x} by {y}: {s}
In the list {s} put {y} for {x}
Change {x} to {y} in {s}
{y} instead of {x}: {s}
Swap {x} for {y}: {s}
Where it says {x} write {y}: {s}
""",
    drop="""
Without {x}: {s}
Drop {x} from {s}
Leave out {x}: {s}
Remove {x} from the list {s}
Everything but {x}: {s}
Take {x} out of {s}
""")


def generate(rng, held_out=False):
    """A list and what to do with it; split by a hash of the prompt."""
    return on_side(_list, rng, held_out)


def score(item, text):
    """Exact, but a shuffled list only has to hold the same items."""
    if item.meta["kind"] != "shuffle":
        return exact(item, text)
    return float(sorted(text.strip().split(", ")) == sorted(item.answer.split(", ")))


def _list(rng):
    kind, size = rng.choice(sorted(ASK)), rng.randint(2, 7)
    pool = range(100) if rng.random() < 0.4 else THINGS + FOODS + PETS
    items = rng.sample(pool, size)
    x, y = rng.choice(items), rng.choice(pool)
    question = rng.choice(ASK[kind].strip().splitlines()).format(s=written(items), x=x, y=y)
    return Item(question, written(_done(rng, kind, items, (x, y))), TASK, dict(kind=kind, length=size))


def written(items):
    """'a, b, c'."""
    return ", ".join(map(str, items))


def _done(rng, kind, items, pair):
    """The list after the operation; `pair` is the item to replace or drop, and what to put there."""
    x, y = pair
    done = dict(copy=items, reverse=items[::-1], sort=sorted(items), shuffle=rng.sample(items, len(items)))
    done |= dict(first=items[:1], last=items[-1:])
    done |= dict(replace=[y if z == x else z for z in items], drop=[z for z in items if z != x])
    return done[kind]
