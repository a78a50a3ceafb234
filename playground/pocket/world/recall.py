"""Recall: a passage and a question about everything it tells, each in a turn of its own. Only training sees it.

One question about a passage of a hundred tokens teaches three tokens of answer. Asked about all of it, the same reading
teaches eight times as much of what is hardest to learn: to find the one line that a question is about. What the tasks
`context_qa` and `needle` hold out is not asked here either.
"""
from playground.pocket.world import context_qa, needle
from playground.pocket.world.chat import NEXT
from playground.pocket.world.item import Item, Voice, is_held_out
from playground.pocket.world.names import TOWNS
from playground.pocket.world.sentences import sentence

TASK = "recall"
KEYS = (4, 12)      # hidden in one passage
LENGTHS = (16, 16, 32, 64)      # sentences around them


def generate(rng):
    """A conversation about strangers, or about hidden keys; nothing in it is held out."""
    while True:
        turns = rng.choice([strangers, keys])(Voice(rng))
        if turns:
            *before, (prompt, answer) = turns
            return Item(prompt, answer, TASK, before=tuple(before))


def strangers(voice):
    """The turns of a conversation about people or towns that nobody knows; none if all of it is held out."""
    rng = voice.rng
    told = context_qa.told_of_strangers(rng, rng.choice(context_qa.GRADES[1:]))
    rng.shuffle(told)
    sentences = context_qa.with_asides(rng, context_qa.tell(rng, told))
    asked = [context_qa.question(voice, told, one) for one in rng.sample(told, len(told))]
    return _conversation(voice, (context_qa, sentences), asked)


def keys(voice):
    """The turns of a conversation about the keys of several towns; none if all of it is held out."""
    rng = voice.rng
    length, towns = rng.choice(LENGTHS), rng.sample(TOWNS, rng.randint(*KEYS))
    secret = {town: needle.key(rng) for town in towns}
    sentences = [sentence(rng) for _ in range(length - len(towns))]
    for town in towns:
        sentences.insert(rng.randint(0, len(sentences)), voice.say(needle.HIDE, t=town, k=secret[town]))
    asked = [
        (voice.say(needle.ASK, t=town), secret[town], f"{town} {sentences}") for town in rng.sample(towns, len(towns))
    ]
    return _conversation(voice, (needle, sentences), asked)


def _conversation(voice, place, asked):
    """[(prompt, answer)]: the passage with the first question in the task's own frame, then the other questions.

    place: (the task's module, sentences). asked: [(question, answer, what makes it new)].
    """
    task, sentences = place
    open_ones = [(question, answer) for question, answer, key in asked if not is_held_out(f"{task.TASK}:{key}")]
    framed = [
        voice.say(task.FRAMES if i == 0 else NEXT, p=" ".join(sentences), q=q) for i, (q, _) in enumerate(open_ones)
    ]
    return [(prompt.replace("\\n", "\n"), answer) for prompt, (_, answer) in zip(framed, open_ones)]
