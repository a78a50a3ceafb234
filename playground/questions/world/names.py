"""The vocabulary of the small world: invented names, and everyday words.

Names are composed of syllables with a fixed seed, so that they are the same everywhere and refer to no real person or
town. People and towns in `KNOWN_*` have fixed facts (`facts.py`), the strangers have none.
"""
import random

ONSETS = "b br c d dr f g gr h k l m n p r s t th tr v w z".split()
VOWELS = "a e i o u a e i o u ai ea".split()
CODAS = "l n r s m d k th nd rn lm st".split()


def invent(rng, count):
    """`count` different capitalised names of two syllables and four to seven letters."""
    names = []
    while len(names) < count:
        name = "".join(rng.choice(part) for part in (ONSETS, VOWELS, ONSETS, VOWELS, CODAS))
        if 4 <= len(name) <= 7 and name.capitalize() not in names:
            names.append(name.capitalize())
    return names


_ALL = invent(random.Random(77), 420)
KNOWN_PEOPLE, KNOWN_TOWNS = _ALL[:50], _ALL[50:75]
STRANGERS, FAR_TOWNS = _ALL[75:150] + _ALL[220:360], _ALL[150:200] + _ALL[360:]
RIVERS = [name + vowel for name, vowel in zip(_ALL[200:220], "aeoi" * 5)]
PEOPLE, TOWNS = KNOWN_PEOPLE + STRANGERS, KNOWN_TOWNS + FAR_TOWNS

GIRLS = "Ann Mia Lily Rosa Emma Nina Clara Ruth Ella Jane Maya Tess Ida Vera Molly Dora Ivy Greta Sofia Nora".split()
BOYS = "Tom Ben Sam Max Peter Leo Jack Paul Felix Hugo Finn Oscar Karl Theo Noah Adam Luke Emil Robin Otto".split()
TRADES = (
    "baker miller smith weaver potter fisher tailor shepherd gardener painter hunter healer sailor mason cook clerk"
).split()
PETS = "dog cat goat rabbit horse hen fox duck pig crow frog mouse".split()
FOODS = "bread soup cheese apples honey fish pears beans cake nuts plums eggs".split()
COLOURS = "red blue green yellow black white brown grey purple silver pink golden".split()
GOODS = "wool salt iron glass silk paper copper wine grain timber oil clay".split()
COUNTED = (
    "apples pears nuts coins books eggs stamps shells cards beads pens cups stones roses plums balls keys boxes"
).split()
THINGS = (
    "lamp ring cup rope boat coat book drum bell chair table knife wheel basket hat map key flute mirror broom"
).split()
PLACES = "forest village garden castle valley hill farm harbour mill meadow quarry orchard market".split()
SIZES = "small medium large".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def listing(words):
    """'a', 'a and b', 'a, b and c'."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
