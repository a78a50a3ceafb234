"""Plain sentences about the small world, one at a time: what edits change and needles hide in."""
from playground.pocket.world.names import (
    BOYS,
    COLOURS,
    COUNTED,
    FOODS,
    GIRLS,
    PEOPLE,
    PETS,
    THINGS,
    TOWNS,
    TRADES,
)

FORMS = """
{n} walked to {t} with a {p}.
The {c} {x} stood near the door.
{n} sold {k} {o} at the market.
In {t} the {w} made a {x}.
A {p} ate the {f}.
{n} found a {c} {x}.
It rained in {t} for {k} days.
{n} gave the {w} some {f}.
Nobody saw the {p} behind the {x}.
{n} wrote a letter to the {w}.
The {p} slept under the {x}.
Every morning {n} ate {f}.
The road to {t} was long.
{n} lost a {x} in {t}.
The {w} painted the {x} {c}.
{k} {o} lay on the table.
{n} and the {w} talked about {f}.
A {c} {p} ran through {t}.
""".strip().splitlines()


def sentence(rng, name=None):
    """One sentence; `name` is used if the form speaks of a person."""
    words = dict(n=name or rng.choice(PEOPLE + GIRLS + BOYS), t=rng.choice(TOWNS), p=rng.choice(PETS))
    words |= dict(c=rng.choice(COLOURS), x=rng.choice(THINGS), k=rng.randint(2, 40))
    words |= dict(o=rng.choice(COUNTED), w=rng.choice(TRADES), f=rng.choice(FOODS))
    text = rng.choice(FORMS).format(**words)
    return text[0].upper() + text[1:]
