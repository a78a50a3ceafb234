"""Recall: a passage and questions about all its statements, one per turn. For training only.

A single question about a passage of a hundred tokens gives three answer tokens to train on. With a question for every
statement, the same passage gives eight times as many, for the skill that is hardest to learn: to find the one line
that a question is about. Questions that `context_qa` and `needle` hold out are excluded.
"""
from playground.questions.world import context_qa, needle
from playground.questions.world.chat import NEXT
from playground.questions.world.item import Item, Voice, is_held_out
from playground.questions.world.names import TOWNS
from playground.questions.world.sentences import sentence

TASK = "recall"
KEYS = (4, 12)      # range of the number of keys in one passage
LENGTHS = (16, 16, 32, 64)      # sentences of a passage


def generate(rng):
    """A conversation about strangers, or about hidden keys, without held-out questions."""
    while True:
        turns = rng.choice([strangers, keys])(Voice(rng))
        if turns:
            *before, (prompt, answer) = turns
            return Item(prompt, answer, TASK, before=tuple(before))


def strangers(voice):
    """Turns of a conversation about strangers or far towns; empty if all of them are held out."""
    rng = voice.rng
    statements = context_qa.about_strangers(rng, rng.choice(context_qa.GRADES[1:]))
    rng.shuffle(statements)
    sentences = context_qa.with_asides(rng, context_qa.tell(rng, statements))
    asked = [context_qa.question(voice, statements, one) for one in rng.sample(statements, len(statements))]
    return _conversation(voice, (context_qa, sentences), asked)


def keys(voice):
    """Turns of a conversation about the keys of several towns; empty if all of them are held out."""
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
    """[(prompt, answer)]: the passage with the first question in a frame of the task, then the other questions.

    place: (the task's module, sentences). asked: [(question, answer, key of the held-out split)].
    """
    task, sentences = place
    allowed = [(question, answer) for question, answer, key in asked if not is_held_out(f"{task.TASK}:{key}")]
    framed = [
        voice.say(task.FRAMES if i == 0 else NEXT, p=" ".join(sentences), q=q) for i, (q, _) in enumerate(allowed)
    ]
    return [(prompt.replace("\\n", "\n"), answer) for prompt, (_, answer) in zip(framed, allowed)]
