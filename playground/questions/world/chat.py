"""Chat: conversations of several turns, of which the last is scored.

`Item.before` holds the earlier turns. Kinds: `mixed` (independent turns of other tasks), `passage` (one passage,
several questions), `list` (each turn modifies the list of the previous turn), `sum` (a running total), `recall` (a
value given in the first turn is asked for in the last, after turns of other tasks). They test whether a cache policy
keeps the earlier turns. Grades by earlier turns: 1 one, 2 two or three, 3 four or five, 4 six to eight.
"""
from playground.questions.world import arithmetic, context_qa, facts, lists, records
from playground.questions.world.item import Item, exact, on_side
from playground.questions.world.names import BOYS, COLOURS, FOODS, GIRLS, PETS, THINGS, TOWNS, TRADES
from playground.questions.world.wording import Wordings

TASK = "chat"
GRADES = (1, 2, 3, 4)
BEFORE = {1: (1, 1), 2: (2, 3), 3: (4, 5), 4: (6, 8)}           # turns before the last one
MIXED = 0.25                                                    # share of conversations with independent turns
SHORT = {module.TASK: module for module in (facts, lists, arithmetic, context_qa, records)}

INTRODUCE = {what: Wordings(text) for what, text in dict(
    name="""
[Hello|Hi|Good day], [I am|my name is|I am called] {v}.
[My name is|I am called|Call me] {v}.
[Hello|Hi], {v} here.
You [may|can] call me {v}.
[People|Friends] [call me|know me as] {v}.
[This is|It is] {v} [writing|speaking].
The name is {v}.
~ [They call me|You are speaking with] {v}.
""",
    town="""
I [live in|come from|am from] {v}.
My [home|town|home town] is {v}.
[You find me|My family lives|I grew up|I was born] in {v}.
[I am at home|My bed is|My garden is] in {v}.
{v} is [my home|where I live|where I come from].
~ [I write to you from|My house stands in] {v}.
""",
    trade="""
I [am|work as] a {v}.
[By trade I am|My trade is that of] a {v}.
[I make my living|I work every day|I am known] as a {v}.
[All day|All my life] I have been a {v}.
[I learned to be|I became] a {v}.
~ [They pay me as|I earn my bread as] a {v}.
""",
    pet="""
I [have|keep|own] a {v}.
[My pet is|With me lives] a {v}.
[I look after|I play with|I walk] my {v}.
My {v} [sleeps by the door|waits for me|is old].
[There is|We have] a {v} [in my house|at my home].
~ [I share my house with|I feed] a {v}.
""",
    colour="""
[My favourite colour is|I like best the colour|I always wear] {v}.
[I love|I prefer|I choose] the colour {v}.
[The best colour|My colour] is {v}.
[All my clothes are|My coat and my hat are] {v}.
~ [No colour is as fine as|I paint everything] {v}.
""",
    food="""
[My favourite food is|I like to eat|I love] {v}.
[Every day I eat|For supper I want|I am fond of] {v}.
[The best food|My dish] is {v}.
[I never tire of|Give me] {v}.
~ [I could live on|Nothing is as good as] {v}.
""",
    number="""
[My lucky number is|Please remember the number|Remember|Note the number] {v}.
[My number is|I chose the number|Do not forget the number] {v}.
[The number to remember|The number] is {v}.
{v} is [my number|the number to remember].
~ [Keep for me the number|Store this] {v}.
""",
    thing="""
[I am looking for|I lost|I need] my {v}.
[I miss|I search for|I left behind] my {v}.
[Where did I put|Who has seen] my {v}?
My {v} is [lost|not here|missing].
~ [Somebody took|I cannot find] my {v}.
""",
).items()}
ASK_BACK = {what: Wordings(text) for what, text in dict(
    name="""
[What is|Do you remember|Do you know|Tell me] my name?
[Who am I|How am I called]?
[Say|Repeat|Write] my name.
[What do people call me|What should you call me|What am I called]?
[And my name|My name, please]?
~ [By what name do you know me|Whom are you speaking to]?
""",
    town="""
[Where do I live|Where am I from|Which town is mine]?
[What is|Do you remember|Tell me] my town?
[In which town|In what place] [do I live|am I at home]?
[Say|Name|Repeat] my town.
[And my town|Which town did I name]?
~ [From where do I write|Where is my home]?
""",
    trade="""
[What do I do|What is my trade|What do I work as]?
[Do you remember|Tell me] my trade?
[Which trade is mine|What work do I do|What did I say I am by trade]?
[Say|Name|Repeat] my trade.
[And my trade|Which trade did I name]?
~ [How do I earn my bread|What am I by trade]?
""",
    pet="""
[What pet do I have|Which animal do I keep|What is my pet]?
[Do you remember|Tell me] my pet?
[Which pet|What animal] [is it that I have|did I tell you about|do I own]?
[Say|Name|Repeat] my pet.
[And my pet|Which pet did I name]?
~ [Which animal is mine|What lives with me]?
""",
    colour="""
[What is my favourite colour|Which colour do I like]?
[Do you remember|Tell me] my colour?
[What colour|Which colour] [do I prefer|did I name|is my favourite]?
[Say|Name|Repeat] my colour.
[And my colour|My colour, please]?
~ [In which colour shall you paint my door|Which colour is mine]?
""",
    food="""
[What do I like to eat|What is my favourite food]?
[Do you remember|Tell me] my favourite food?
[What food|Which food] [do I like best|did I name|do I love]?
[Say|Name|Repeat] my favourite food.
[And my food|What is my dish]?
~ [What shall you cook for me|Which food is mine]?
""",
    number="""
[What was the number|Which number was it|What is my number]?
[Do you remember|Tell me|Repeat] the number?
[Say|Name|Write] the number.
[Which number did I name|What number did I tell you|Do you still have the number]?
[And the number|The number, please]?
~ [Give me back my number|What did you store]?
""",
    thing="""
[What am I looking for|What did I lose|What do I need]?
[Do you remember|Tell me] what I lost?
[What thing|Which thing] [did I lose|do I need|am I missing]?
[Say|Name|Repeat] what I [lost|need].
[And what did I lose|What was it that I lost|What do I search for]?
~ [What is it that I miss|Which thing of mine is gone]?
""",
).items()}
TOLD = dict(
    name=GIRLS + BOYS, town=TOWNS, trade=TRADES, pet=PETS, colour=COLOURS, food=FOODS,
    number=[str(n) for n in range(10, 1000)], thing=THINGS,
)
NOTED = Wordings("[Good|Fine|Thank you|I see|Noted|All right].")
PASSAGE = Wordings("""
[Read|Keep in mind|Here is] this[| text]: {p} [First question|To begin with|First]: {q}
[Text|Passage|Report]: {p}\\n{q}
{p}\\n[Questions about this|I have some questions]. {q}
~ [I found a letter|This is from a book]: {p} {q}
""")
NEXT = Wordings("""
{q}
[And|Then|Next|Now]: {q}
[Another question|The next one|One more|Going on]: {q}
~ [Good|Well then]. {q}
""")
BEGIN = Wordings("""
[Start with|Begin with|Take|Take the number] {v}.
[We start at|The number is|Say] {v}.
~ [Let it be|Put down] {v}.
""")
STEP = {
    op: Wordings(text)
    for op, text in {
        "+": "[Add|Plus|Now add|And] {v}[| more].\n[{v} more|Put {v} on top].\n~ [Raise it by|Count on] {v}.",
        "-": "[Take away|Minus|Now subtract|Less] {v}.\n[{v} less|Take {v} off].\n~ [Lower it by|Count back] {v}.",
        "*": "[Times|Now times|Multiply by] {v}.\n[{v} times that|{v} times as much].\n"
        "~ [Make it {v}-fold|Take it {v} times].",
    }.items()
}
ON_LIST = Wordings("""
[Now|Then|Next|And now] {o} [it|the list|that].
{o} [it|the list|that][| now| too].
[Please|And] {o} it.
~ [What if you|Go on and] {o} it?
""")
LIST_STEPS = {
    "reverse": lambda items: items[::-1], "sort": sorted, "copy": list,
    "drop the first of": lambda items: items[1:], "drop the last of": lambda items: items[:-1],
    "swap the ends of": lambda items: [items[-1], *items[1:-1], items[0]] if len(items) > 1 else items,
}


def generate(rng, held_out=False, grade=None):
    """A conversation. A mixed one is held out if its last turn is; the others are split by a hash of their content.

    The earlier turns are only read in an evaluation, so they may come from the training side.
    """
    level = grade or rng.choice(GRADES)
    length = rng.randint(*BEFORE[level]) + 1
    if rng.random() < MIXED:
        return _mixed(rng, length, held_out, level)
    return on_side(lambda voice: _linked(voice, length, level), rng, held_out)


def score(item, text):
    """Score by the task of the last turn, if it is of another task; otherwise exact match."""
    last = item.meta.get("last")
    return SHORT[last.task].score(last, text) if last else exact(item, text)


def _mixed(rng, length, held_out, level):
    """A conversation of independent turns of other tasks."""
    before = tuple(_other(rng) for _ in range(length - 1))
    last = SHORT[rng.choice(sorted(SHORT))].generate(rng, held_out, grade=1)
    meta = dict(kind="mixed", turns=length, last=last)
    return Item(
        last.prompt, last.answer, TASK, meta, level, f"{last.task} {last.key or last.prompt}", before, last.kept_words
    )


def _other(rng):
    """A short turn of another task, from the training side."""
    item = SHORT[rng.choice(sorted(SHORT))].generate(rng, grade=1)
    return item.prompt, item.answer


def _linked(voice, length, level):
    """A conversation whose turns build on each other."""
    kind = voice.rng.choice(sorted(KINDS))
    *before, (prompt, answer) = KINDS[kind](voice, length)
    key = f"{kind} {before[0][0]} {prompt} {answer}"
    return Item(prompt, answer, TASK, dict(kind=kind, turns=length), level, key, tuple(before))


def _recall(voice, length):
    what = voice.rng.choice(sorted(TOLD))
    value = voice.rng.choice(TOLD[what])
    between = [_other(voice.rng) for _ in range(length - 2)]
    first = (voice.say(INTRODUCE[what], v=value), voice.say(NOTED))
    last = (voice.say(ASK_BACK[what]), value)
    return [first, *between, last]


def _passage(voice, length):
    statements = context_qa.about_strangers(voice.rng, 3)
    voice.rng.shuffle(statements)
    passage = " ".join(context_qa.tell(voice.rng, statements))
    order = voice.rng.sample(statements, len(statements))
    asked = [context_qa.ask(voice, order[turn % len(order)]) for turn in range(length)]
    first = voice.say(PASSAGE, p=passage, q=asked[0][0]).replace("\\n", "\n")
    later = [(voice.say(NEXT, q=question), answer) for question, answer in asked[1:]]
    return [(first, asked[0][1]), *later]


def _list(voice, length):
    first = lists.generate(voice.rng, grade=voice.rng.choice([2, 3]))
    while first.meta["kind"] not in ("copy", "reverse", "sort", "swap"):
        first = lists.generate(voice.rng, grade=voice.rng.choice([2, 3]))
    turns = [(first.prompt, first.answer)]
    items = [int(x) if x.isdigit() else x for x in first.answer.split(", ")]
    while len(turns) < length:
        done = voice.rng.choice([name for name in sorted(LIST_STEPS) if len(items) > 2 or "drop" not in name])
        items = LIST_STEPS[done](items)
        turns.append((_sentence(voice.say(ON_LIST, o=done)), lists.written(items)))
    return turns


def _sum(voice, length):
    total = voice.rng.randint(2, 40)
    turns = [(voice.say(BEGIN, v=total), str(total))]
    while len(turns) < length:
        op = voice.rng.choice("++--" + "*" * (total < 20))
        by = voice.rng.randint(2, 4) if op == "*" else voice.rng.randint(1, 30 if op == "+" else max(1, total))
        total = arithmetic.DO[op](total, by)
        turns.append((voice.say(STEP[op], v=by), str(total)))
    return turns


def _sentence(text):
    return text[0].upper() + text[1:]


KINDS = dict(recall=_recall, passage=_passage, list=_list, sum=_sum)
