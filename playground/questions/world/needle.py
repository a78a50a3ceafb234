"""Needle: retrieval of a key hidden in a long passage, at graded distances.

A key whose KV slots a cache policy has evicted cannot be retrieved. The grade sets the length of the passage, from 4
sentences to nearly the whole context; the position is uniform, so `meta["distance"]` (sentences between key and
question) is a finer measure. Half of the passages also contain keys of other towns as distractors.
"""
from playground.questions.world.item import Item, exact, on_side
from playground.questions.world.names import THINGS, TOWNS
from playground.questions.world.sentences import sentence
from playground.questions.world.wording import Wordings

TASK = "needle"
LENGTHS = (4, 8, 16, 32, 64, 96)        # in sentences of about nine tokens; the longest fill a context of 1024
GRADES = tuple(range(1, len(LENGTHS) + 1))
HIDE = Wordings("""
The [|secret |hidden ][key|password|code] of {t} is {k}.
[Remember|Note|Mark this|Do not forget]: the [|secret ]key of {t} is {k}.
[Note that|Keep in mind that|Bear in mind that|It is true that] the [|secret ]key of {t} is {k}.
The key to {t} is {k}.
For {t} the [|secret ]key is {k}.
{k} is the [|secret ]key of {t}.
[The gate|The door|The tower] of {t} opens with the key {k}.
{t} has the [|secret ]key {k}.
[They chose|Somebody set] {k} as the key of {t}.
[Write it down|Learn it by heart]: key of {t}, {k}.
The key of {t}[, they say,|, as we know,|, by the way,] is {k}.
[At|In] {t} the key is {k}.
[If you go to|When you are in] {t}, the key is {k}.
[Nobody|Hardly anybody] knows that the key of {t} is {k}.
{k} unlocks {t}.
[People in|Those who live in] {t} [use|carry|keep] the key {k}.
[To unlock|To enter] {t}, [use|take|say] {k}.
[A friend|The guard|The mayor] [told me|says] that the key of {t} is {k}.
~ [Whoever comes to|He who enters] {t} needs the key {k}.
""")
ASK = Wordings("""
What is the [|secret |hidden ]key of {t}?
[Tell|Give|Show] me the [|secret ]key of {t}.
[Which|What] key [belongs to|opens|fits] {t}?
[What|Which] was the key of {t}?
[Do you remember|Do you still know|Can you recall] the key of {t}?
The [|secret ]key of {t}, please.
[Name|Repeat|Find] the [|secret ]key of {t}.
[Which|What] is the key [to|of|for] {t}?
[And the|Now the|The] key of {t}?
[Now|So|And], what is the key of {t}?
[I forgot|I need|I lost] the key of {t}. What is it?
With [what|which] key does one open {t}?
[Please look|Look|Kindly look] up the key of {t}.
{t}: [what|which] key?
[What|Which] is the [key|password|code] [that belongs to|that goes with] {t}?
[Someone|She|He] [wants|asks for|needs] the key of {t}.
I [want|would like] to [unlock|enter] {t}. [The key|Which key|What key]?
[Who unlocks {t}, with what key|What does one need to unlock {t}]?
~ [How do I get into|What opens] {t}?
""")
FRAMES = Wordings("""
[Text|Story|Report|Notes]: {p}\\n{q}
{p}\\n{q}
[Read|Here is a report]: {p}\\n[Question|Now]: {q}
{p} {q}
[Keep this in mind|Listen]. {p} {q}
""")
score = exact


def generate(rng, held_out=False, grade=None):
    """A passage with one of the lengths of the grades; the held-out split hashes the passage."""
    return sized(rng, LENGTHS[grade - 1:grade] if grade else LENGTHS, held_out)


def sized(rng, lengths, held_out=False):
    """A passage whose number of sentences is chosen from `lengths`."""
    return on_side(lambda voice: _needle(voice, voice.rng.choice(lengths)), rng, held_out)


def _needle(voice, length):
    rng = voice.rng
    town, *others = rng.sample(TOWNS, rng.choice([1, 1, 2, 4]))
    secret, place = key(rng), rng.randint(0, length)
    passage = [sentence(rng) for _ in range(length - len(others))]
    for other in others:
        passage.insert(rng.randint(0, len(passage)), voice.say(HIDE, t=other, k=key(rng)))
    passage.insert(place, voice.say(HIDE, t=town, k=secret))
    prompt = voice.say(FRAMES, p=" ".join(passage), q=voice.say(ASK, t=town)).replace("\\n", "\n")
    meta = dict(kind=f"{length} sentences", sentences=length, place=place, distance=length - place, others=len(others))
    return Item(prompt, secret, TASK, meta, grade=_grade(length), key=f"{town} {passage}")


def key(rng):
    """A random key: four digits, or a word."""
    return f"{rng.randrange(10000):04d}" if rng.random() < 0.5 else rng.choice(THINGS)


def _grade(length):
    """The lowest grade whose passages are at least that long."""
    return next((g for g, usual in zip(GRADES, LENGTHS) if length <= usual), GRADES[-1])
