"""Arithmetic: graded word problems with step-by-step solutions, and drills.

A problem is a chain of sentences. Every sentence contributes its steps, so the generator also writes the solution,
which ends in `#### n`. Grade 1 has one step, 2 two, 3 three; 4 has four and compares two people; 5 has five, larger
numbers and sentences with irrelevant numbers. Three in ten items are drills without a story, graded by the size of the
numbers. They teach the tables that the problems require, so a single sum is held out only in its wording.
"""
import re
from dataclasses import dataclass, field

from playground.questions.world.item import Item, on_side
from playground.questions.world.names import BOYS, COUNTED, GIRLS, PEOPLE
from playground.questions.world.wording import Wordings

TASK = "arithmetic"
GRADES = (1, 2, 3, 4, 5)
DRILLS = 0.3
# lowest grade that compares two people, and lowest grade with irrelevant numbers
COMPARED, DISTRACTED = 4, 5
DO = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y, "/": lambda x, y: x // y}

START = Wordings("""
{n} [has|owns|counts|starts with|collected|can see] {a} {o}.
There are {a} {o} in the [box|bag|basket|drawer|pocket] of {n}.
[On Monday|In the morning|At first|Yesterday|To begin with] {n} [had|has] {a} {o}.
{n} keeps {a} {o} in a [bag|box|basket|jar].
{n} [brought|carried|took] {a} {o} to the [market|school|fair].
[You see|Here is|This is] {n} with {a} {o}.
{a} {o} belong to {n}.
{n} [has got|holds|owned|had|possesses] {a} {o}[| at first| to begin with| in the morning].
[There is|We meet|Look at|Think of] {n}, who [has|owns|holds] {a} {o}.
{a} {o} [are|lie|wait] [in front of|beside|with|before] {n}.
[The picture shows|Let us say there is] {n} with {a} {o} on the [table|floor|cart].
{n} [finds|picks|gathers] {a} {o} in the [wood|garden|attic].
~ [Imagine|Picture] {n} with {a} {o}.
""")
BAGS = Wordings("""
{n} [has|owns|carries] {k} [bags|boxes|baskets] with {c} {o} each.
{n} [buys|gets|packs] {k} [boxes|bags|jars] of {c} {o}.
There are {k} rows of {c} {o} in the [garden|yard|room] of {n}.
{n} fills {k} [baskets|bags|jars] with {c} {o} each.
Each of the {k} [bags|boxes] of {n} holds {c} {o}.
{n} gets {c} {o} a day for {k} days.
{n} [packs|counts] {k} times {c} {o}.
{k} friends give {n} {c} {o} each.
{k} [bags|boxes|baskets|sacks|jars] [with|of] {c} {o} each [stand|lie|wait] [beside|with|in front of] {n}.
{n} has {k} [trays|nets|shelves|sacks], and [each|every one] holds {c} {o}.
[In|On] each of {k} [trays|shelves|bags|nets] {n} has {c} {o}.
{n} [sees|owns|finds] {k} [groups|heaps|rows|piles] of {c} {o}.
{c} {o} [lie|are] in each of the {k} [drawers|sacks|boxes] of {n}.
~ {k} [trays|nets] of {c} {o} each stand before {n}.
""")
GAIN = Wordings("""
[Then|Later|Soon|After that|In the evening|Next] {n} [finds|gets|buys|receives|wins|earns|makes|adds] {b} more[| {o}].
{m} [gives|brings|sends|hands] {n} {b} {o}.
[Then|Later|Soon] {b} {o} are added.
{n} [picks up|puts in|gathers|collects] {b} {o}.
[A friend|A neighbour|An uncle|A teacher] [leaves|gives|brings] {n} {b} {o}.
[For a birthday|As a gift|As a prize] {n} gets {b} {o}.
{b} [more|further|other|new] {o} [come|arrive|turn up|follow].
[Then|Later|Soon] there [come|are] {b} more {o}[| as well| too| on top].
{b} {o} [come|go] [to them|into the bag|to the others][| as well].
{n} [also|even] [gets|finds|buys|has] {b} {o} more.
[And|Then|Later] {b} {o} [from {m}|from a friend|from the market] [come with them|are put on top|go along].
[On top of that|As well as that|Besides], {n} [gets|finds|wins] {b} {o}.
{m} [adds|puts down|throws in] {b} {o}[| as well].
[One day|At noon|At night] {n} [is given|is sent|is handed] {b} {o}.
~ {b} {o} [come on top|come along as well].
""")
LOSS = Wordings("""
[Then|Later|Soon|After that|In the evening|Next] {n} [loses|sells|drops|uses|breaks|eats or gives away] {b}[| {o}].
{n} [gives|lends|sells|hands] {b} {o} to {m}.
{m} [takes|steals|borrows|gets] {b} of them.
{b} {o} are taken away[| by {m}].
{n} [drops|throws] {b} {o} in the [river|well|ditch].
[Then|By noon|In the night] {b} of the {o} are [gone|lost|broken].
{n} [leaves|forgets] {b} {o} at [home|school|the inn].
{b} {o} [fall|roll|drop] [into the river|under the table|down the well|on the floor and break].
[Then|Later|In the night] {b} of them [are missing|are stolen|get lost|go away|fall down].
{n} [is missing|misses|cannot find] {b} of them.
[Out of the bag|Through a hole|On the way] {b} {o} [get lost|are lost|drop].
A [dog|thief|goat|bird] [takes|eats|steals] {b} of them.
[Sadly|One day|At noon] {b} {o} [break|are broken|are used up|go].
{b} {o} [go to|are given to|are sold to] {m}.
{n} [pays|spends|gives up|hands over] {b} of them.
~ {b} {o} [fall out of the bag|go missing].
""")
MORE = Wordings("""
{n} [buys|gets|finds] {k} [bags|boxes|jars] of {c} {o}.
{m} [brings|gives] {k} [boxes|bags] with {c} {o} each.
[Then|Later] {k} friends [add|bring] {c} {o} each.
{n} [finds|makes] {k} piles of {c} {o}.
{n} [earns|collects] {c} {o} a day for {k} days.
{k} [children|people|cousins|boys] [come and|then] [give|hand] {n} {c} {o} each.
[Then|Later|Soon] come {k} [carts|sacks|trays] with {c} {o} [each|in each].
{m} [carries|sends] in {k} [trays|baskets|carts] of {c} {o}[| each].
[Each|Every one] of {k} [children|friends|neighbours] [adds|leaves|brings] {c} {o}.
{n} [wins|gets] {k} times {c} {o} more.
~ {k} [carts|children] bring {c} {o} each.
""")
TIMES = Wordings("""
[Then|Soon|By magic] the number grows {k} times as large.
{m} has {k} times as many, and [they swap|they change places].
By magic every one of them becomes {k}.
{n} trades each of them for {k} new {o}.
[Soon|Then|Now] there are {k} times as many[| of them].
[Suddenly|At once|In a moment] {n} has {k} times the number.
[By luck|By magic|All of a sudden] it is {k} times as much.
{n} now has {k} times what was there.
[A wizard|A fairy] makes {k} out of [each|every one].
~ [All at once|Suddenly] there are {k} times as many.
""")
SHARE = Wordings("""
[Then|Later] {n} [shares|divides] all of them [equally|evenly], {k} people in all, and keeps one share.
{n} puts them in {k} equal [piles|bags] and keeps one of them.
{k} friends share them [equally|evenly], and {n} is one of the friends.
Only one of {k} equal parts stays with {n}.
[Then|Later|Soon] all of them are [shared|divided|split] [among|between] {k} people, and {n} [keeps|has|gets] one share.
{n} [splits|divides|cuts] them into {k} equal [parts|heaps|shares] and [has|keeps|takes] one.
They are [shared|divided|dealt] {k} ways[| equally], and one [share|part] is [kept|left].
{n} has one of {k} equal [parts|shares] of them in the end.
The [others|rest] [go|are given] away: {n} has one part of {k}.
~ They are split {k} ways, and {n} has one part.
""")
FEWER = Wordings("""
{m} has {b} {o} more than {n}.
{m} has {b} {o} more.
[Compared with {n}|Next to {n}], {m} has {b} {o} more.
{m} has as many {o} as {n} and {b} more.
{m} [owns|counts|holds] {b} more {o} than {n}[| has].
[There are|One counts] {b} {o} more [with|at] {m} than [with|at] {n}.
{n} [would need|needs|lacks] {b} {o} to have as many as {m}.
It is {b} {o} less that {n} has, [beside|compared with] {m}.
[Less than {m}|Fewer than {m}]: {n} has {b} {o} fewer.
~ {n} has {b} {o} less than {m}.
""")
OTHERS = Wordings("""
The [cart|house|door|roof|fence] of {m} is {d} years old.
It is {d} miles to the next [town|inn|mill].
{m} is {d} years old.
[The sun shines|It rains] for {d} hours.
The [wall|tree|tower] is {d} feet high.
The [way|road] to the [house|door|well] [is|takes] {d} steps.
[It is|There are still] {d} [days|weeks] to the feast.
{d} [people|children|birds] [look on|stand at the door|sit on the roof].
[There are|One sees] {d} [trees|houses|windows] [at|in|along] the road.
~ There are {d} steps to the door.
""")
ASK = Wordings("""
How many {o} does {n} have [now|in the end|at last|in all]?
How many {o} are there [now|in the end|in all]?
How many {o} has {n} [now|in the end|at last]?
[What is the number of|What number of] {o} [is that|does {n} have] now?
[Count|Work out|Find] [the {o} of {n}|how many {o} {n} has].
[So how|How] many {o} [is that in all|does that make]?
[Tell me|Say|Can you tell] how many {o} [there are|{n} has][| now].
How many {o} [remain|are left|does one count][| in all]?
What does {n} have now?
[With how many|How many] {o} [is {n} left|is {n} left with|does {n} go home with]?
[And how many|How many] {o} [does {n} own|does {n} hold|can {n} count] [at the end|then|now]?
[In the end|At last|Now], how many {o} [does {n} have|are there|are left]?
How [great|large] is the number of {o} [now|in the end]?
[What do we end with|What does it come to|Where does it end]?
How many {o} [end up|are] [with|in the hands of] {n}?
[Please count|We want to know|I want to know|Guess]: how many {o} [does {n} have|are there] [now|at the end]?
~ [With how many {o} does {n} end up|How many {o} does {n} end up with]?
""")
ASK_OTHER = Wordings("""
How many {o} does {m} have[| now| in the end]?
[Count|Work out|Find] [the {o} of {m}|how many {o} {m} has].
[Tell me|Say|Can you tell] how many {o} {m} has.
[With how many|How many] {o} [is {m} left|does {m} go home]?
How many {o} [does {m} own|has {m}|belong to {m}][| now| in the end]?
[What number of|The number of] {o} [that belong to {m}|with {m}|of {m}], please.
[And {m}|And how many {o} has {m}]?
~ What is the number of {o} that {m} has?
""")
ASK_BOTH = Wordings("""
How many {o} do [{n} and {m}|the two|they both] have [together|in all|between them]?
[Count|Work out|Find] the {o} of {n} and {m} together.
[Tell me|Say] how many {o} the two have in all.
[What is the number of|What number of] {o} [do they have|have the two|is that] [together|in all]?
[With|If] both [counted|together], how many {o} [are there|is that]?
[The sum of both|Both together], how many {o}?
How many {o} has {n} [together with|and with him or her] {m}?
What do their {o} [make|come to] [together|in all]?
~ What is the sum of their {o}?
""")
DRILL = Wordings("""
[What is|How much is|What makes|What do you get from] {e}?
{e} = ?
{e}
[Work out|Calculate|Compute|Find|Solve|Tell me] {e}.
{e} [is what|makes what|is how much]?
[Solve|Do|Now|Next]: {e}
Give me the [value|result] of {e}.
[Do|Work out] this sum: {e}
[And|Then|So what is] {e}?
[Please|Quick|Easy]: {e}
{e}, [please|what is it|how much]?
[I want|We need|Write] the [answer|result] to {e}.
[Can you|Will you] [do|work out|solve|figure] {e}?
~ [Reckon|Figure out] {e}.
""")
SHEET = Wordings("""
[Work these out|Calculate|Fill in|Do these|Compute]: {e}
[A page of sums|Your drills for today|Some sums|A test]: {e}
Solve all of these: {e}
{e} [- work them out|- what do they make|- one a line]
[What are|What is] {e}?
[Your homework|Homework for today|For school|Here are sums]: {e}
[Please do|Practise|Let us practise|Try] these: {e}
[Next|Now|And now]: {e}
[Write the results|Give the results|Answer all]: {e}
~ [Here is your homework|For practice]: {e}
""")


@dataclass
class Tale:
    """A problem under construction: its words, its sentences, and its steps (x, operation, y, result)."""
    words: dict
    largest: int
    sentences: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    count: int = 0

    def add(self, sentence, *steps):
        self.sentences.append(sentence)
        self.steps += steps
        if steps:
            self.count = steps[-1][3]


def generate(rng, held_out=False, grade=None):
    """A problem or a drill; the held-out split hashes its numbers and words."""
    def make(voice):
        level = grade or voice.rng.choice([1, 1, 2, 2, 3, 3, 4, 5])
        return _drill(voice, level) if voice.rng.random() < DRILLS else _problem(voice, level)
    return on_side(make, rng, held_out)


def problem(rng, grade, held_out=False):
    """A word problem of the given grade, 1 to 5."""
    return on_side(lambda voice: _problem(voice, grade), rng, held_out)


def drill(rng, grade=3, held_out=False):
    """A single sum, or a sheet of up to five. Grades 1 to 3, as in `sums`."""
    return on_side(lambda voice: _drill(voice, grade), rng, held_out)


def score(item, text):
    """1.0 if the number after the last `####` is right. A sheet of drills has to be right as a whole."""
    if item.meta["kind"] == "sheet":
        return float(text.strip() == item.answer)
    found = re.findall(r"####\s*(-?\d+)", text)
    return float(bool(found) and int(found[-1]) == item.meta["final"])


def _problem(voice, grade):
    rng = voice.rng
    hero = rng.choice(PEOPLE + GIRLS + BOYS)
    friend = rng.choice([name for name in PEOPLE if name != hero])
    tale = Tale(dict(n=hero, m=friend, o=rng.choice(COUNTED)), largest=99 if grade > 4 else 60 if grade > 1 else 30)
    steps, close = rng.choice(CLOSINGS) if grade >= COMPARED else (0, _plain)
    _open(voice, tale, bags=grade > 1 and rng.random() < 0.4)
    while len(tale.steps) < grade - steps:
        _event(voice, tale, room=grade - steps - len(tale.steps))
    question = close(voice, tale)
    if grade >= DISTRACTED:
        _distract(voice, tale)
    meta, key = dict(kind=f"grade {grade}", final=tale.count), f"{tale.steps} {tale.words}"
    return Item(" ".join([*tale.sentences, question]), worked(tale.steps), TASK, meta, grade, key)


def worked(steps):
    """The written solution: one line per step, then the result."""
    return "\n".join([f"{x} {op} {y} = {z}" for x, op, y, z in steps] + [f"#### {steps[-1][3]}"])


def _open(voice, tale, bags):
    """The first sentence. With `bags`, the initial count is a product, which costs a step."""
    if bags:
        tale.add(*_product(voice, tale, BAGS))
    else:
        tale.count = voice.rng.randint(3, tale.largest)
        tale.add(voice.say(START, a=tale.count, **tale.words))


def _product(voice, tale, wordings):
    """A sentence about k times c things, and the step that computes their number."""
    k, c = voice.rng.randint(2, 9), voice.rng.randint(2, 12)
    return voice.say(wordings, k=k, c=c, **tale.words), _step(k, "*", c)


def _event(voice, tale, room):
    """One more sentence that changes the count, in one or two steps."""
    kinds = ["gain", "gain", "loss", "loss"] + ["times"] * (tale.count < 20) + ["more"] * 2 * (room > 1)
    shares = [k for k in range(2, 10) if tale.count % k == 0 and tale.count > k]
    EVENTS[voice.rng.choice(kinds + ["share"] * bool(shares))](voice, tale)


def _gain(voice, tale):
    b = voice.rng.randint(1, 40)
    tale.add(voice.say(GAIN, b=b, **tale.words), _step(tale.count, "+", b))


def _loss(voice, tale):
    if tale.count < 2:
        return _gain(voice, tale)
    b = voice.rng.randint(1, min(tale.count - 1, 60))
    tale.add(voice.say(LOSS, b=b, **tale.words), _step(tale.count, "-", b))


def _times(voice, tale):
    k = voice.rng.randint(2, 5)
    tale.add(voice.say(TIMES, k=k, **tale.words), _step(tale.count, "*", k))


def _share(voice, tale):
    k = voice.rng.choice([k for k in range(2, 10) if tale.count % k == 0 and tale.count > k])
    tale.add(voice.say(SHARE, k=k, **tale.words), _step(tale.count, "/", k))


def _more(voice, tale):
    sentence, product = _product(voice, tale, MORE)
    tale.add(sentence, product, _step(tale.count, "+", product[3]))


EVENTS = dict(gain=_gain, loss=_loss, times=_times, share=_share, more=_more)


def _plain(voice, tale):
    """Ask for the count itself."""
    return voice.say(ASK, **tale.words)


def _other(voice, tale):
    """Compare a friend with the hero and ask for the friend's count: one more step."""
    b = voice.rng.randint(1, 40)
    tale.add(voice.say(FEWER, b=b, **tale.words), _step(tale.count, "+", b))
    return voice.say(ASK_OTHER, **tale.words)


def _both(voice, tale):
    """Compare a friend with the hero and ask for the total of both: two more steps."""
    b, mine = voice.rng.randint(1, 40), tale.count
    tale.add(voice.say(FEWER, b=b, **tale.words), _step(mine, "+", b), _step(mine, "+", mine + b))
    return voice.say(ASK_BOTH, **tale.words)


CLOSINGS = ((1, _other), (2, _both))        # (number of steps, ending)


def _distract(voice, tale):
    """Insert one or two sentences with irrelevant numbers, anywhere except first."""
    for _ in range(voice.rng.randint(1, 2)):
        place = voice.rng.randint(1, len(tale.sentences))
        tale.sentences.insert(place, voice.say(OTHERS, d=voice.rng.randint(2, 99), **tale.words))


def _drill(voice, grade):
    rng = voice.rng
    if rng.random() < 0.3:
        step = sums(rng, grade)
        prompt = voice.say(DRILL, e="{} {} {}".format(*step))
        return Item(prompt, worked([step]), TASK, dict(kind="drill", final=step[3]), min(grade, 3))
    steps = [sums(rng, grade) for _ in range(rng.randint(2, 5))]
    listed = ", ".join("{} {} {}".format(*s) for s in steps)
    answer = "\n".join("{} {} {} = {}".format(*s) for s in steps)
    return Item(voice.say(SHEET, e=listed), answer, TASK, dict(kind="sheet"), min(grade, 3), key=listed)


def sums(rng, grade):
    """(x, operation, y, result), with result >= 0.

    Grade 1 up to 20, 2 up to 100, from 3 on up to 200, with products and quotients.
    """
    op = rng.choice("+-" if grade == 1 else "++--*" if grade == 2 else "++--**/")
    if op in "*/":
        x, y = rng.randint(2, 9), rng.randint(2, 12)
        return _step(x, "*", y) if op == "*" else _step(x * y, "/", y)
    largest = (10, 60, 150)[min(grade, 3) - 1]
    x, y = rng.randint(1, largest), rng.randint(1, min(largest, 60))
    return _step(max(x, y), op, min(x, y)) if op == "-" else _step(x, op, y)


def _step(x, op, y):
    return x, op, y, DO[op](x, y)
