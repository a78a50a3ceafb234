"""Context QA: a short passage, a question about it, and a span of the passage as the answer.

Most passages are about strangers. One in twenty contradicts the memorised facts about the known people and towns
(`facts.py`), so the conflict occurs in training, but never for the attributes in `NEVER_CONTRADICTED`. One in ten
agrees with the facts, for all attributes. At test time memory and passage compete (`contradicting`, `agreeing`).

Grades: 1 one subject; 2 several subjects, no two with the same attribute; 3 several subjects with the same attributes,
so that the answer depends on the subject; 4 more subjects, with unrelated sentences in between. From grade 2 on, a
question may ask for the subject of a value.
"""
from collections import Counter
from dataclasses import dataclass
from functools import partial

from playground.questions.world import facts
from playground.questions.world.attributes import DOES, OF_PERSON, OF_TOWN, QUESTIONS, STATEMENTS, VALUES
from playground.questions.world.item import Item, Voice, exact, on_side
from playground.questions.world.names import FAR_TOWNS, KNOWN_PEOPLE, KNOWN_TOWNS, STRANGERS
from playground.questions.world.sentences import sentence
from playground.questions.world.wording import Wordings

TASK = "context_qa"
GRADES = (1, 2, 3, 4)
CONTRADICT, AGREE = 0.05, 0.10
NEVER_CONTRADICTED = ("food", "good")
BACKWARDS = 0.25                    # share of questions for the subject of a value, if the value is unique
SUBJECTS = {1: (1, 1), 2: (2, 3), 3: (2, 3), 4: (4, 5)}
score = exact

FRAMES = Wordings("""
[Read|Look at|Consider] this[| text| note| carefully]: {p} [Now answer|Then answer|Answer|Now say]: {q}
[Text|Passage|Note|Story|Report]: {p}\\n[Question|Q|Asked]: {q}
Here is [a note|a text|a message|a passage]. {p} [Using it|Using the note|From it|With its help], answer: {q}
[Passage|Text]: {p}\\nAnswer from the [passage|text|lines above]: {q}
[Suppose|Imagine|Let us say] that this is true: {p} [Then tell me|What then]: {q}
{q}\\n[Use|Read|See] this: {p}
{p}\\n{q}
{p} {q}
[Look it up|Find it] in the [text|passage|note]. {p} {q}
[Question|Q]: {q}\\n[Passage|Text|Source]: {p}
According to this [text|note|letter], {q} {p}
[I was told|They say|It is written|I read]: {p} [So,|And now:|So tell me:] {q}
Find the answer in the lines [below|that follow]. {q}\\n{p}
[From a letter|From a book|From the paper]: "{p}" {q}
~ [Someone wrote|My aunt wrote]: {p} [What do you make of it?|Help me.] {q}
~ [After reading|Having read] "{p}", answer [me |]this: {q}
""")
WHO = Wordings("""
Who {does}?
[Which person|Which of them|What person] {does}?
[Name|Tell me|Find] the [person|one] who {does}.
[Do you see|Can you tell me] who {does}?
The text speaks of somebody who {does}. Who is [it|that]?
~ [Point out|Pick] the person who {does}.
""")
WHICH = Wordings("""
Which [town|place] {does}?
[What|Which] is the [town|place] that {does}?
[Name|Tell me|Find] the [town|place] that {does}.
[Do you see|Can you tell me] which town {does}?
The text speaks of a town that {does}. Which is [it|that]?
~ [Point out|Pick] the town that {does}.
""")


@dataclass(frozen=True)
class Statement:
    """One statement of a passage."""
    subject: str
    attribute: str
    value: str

    def __str__(self):
        """Part of the key that is hashed for the split, in the form that the bundled models were trained with."""
        return f"Told(subject={self.subject!r}, attribute={self.attribute!r}, value={self.value!r})"


def generate(rng, held_out=False, grade=None):
    """A passage about strangers, or rarely about known facts; the held-out split hashes its content and question."""
    return on_side(partial(_strangers, grade=grade) if grade else _any, rng, held_out)


def contradicting(rng):
    """A test item whose passage contradicts the facts, for attributes that are never contradicted in training."""
    group = rng.choice([facts.OF_PERSON, facts.OF_TOWN])
    attributes = [a for a in group if a in NEVER_CONTRADICTED]
    statements = [
        Statement(x, a, _other(rng, x, a)) for x in rng.sample(_known(group), rng.randint(1, 3)) for a in attributes
    ]
    return _item(Voice(rng), statements, "contradicts")


def agreeing(rng):
    """A test item whose passage agrees with the memorised facts."""
    return _item(Voice(rng), _true(rng), "agrees")


def _any(voice):
    chance = voice.rng.random()
    if chance < CONTRADICT:
        return _item(voice, _false(voice.rng), "contradicts")
    if chance < CONTRADICT + AGREE:
        return _item(voice, _true(voice.rng), "agrees")
    return _strangers(voice, voice.rng.choice(GRADES))


def _strangers(voice, grade):
    return _item(voice, about_strangers(voice.rng, grade), "strangers", grade)


def _false(rng):
    """Statements against the known facts, about one to three subjects, except for `NEVER_CONTRADICTED`."""
    group = rng.choice([facts.OF_PERSON, facts.OF_TOWN])
    allowed = [a for a in group if a not in NEVER_CONTRADICTED]
    return [
        Statement(x, a, _other(rng, x, a))
        for x in rng.sample(_known(group), rng.randint(1, 3))
        for a in _some(rng, allowed, 3)
    ]


def _true(rng):
    """Statements that repeat the known facts."""
    group = rng.choice([facts.OF_PERSON, facts.OF_TOWN])
    return [
        Statement(x, a, memory(x, a))
        for x in rng.sample(_known(group), rng.randint(1, 3))
        for a in _some(rng, group, 3)
    ]


def about_strangers(rng, grade):
    """Statements about strangers or far towns, of the difficulty of a grade."""
    attributes, pool = rng.choice([(OF_PERSON, STRANGERS), (OF_PERSON, STRANGERS), (OF_TOWN, FAR_TOWNS)])
    subjects = rng.sample(pool, rng.randint(*SUBJECTS[grade]))
    if grade < 3:
        kinds = rng.sample(attributes, min(len(attributes), len(subjects) * rng.randint(1, 3)))
        return [Statement(subjects[i % len(subjects)], a, _other(rng, None, a)) for i, a in enumerate(kinds)]
    shared = _some(rng, attributes, 3 if grade == 3 else 2)
    return [statement for a in shared for statement in _shared(rng, subjects, a)]


def _shared(rng, subjects, attribute):
    """The same attribute of every subject, with different values if there are enough."""
    values = rng.sample(VALUES[attribute], min(len(subjects), len(VALUES[attribute])))
    return [Statement(x, attribute, values[i % len(values)]) for i, x in enumerate(subjects)]


def _item(voice, statements, kind, grade=2):
    """The passage of some statements, and a question about one of them."""
    rng = voice.rng
    rng.shuffle(statements)
    asked = rng.choice(statements)
    sentences = tell(rng, statements)
    passage = " ".join(with_asides(rng, sentences) if grade == 4 else sentences)
    asks, answer, key = question(voice, statements, asked, kind == "strangers" and grade > 1)
    remembered = memory(asked.subject, asked.attribute)
    meta = dict(kind=kind, passage=passage, question=asks, memory=remembered, attribute=asked.attribute)
    prompt = voice.say(FRAMES, p=passage, q=asks).replace("\\n", "\n")
    return Item(prompt, answer, TASK, meta, grade, key=key)


def question(voice, statements, asked, either_way=True):
    """(question, answer, key of the held-out split) for one of the statements.

    With `either_way`, the question sometimes asks for the subject of the value.
    """
    backwards = either_way and _only_one(statements, asked) and voice.rng.random() < BACKWARDS
    return *(_backwards if backwards else ask)(voice, asked), f"{sorted(map(str, statements))} {asked} {backwards}"


def tell(rng, statements):
    """One sentence for every statement."""
    return [STATEMENTS[t.attribute].draw(rng).format(x=t.subject, v=t.value) for t in statements]


def with_asides(rng, sentences):
    """The sentences, with unrelated ones in between."""
    return [text for stated in sentences for text in ([stated, sentence(rng)] if rng.random() < 0.4 else [stated])]


def ask(voice, asked):
    """A question for the value. Wordings of `facts` that are held out there may be used here."""
    wordings = QUESTIONS[asked.attribute]
    known = asked.attribute in facts.QUESTIONS
    return (
        wordings.any(voice.rng).format(x=asked.subject) if known else voice.say(wordings, x=asked.subject)
    ), asked.value


def _backwards(voice, asked):
    does = DOES[asked.attribute].draw(voice.rng).format(v=asked.value)
    return voice.say(WHO if asked.attribute in OF_PERSON else WHICH, does=does), asked.subject


def _only_one(statements, asked):
    """Whether only one subject has the value that is asked about."""
    return Counter((t.attribute, t.value) for t in statements)[asked.attribute, asked.value] == 1


def _known(attributes):
    return KNOWN_PEOPLE if attributes[0] in facts.OF_PERSON else KNOWN_TOWNS


def _some(rng, attributes, most):
    return rng.sample(attributes, rng.randint(1, min(most, len(attributes))))


def _other(rng, subject, attribute):
    """A random value for the passage that differs from the facts of the country."""
    return rng.choice([v for v in VALUES[attribute] if v != memory(subject, attribute)])


def memory(subject, attribute):
    """The value in the facts of the country, None for a stranger."""
    return facts.COUNTRY.get(subject, {}).get(attribute)
