"""Needle: a key hidden in a long passage of plain sentences and asked for at the end, over graded distances.

What a cache policy throws away it cannot find again; `meta["sentences"]` grades the distance.
"""
from playground.pocket.world.item import Item, exact, on_side
from playground.pocket.world.names import THINGS, TOWNS
from playground.pocket.world.sentences import sentence

TASK = "needle"
LENGTHS = (4, 8, 16, 32, 64)        # sentences of about nine tokens
HIDE = """
The secret key of {t} is {k}.
Remember: the secret key of {t} is {k}.
Note that the key of {t} is {k}.
The key to {t} is {k}.
Keep in mind that the secret key of {t} is {k}.
For {t} the secret key is {k}.
""".strip().splitlines()
ASK = """
What is the secret key of {t}?
Tell me the key of {t}.
Which key belongs to {t}?
What was the key of {t}?
Do you remember the key of {t}?
Give me the secret key of {t}.
The key of {t}, please.
What key opens {t}?
Name the secret key of {t}.
Which is the key of {t}?
And the key of {t}?
Now, what is the key of {t}?
""".strip().splitlines()
score = exact


def generate(rng, held_out=False):
    """A passage of one of the usual lengths; split by a hash of the prompt."""
    return sized(rng, LENGTHS, held_out)


def sized(rng, lengths, held_out=False):
    """A passage with a number of sentences drawn from `lengths`."""
    return on_side(lambda r: _needle(r, r.choice(lengths)), rng, held_out)


def _needle(rng, length):
    town = rng.choice(TOWNS)
    key = "".join(rng.choice("0123456789") for _ in range(4)) if rng.random() < 0.5 else rng.choice(THINGS)
    passage, place = [sentence(rng) for _ in range(length)], rng.randint(0, length)
    passage.insert(place, rng.choice(HIDE).format(t=town, k=key))
    prompt = "Text: " + " ".join(passage) + "\n" + rng.choice(ASK).format(t=town)
    return Item(prompt, key, TASK, dict(kind=f"{length} sentences", sentences=length, place=place))
