"""Edit: a text of a few sentences and an instruction that changes little of it.

The answer is the whole new text, nearly all of it a copy: the task on which guessing from the prompt pays most.
"""
import re

from playground.pocket.world.item import Item, exact, on_side
from playground.pocket.world.names import COLOURS, FOODS, PEOPLE, PETS, THINGS, TRADES
from playground.pocket.world.sentences import sentence

TASK = "edit"
KINDS_OF_WORD = (COLOURS, THINGS, FOODS, PETS, TRADES)
FRAMES = [
    "{i}\nText: {t}", "Text: {t}\n{i}", "{i} {t}", "Here is a text. {t}\n{i}", "{t}\n{i}", "Edit this text. {i}\n{t}",
]
RENAME = """
Change the name {a} to {b}.
Replace {a} by {b}.
Use {b} instead of {a}.
Call {a} {b} from now on.
Write {b} where it says {a}.
Rename {a} to {b}.
{a} should be called {b}.
Put {b} in place of {a}.
Swap {a} for {b}.
Every {a} becomes {b}.
Turn {a} into {b}.
Not {a} but {b}.
""".strip().splitlines()
SWAP = """
Replace {a} by {b}.
Change {a} to {b}.
Use {b} instead of {a}.
Write {b} where it says {a}.
Swap {a} for {b}.
Put {b} in place of {a}.
Turn {a} into {b}.
Make it {b}, not {a}.
The word {a} should be {b}.
Exchange {a} for {b}.
Every {a} becomes {b}.
Not {a} but {b}.
""".strip().splitlines()
DELETE = """
Delete the {a} sentence.
Remove the {a} sentence.
Leave out the {a} sentence.
Drop the {a} sentence.
Cut the {a} sentence.
Take out the {a} sentence.
Strike the {a} sentence.
The {a} sentence has to go.
Write it without the {a} sentence.
Skip the {a} sentence.
Erase the {a} sentence.
Do not keep the {a} sentence.
""".strip().splitlines()
APPEND = """
Add at the end: {a}
Append: {a}
Put this last: {a}
End with: {a}
Add this sentence after the text: {a}
Finish with: {a}
The last sentence should be: {a}
Continue with: {a}
Write this behind it: {a}
Close with: {a}
Attach: {a}
After all that, add: {a}
""".strip().splitlines()
score = exact


def generate(rng, held_out=False):
    """A text, an instruction and the new text; split by a hash of the prompt."""
    return on_side(_edit, rng, held_out)


def _edit(rng):
    name = rng.choice(PEOPLE)
    sentences = [sentence(rng, name if rng.random() < 0.6 else None) for _ in range(rng.randint(2, 5))]
    kind = rng.choice(sorted(EDITS))
    instruction, new = EDITS[kind](rng, sentences, name)
    prompt = rng.choice(FRAMES).format(i=instruction, t=" ".join(sentences))
    return Item(prompt, " ".join(new), TASK, dict(kind=kind, before=" ".join(sentences)))


def _rename(rng, sentences, name):
    if not any(name in s for s in sentences):
        sentences[0] = f"{name} found a {rng.choice(COLOURS)} {rng.choice(THINGS)}."
    other = rng.choice([x for x in PEOPLE if x != name])
    return rng.choice(RENAME).format(a=name, b=other), [s.replace(name, other) for s in sentences]


def _swap(rng, sentences, name):
    words = [(w, kind) for kind in KINDS_OF_WORD for w in kind if re.search(rf"\b{w}\b", " ".join(sentences))]
    if not words:
        return _rename(rng, sentences, name)
    word, kind = rng.choice(words)
    other = rng.choice([w for w in kind if w != word])
    return rng.choice(SWAP).format(a=word, b=other), [re.sub(rf"\b{word}\b", other, s) for s in sentences]


def _delete(rng, sentences, name):
    place = rng.choice(["first", "last"])
    return rng.choice(DELETE).format(a=place), sentences[1:] if place == "first" else sentences[:-1]


def _append(rng, sentences, name):
    extra = sentence(rng)
    return rng.choice(APPEND).format(a=extra), sentences + [extra]


EDITS = dict(rename=_rename, swap=_swap, delete=_delete, append=_append)
