"""Context QA: a short passage, a question about it, and a span of the passage as the answer.

Most passages speak of strangers. One in twenty contradicts what the model learned by heart about the known people
and towns (`facts.py`), so it has met the conflict, but never for the attributes in `NEVER_CONTRADICTED`: there,
at test time, memory and passage really compete (`contradicting`).
"""
from playground.pocket.world import facts
from playground.pocket.world.item import Item, exact, on_side
from playground.pocket.world.names import FAR_TOWNS, KNOWN_PEOPLE, KNOWN_TOWNS, PEOPLE, STRANGERS, TOWNS

TASK = "context_qa"
CONTRADICT = 0.05
NEVER_CONTRADICTED = ("food", "good")
score = exact

VALUES = facts.VALUES | dict(town=TOWNS, ruler=PEOPLE)
FRAMES = [
    "Read this: {p} Now answer: {q}", "Text: {p}\nQuestion: {q}", "Here is a note. {p} Using the note, answer: {q}",
    "Passage: {p}\nAnswer from the passage: {q}", "Suppose that this is true: {p} Then tell me: {q}",
    "{q}\nUse this: {p}", "{p}\n{q}", "Look it up in the text. {p} {q}", "Question: {q}\nPassage: {p}",
    "According to this text, {q} {p}", "I was told: {p} So, {q}", "Find the answer in the lines below. {q}\n{p}",
]


def generate(rng, held_out=False):
    """A passage about strangers, or rarely one against the known facts; split by a hash of the whole prompt."""
    return on_side(_any, rng, held_out)


def contradicting(rng):
    """A test item on which memory and passage disagree, about attributes for which training never showed this."""
    return _passage(rng, known=True, asked=NEVER_CONTRADICTED)


def _any(rng):
    known = rng.random() < CONTRADICT
    return _passage(rng, known, asked=None)


def _passage(rng, known, asked):
    """One to three subjects with one to three statements each; one statement is asked about."""
    attributes = _attributes(rng, known, asked)
    subjects = rng.sample(_subjects(known, attributes), rng.choice([1, 2, 2, 3]))
    told = [(x, a, _value(rng, x, a)) for x in subjects for a in _some(rng, attributes)]
    rng.shuffle(told)
    subject, attribute, value = rng.choice(told)
    passage = " ".join(rng.choice(facts.STATEMENTS[a]).format(x=x, v=v) for x, a, v in told)
    question = rng.choice(facts.QUESTIONS[attribute]).format(x=subject)
    meta = dict(kind="contradicts" if known else "strangers", passage=passage, memory=_memory(subject, attribute))
    return Item(rng.choice(FRAMES).format(p=passage, q=question), value, TASK, meta)


def _attributes(rng, known, asked):
    group = facts.OF_PERSON if rng.random() < 0.6 else facts.OF_TOWN
    allowed = asked or [a for a in group if not (known and a in NEVER_CONTRADICTED)]
    return [a for a in group if a in allowed]


def _subjects(known, attributes):
    person = attributes[0] in facts.OF_PERSON
    return (KNOWN_PEOPLE if person else KNOWN_TOWNS) if known else (STRANGERS if person else FAR_TOWNS)


def _some(rng, attributes):
    return rng.sample(attributes, rng.randint(1, min(3, len(attributes))))


def _value(rng, subject, attribute):
    """A value for the passage, never the one the country's facts have."""
    return rng.choice([v for v in VALUES[attribute] if v != _memory(subject, attribute)])


def _memory(subject, attribute):
    """What the country's facts say, None for a stranger."""
    return facts.COUNTRY.get(subject, {}).get(attribute)
