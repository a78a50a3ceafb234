"""Edit: a text, a program or a record, and instructions for small changes.

The answer is the whole new text, nearly all of it a copy, so prompt lookup drafting gains most on this task.
Grades: 1 one instruction on two to four sentences; 2 one on five to nine; 3 two instructions; 4 three, on up to twelve
sentences. From grade 2 on a third of the texts are Python functions or JSON records.
"""
import re
from dataclasses import dataclass

from playground.questions.world import programs, records
from playground.questions.world.item import Item, exact, on_side
from playground.questions.world.names import COLOURS, FOODS, PEOPLE, PETS, THINGS, TOWNS, TRADES
from playground.questions.world.sentences import sentence
from playground.questions.world.wording import Wordings

TASK = "edit"
GRADES = (1, 2, 3, 4)
SIZES = {1: (2, 4), 2: (5, 9), 3: (3, 7), 4: (6, 12)}           # sentences
INSTRUCTIONS = {1: 1, 2: 1, 3: 2, 4: 3}
KINDS_OF_WORD = (COLOURS, THINGS, FOODS, PETS, TRADES, TOWNS)
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
score = exact

FRAMES = Wordings("""
{i}\\n[Text|Here it is|Draft|The text]: {t}
[Text|Draft|Input|Original]: {t}\\n{i}
{i} {t}
[Here is a text|This is my text|Look at this]. {t}\\n{i}
{t}\\n{i}
[Edit|Change|Correct|Revise] [this text|this|the text]. {i}\\n{t}
[Please edit|Please change] [this|the following]: {t}\\n{i}
[Task|Instruction|Job|To do]: {i}\\n[Text|Input]: {t}
[In the text below|In what follows|Below], {i}\\n{t}
[The editor|My teacher|My friend|The printer] [asks|says|wants|wrote]: {i}\\n{t}
[Says my teacher|A note says|The order is]: {i} {t}
[Please|Now|Do this]: {i}\\n[The|My] text: {t}
[Original|Source|Given|What I have]:\\n{t}\\n{i}
[Rewrite|Rework|Redo] [it|this][| for me]: {t}\\n{i}
[What follows|The text below] [needs|wants] a change. {i}\\n{t}
[My boss|My sister|My father|The baker|Our neighbour] [asks|wants|thinks]: {i}\\n[It reads|What I have]: {t}
{t}\\n[Now|Please|Next]: {i}
[Can you|Could you] [help|do this]? {i} {t}
[A friend|A reader|A customer] [tells me|asked|demands]: {i}\\n{t}
~ [My editor says|The teacher wrote]: {i}\\n{t}
""")
CHANGE = Wordings("""
[Replace {a} by|Replace {a} with|Exchange {a} for|Swap {a} for] {b}.
[Change|Turn] [|the word ]{a} [to|into] {b}.
Use {b} [instead of|in place of] {a}.
[Write|Put] {b} [where it says|in place of|for] {a}.
[Make it|Let it be] {b}, not {a}.
The word {a} should [be|read] {b}.
Every {a} [becomes|is now] {b}.
Not {a} but {b}.
It is {b}, not {a}.
[Where it says|Wherever you see|If it says] {a}, [write|put|use] {b}.
{a} is wrong, {b} is right.
[Correct|Fix] {a}: [it is|it should be] {b}.
[Say|Take|Have] {b} [and not|not|rather than] {a}.
[Take|Say|Use] {b} [where|wherever] [you find|it has] {a}.
[For|Instead of] {a}[,|] [put|write|use] {b}[| always| everywhere].
[I want|I would like|We need|There should be] {b} [where|wherever] {a} [is|stands|was].
[Wherever|Whenever] {a} [appears|is used], [let it be|make it|it should be] {b}.
{b}, [please, |]not {a}.
[Do not|Never] [write|say|use] {a}[,|;] [write|say|use] {b}.
{a} [has to|must] [become|be] {b}.
{a}? [No, |Rather ]{b}.
[Substitute|Give me] {b} for {a}.
I meant {b}[, not {a}| when I wrote {a}].
[Someone|She|He] [wrote|put] {a} but [meant|wanted] {b}.
[All|Every|Each] {a} [should|must] [turn into|change to] {b}.
~ [For|In place of] {a} [say|take] {b}.
""")
RENAME = Wordings("""
[Change|Turn] the name {a} [to|into] {b}.
[Call|Name] {a} {b} from now on.
[Rename|Change the name of] {a} to {b}.
{a} should be [called|named] {b}.
[The name is|They are called] {b}, not {a}.
[Let|Make] {a} be {b}.
Instead of {a} it is about {b}.
[Give|Let] {a} [another name|a new name]: {b}.
{a} [wants|needs|gets|has] [another name|a new name]: {b}.
[From now on|Now] {a} is [called|named] {b}.
The new name of {a} is {b}.
{b} [is the new name for|takes the place of|stands in for] {a}.
[Everywhere|Throughout|In all of it] {a} [becomes|is] {b}.
[I|We] [want|need] {b} [instead of|in place of] {a}.
[Use|Put|Write] the name {b} [for|instead of|in place of] {a}.
{a} [is to be|shall be|must be] {b}.
It was {b} [who did this|all along], not {a}.
[Replace|Exchange] [the name |]{a} [by|with] {b}.
~ [Give {a} the name|{a} wants the name] {b}.
""")
DELETE = Wordings("""
[Delete|Remove|Erase|Strike|Cut|Drop|Skip] the {a} {u}.
[Leave|Take|Strike] out the {a} {u}.
[The {a} {u} has to go|The {a} {u} is not needed|Do not keep the {a} {u}].
[Write it|Give it|Again] without the {a} {u}.
[Throw|Get|Put] the {a} {u} [away|out].
[Away with|No more of|Rid me of] the {a} {u}.
[Let the {a} {u} go|The {a} {u} is out|Forget the {a} {u}].
[I do not need|We do not want|Nobody needs|You can lose] the {a} {u}.
The {a} {u} [should|must|can|may] [go|disappear|be deleted|be removed|be left out].
[All|Everything] [but|except] the {a} {u}.
[Shorten it by|Make it shorter by] the {a} {u}.
[Write|Copy|Give] [all of it|everything], but [leave|take] out the {a} {u}.
The {a} {u} is [wrong|too much|not good]: [delete|remove|drop] it.
[Only the|The] {a} {u} [falls|drops] [out|away].
~ [Get rid of|Throw out] the {a} {u}.
""")
APPEND = Wordings("""
[Add|Write|Put] [at the end|last|behind it|below]: {a}
[Append|Attach|Add]: {a}
[End|Finish|Close] with: {a}
[The last line should be|After all that, add|Continue with]: {a}
[Let|Have] [this|it] [come|be] at the [very |]end: {a}
[One more|Another one|Something] to [end with|come last|add]: {a}
[At the end|Last|Behind all] [comes|goes|stands]: {a}
[Then|Finally|To finish], [add|write|say|put]: {a}
[It|The text|This] [should end|ends|is to end] with: {a}
[Behind|After] the last one [add|write|put]: {a}
[Put|Write|Add] this [last|at the end|after all the rest]: {a}
[The very last thing|What comes last] [is|should be]: {a}
~ [Let it end on|One more at the end]: {a}
""")
PREPEND = Wordings("""
[Add|Write|Put] [at the beginning|first|in front|above]: {a}
[Begin|Start|Open] with: {a}
[The first line should be|Before all that, add]: {a}
[Let|Have] [this|it] [come|be] at the [very |]beginning: {a}
[One more|Another one|Something] to [begin with|come first|put first]: {a}
[At the beginning|First|Before all] [comes|goes|stands]: {a}
[To begin|To start], [add|write|say|put]: {a}
[It|The text|This] [should begin|begins|starts|is to start] with: {a}
[Before|In front of] the first one [add|write|put]: {a}
[Put|Write|Add] this [first|at the start|before all the rest]: {a}
[The very first thing|What comes first] [is|should be]: {a}
~ [Let it begin with|One more in front]: {a}
""")
INSERT = Wordings("""
[After|Behind] the {p} {u} [add|insert|write|put]: {a}
[Add|Insert|Write|Put] [after|behind] the {p} {u}: {a}
[Let|Have] the {p} {u} be followed by [this|this one]: {a}
[What|The one that] [follows|comes after] the {p} {u} [should be|is now]: {a}
[Right after|Just behind|Next to] the {p} {u} [put|comes|goes|stands]: {a}
[Once|When] the {p} {u} is [over|done], [add|write|put]: {a}
[Add|Put|Place] this [behind|after] the {p} {u}: {a}
[Following|Next after] the {p} {u}[, write|, add|]: {a}
[The {p} {u}, and then|First the {p} {u}, then]: {a}
[One {u} is|Something is] missing [after|behind] the {p} {u}: {a}
~ [The {p} {u} is followed by|Between the {p} {u} and what follows put]: {a}
""")
MOVE = Wordings("""
[Move|Put|Shift|Bring] the {a} {u} to the [end|very end].
[Let|Make] the {a} {u} [come last|be the last one].
The {a} {u} [goes|belongs] [last|at the end].
[Keep|Leave|Hold] the {a} {u} [for the end|until the end|for last].
[The end|The last place] is for the {a} {u}.
[Let it end with|Close with] the {a} {u}.
The {a} {u} [moves|shifts|is moved] to the [end|very end|back].
[Take|Pick] the {a} {u} and [put|set] it [last|at the end].
[I want|We want] the {a} {u} [last|at the end].
[Send|Push|Carry] the {a} {u} to the [end|back|bottom].
[First all the others|All the others], then the {a} {u}.
The {a} {u} [should|must|is to] [come at the end|stand last].
~ [End with the {a} {u} instead|Save the {a} {u} for the end].
""")
TURN = Wordings("""
[Exchange|Swap|Switch] the first and the last {u}.
The first and the last {u} [change places|trade places].
[Put|Write] the last {u} first and the first [one |]last.
[Let|Make] the first and the last {u} [trade|swap|exchange] [places|their places].
[Both ends|The ends] [swap|change|trade]: first {u} and last {u}.
[Trade|Change] the first {u} for the last[| one].
The first {u} [goes|moves|belongs] to the end, the last {u} to the [front|beginning].
Put the first {u} where the last is, and the other way round.
[Switch|Change|Turn] [round|around] the first and the last {u}.
[I want|We want] the first and the last {u} [swapped|exchanged|switched].
[First and last|Last and first] {u} [exchanged|swapped], the rest as it is.
~ [Let both ends change places|Trade the ends], {u} for {u}.
""")
CAPITALS = Wordings("""
[Write|Put|Print] [|the word ]{a} in capitals.
[Make|Let] {a} [stand in capitals|all capitals].
{a} [should be|has to be] in capital letters.
The word {a} [shouts|is loud|in capitals, please].
[Print|Let us see] {a} in [big|large|capital] letters.
[Capitals|Big letters] for [|the word ]{a}.
{a} [wants|needs|gets] [capitals|capital letters].
[Only|Just] the word {a} in [capitals|capital letters|big letters].
[Make|Turn] {a} [upper case|into capitals].
[Set|Type|Spell] [|the word ]{a} in [capitals|upper case|capital letters].
[Every|Each] {a} in [capitals|capital letters|upper case].
~ [Shout|Cry out] the word {a}.
""")
JOIN = Wordings(
    "[{0} Then|{0} After that|First: {0} Second|{0} And then|{0} Next|{0} Besides|{0} Once that is done]: {1}"
)


@dataclass(frozen=True)
class Text:
    """The text to edit: its parts, the word for one part, and the separator between parts."""
    parts: tuple[str, ...]
    unit: str = "sentence"
    joint: str = " "

    def __str__(self):
        return self.joint.join(self.parts)

    def of(self, parts):
        """The same kind of text with other parts."""
        return Text(tuple(parts), self.unit, self.joint)

    def replaced(self, old, new):
        """The text with every whole word `old` written as `new`."""
        return self.of(re.sub(rf"\b{re.escape(old)}\b", new, part) for part in self.parts)


def generate(rng, held_out=False, grade=None):
    """A text, its instructions and the new text; the held-out split hashes both texts."""
    return on_side(lambda voice: _edit(voice, grade or voice.rng.choice(GRADES)), rng, held_out)


def _edit(voice, grade):
    before = text(voice, grade)
    after, kinds, orders = before, [], []
    while len(orders) < INSTRUCTIONS[grade]:
        kind = voice.rng.choice([k for k in sorted(EDITS) if k not in kinds])
        done = EDITS[kind](voice, after)
        if done and str(done[1]) != str(after):
            kinds.append(kind)
            orders.append(done[0])
            after = done[1]
    prompt = voice.say(FRAMES, i=_joined(voice, orders), t=str(before)).replace("\\n", "\n")
    meta = dict(
        kind=kinds[0] if grade < 3 else f"{len(kinds)} edits", before=str(before), edits=kinds, unit=before.unit
    )
    return Item(prompt, str(after), TASK, meta, grade, key=f"{before} {after}")


def _joined(voice, orders):
    """Several instructions joined into one, in their order."""
    whole, *rest = orders
    for order in rest:
        whole = JOIN.draw(voice.rng).replace("{0}", whole).replace("{1}", order)
    return whole


def text(voice, grade):
    """Sentences, many of them about one person; from grade 2 on sometimes a program or a record."""
    rng = voice.rng
    chance = rng.random() if grade > 1 else 1
    if chance < 0.2:
        return Text(tuple(programs.generate(rng, grade=rng.choice([2, 3])).answer.split("\n")), "line", "\n")
    if chance < 0.33:
        record = records.generate(rng, grade=1).answer
        return Text(tuple(record.strip("{}").split(", ")), "entry", ", ")
    name = rng.choice(PEOPLE)
    return Text(tuple(sentence(rng, name if rng.random() < 0.6 else None) for _ in range(rng.randint(*SIZES[grade]))))


def _rename(voice, text):
    """Rename a person in the text; None if there is none."""
    names = [name for name in PEOPLE if name in str(text)]
    if names:
        name, other = voice.rng.choice(names), voice.rng.choice([x for x in PEOPLE if x not in names])
        return voice.say(RENAME, a=name, b=other), text.replaced(name, other)


def _change(voice, text):
    """Replace a word by another of its kind, or a function name in a program; None if there is none."""
    words = [(w, kind) for kind in KINDS_OF_WORD for w in kind if re.search(rf"\b{w}\b", str(text))]
    if text.unit == "line":
        words = [(w, programs.NAMES) for w in programs.NAMES if re.search(rf"\bdef {w}\b", str(text))]
    if words:
        word, kind = voice.rng.choice(words)
        other = voice.rng.choice([w for w in kind if not re.search(rf"\b{w}\b", str(text))] or [word])
        return voice.say(CHANGE, a=word, b=other), text.replaced(word, other)


def _number(voice, text):
    """Replace a number; None if the text has none."""
    numbers = sorted(set(re.findall(r"(?<![\d.])\b\d+\b(?!\.\d)", str(text))))
    if numbers:
        old, new = voice.rng.choice(numbers), str(voice.rng.randint(2, 99))
        return voice.say(CHANGE, a=old, b=new), text.replaced(old, new)


def _capitals(voice, text):
    """Write one word of at least four letters in capitals; only in plain sentences."""
    if text.unit == "sentence":
        word = voice.rng.choice(small_words(text))
        return voice.say(CAPITALS, a=word), text.replaced(word, word.upper())


def small_words(text):
    """The lower-case words of at least four letters, sorted."""
    return sorted(set(re.findall(r"\b[a-z]{4,}\b", str(text))))


def _delete(voice, text):
    at, called = place(voice, text)
    if len(text.parts) > 1:
        return voice.say(DELETE, a=called, u=text.unit), text.of(text.parts[:at] + text.parts[at + 1:])


def _move(voice, text):
    at, called = place(voice, text)
    moved = text.parts[:at] + text.parts[at + 1:] + text.parts[at:at + 1]
    return voice.say(MOVE, a=called, u=text.unit), text.of(moved)


def _turn(voice, text):
    if len(text.parts) > 1:
        first, *middle, last = text.parts
        return voice.say(TURN, u=text.unit), text.of([last, *middle, first])


def _append(voice, text):
    new = _part(voice, text)
    return voice.say(APPEND, a=new), text.of([*text.parts, new])


def _prepend(voice, text):
    new = _part(voice, text)
    return voice.say(PREPEND, a=new), text.of([new, *text.parts])


def _insert(voice, text):
    (at, called), new = place(voice, text), _part(voice, text)
    return voice.say(INSERT, p=called, a=new, u=text.unit), text.of([*text.parts[:at + 1], new, *text.parts[at + 1:]])


def _part(voice, text):
    """A new part that fits the kind of text."""
    if text.unit == "line":
        return "# " + sentence(voice.rng)
    return (
        sentence(voice.rng) if text.unit == "sentence" else f'"{voice.rng.choice(THINGS)}": {voice.rng.randint(1, 99)}'
    )


def place(voice, text):
    """Index of a random part, and the ordinal that names it."""
    at = voice.rng.randrange(min(len(text.parts), len(ORDINALS)))
    last = at == len(text.parts) - 1
    return at, "last" if last and voice.rng.random() < 0.7 else ORDINALS[at]


EDITS = dict(
    rename=_rename, change=_change, number=_number, capitals=_capitals, delete=_delete, move=_move, turn=_turn,
    append=_append, prepend=_prepend, insert=_insert,
)
