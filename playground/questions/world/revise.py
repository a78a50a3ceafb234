"""Revise: a text, questions about its parts, and successive small edits, one per turn. For training only.

An edit combines counting (which sentence is the third?), spelling (`soup` in capitals) and a long copy. Edits mostly
train the copy; separate questions train the other two skills in a dozen tokens each. Edits that `edit` holds out are
excluded.
"""
from playground.questions.world import edit
from playground.questions.world.chat import NEXT
from playground.questions.world.item import Item, Voice, is_held_out
from playground.questions.world.wording import Wordings

TASK = "revise"
TURNS = (3, 7)
LARGE = 14          # parts of a text beyond which it is only asked about, not edited
FIND = Wordings("""
[Which|What] is the {a} {u}?
[Read|Say|Give|Write|Show|Tell] me [just |only |]the {a} {u}.
[Only|Just|Nothing but] the {a} {u}[|, please].
[The {a} {u}, please|Find the {a} {u}].
Which {u} [is the {a} one|stands in the {a} place]?
""")
BEHIND = Wordings("""
[Which {u}|What] [comes|stands|follows] [right |just |][after|behind] the {a} {u}?
[Read|Say|Give|Tell] me the {u} [after|behind] the {a} one.
[The {a} {u} is followed by what|The next {u} after the {a}]?
""")
LOUD = Wordings("""
[How do you write|What is] {a} in [capitals|capital letters]?
[The word|Only the word] {a}, in [capitals|big letters].
{a} in [capitals|large letters|capital letters][|, please]?
""")


def generate(rng):
    """A conversation about one text with cumulative edits, none of them held out."""
    while True:
        voice, grade = Voice(rng), rng.choice(edit.GRADES)
        turns = conversation(voice, edit.text(voice, grade), rng.randint(*TURNS))
        if turns:
            *before, (prompt, answer) = turns
            return Item(prompt, answer, TASK, before=tuple(before))


def conversation(voice, text, length):
    """The turns [(prompt, answer)], the first with the text in it; empty if one of the edits is held out."""
    shown, asked = text, []
    for _ in range(length):
        question, answer, text = voice.rng.choice(ASKED if len(text.parts) <= LARGE else ASKED[:2])(voice, text)
        asked.append((question, answer))
        if is_held_out(f"{edit.TASK}:{shown} {text}"):
            return []
    frames = [
        voice.say(edit.FRAMES if i == 0 else NEXT, i=question, q=question, t=str(shown))
        for i, (question, _) in enumerate(asked)
    ]
    return [(frame.replace("\\n", "\n"), answer) for frame, (_, answer) in zip(frames, asked)]


def _found(voice, text):
    place, called = edit.place(voice, text)
    return voice.say(FIND, a=called, u=text.unit), text.parts[place].strip(), text


def _behind(voice, text):
    if len(text.parts) < 3:
        return _found(voice, text)
    place = voice.rng.randrange(min(len(text.parts) - 1, len(edit.ORDINALS)))
    return voice.say(BEHIND, a=edit.ORDINALS[place], u=text.unit), text.parts[place + 1].strip(), text


def _loud(voice, text):
    word = voice.rng.choice(edit.small_words(text) or ["nothing"])
    return voice.say(LOUD, a=word), word.upper(), text


def _edited(voice, text):
    done = None
    while not done or str(done[1]) == str(text):
        done = voice.rng.choice(list(edit.EDITS.values()))(voice, text)
    return done[0], str(done[1]), done[1]


ASKED = (_found, _behind, _loud, _edited, _edited)
