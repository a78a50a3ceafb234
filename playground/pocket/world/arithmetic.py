"""Arithmetic: word problems worked out step by step, graded by the number of steps, and bare drills.

A problem is a count that sentences change one after another; every sentence knows the step it costs, so the
worked answer is written by the generator and ends in `#### n`. Grade 1 has one step, 2 two, 3 three.
Three in ten items are drills without a story: they teach the tables that the problems lean on.
"""
import re

from playground.pocket.world.item import Item, on_side
from playground.pocket.world.names import BOYS, COUNTED, GIRLS, PEOPLE

TASK = "arithmetic"
DRILLS = 0.3

START = """
{n} has {a} {o}.
There are {a} {o} in the box of {n}.
{n} owns {a} {o}.
On Monday {n} had {a} {o}.
{n} keeps {a} {o} in a bag.
At first {n} has {a} {o}.
{n} collected {a} {o}.
In the morning {n} had {a} {o}.
{n} counts {a} {o}.
{n} brought {a} {o} to the market.
{n} starts with {a} {o}.
You see {n} with {a} {o}.
""".strip().splitlines()
BAGS = """
{n} has {k} bags with {c} {o} each.
{n} buys {k} boxes of {c} {o}.
There are {k} rows of {c} {o} in the garden of {n}.
{n} fills {k} baskets with {c} {o} each.
Each of the {k} bags of {n} holds {c} {o}.
{n} gets {c} {o} a day for {k} days.
{n} packs {k} times {c} {o}.
{k} friends give {n} {c} {o} each.
""".strip().splitlines()
GAIN = """
{n} finds {b} more.
{m} gives {n} {b} {o}.
{n} gets {b} more {o}.
{n} buys {b} {o}.
Then {b} {o} are added.
{n} wins {b} more.
{m} brings {b} more {o}.
{n} picks up {b} {o}.
Later {n} receives {b} more.
{n} puts in {b} more {o}.
A friend leaves {n} {b} {o}.
{n} makes {b} more {o}.
""".strip().splitlines()
LOSS = """
{n} loses {b}.
{n} gives {b} {o} to {m}.
{n} sells {b} {o}.
{m} takes {b} of them.
{b} {o} are taken away.
{n} drops {b} {o} in the river.
Then {b} of the {o} are gone.
{n} leaves {b} {o} at home.
{m} steals {b} {o}.
{n} uses {b} {o}.
{n} throws away {b} {o}.
{n} lends {b} {o} to {m}.
""".strip().splitlines()
MORE = """
{n} buys {k} bags of {c} {o}.
{m} brings {k} boxes with {c} {o} each.
{n} gets {k} more baskets of {c} {o}.
Then {k} friends add {c} {o} each.
{n} finds {k} piles of {c} {o}.
{n} earns {c} {o} a day for {k} days.
""".strip().splitlines()
TIMES = """
Then the number grows {k} times as large.
{m} has {k} times as many, and they swap.
By magic every one of them becomes {k}.
{n} trades each of them for {k} new {o}.
""".strip().splitlines()
ASK = """
How many {o} does {n} have now?
How many {o} are there now?
How many {o} has {n} in the end?
How many are left?
What is the number of {o} now?
Count the {o} of {n}.
How many {o} is that in all?
How many {o} does that make?
So how many {o} has {n}?
Tell me how many {o} there are.
How many {o} remain in all?
What does {n} have now?
""".strip().splitlines()
DRILL = """
What is {e}?
{e} = ?
Work out {e}.
Calculate {e}.
How much is {e}?
{e} is what?
Solve: {e}
Find {e}.
Give me the value of {e}.
Compute {e}.
Tell me {e}.
Do this sum: {e}
""".strip().splitlines()
SHEET = """
Work these out: {e}
Calculate: {e}
A page of sums: {e}
Fill in: {e}
Solve all of these: {e}
Your drills for today: {e}
""".strip().splitlines()
DO = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}


def generate(rng, held_out=False):
    """A problem or a drill; split by a hash of the prompt."""
    return on_side(lambda r: drill(r) if r.random() < DRILLS else _problem(r, r.choice([1, 1, 2, 2, 3])), rng, held_out)


def problem(rng, grade, held_out=False):
    """A word problem of the given grade, 1 to 3."""
    return on_side(lambda r: _problem(r, grade), rng, held_out)


def score(item, text):
    """1.0 if the number after the last `####` is right; sheets of drills have to be right as a whole."""
    if item.meta["kind"] == "sheet":
        return float(text.strip() == item.answer)
    found = re.findall(r"####\s*(-?\d+)", text)
    return float(bool(found) and int(found[-1]) == item.meta["final"])


def _problem(rng, grade):
    teller = dict(n=rng.choice(PEOPLE + GIRLS + BOYS), m=rng.choice(PEOPLE), o=rng.choice(COUNTED))
    sentences, steps = _opening(rng, teller, bags=grade > 1 and rng.random() < 0.4)
    count = steps[-1][3] if steps else int(re.search(r"\d+", sentences[0])[0])
    while len(steps) < grade:
        sentence, new = _event(rng, teller, count, room=grade - len(steps))
        sentences.append(sentence)
        steps += new
        count = steps[-1][3]
    sentences.append(rng.choice(ASK).format(**teller))
    return Item(" ".join(sentences), worked(steps), TASK, dict(kind=f"grade {grade}", final=count))


def worked(steps):
    """The written answer: a line for every step, then the result."""
    return "\n".join([f"{x} {op} {y} = {z}" for x, op, y, z in steps] + [f"#### {steps[-1][3]}"])


def _opening(rng, teller, bags):
    """The first sentence, and its step if the count has to be worked out."""
    if not bags:
        return [rng.choice(START).format(a=rng.randint(3, 60), **teller)], []
    k, c = rng.randint(2, 9), rng.randint(2, 12)
    return [rng.choice(BAGS).format(k=k, c=c, **teller)], [(k, "*", c, k * c)]


def _event(rng, teller, count, room):
    """A sentence that changes the count, with its one or two steps (x, operation, y, result)."""
    kind = rng.choice(["gain", "gain", "loss", "loss"] + ["times"] * (count < 20) + ["more"] * 2 * (room > 1))
    if kind == "more":
        k, c = rng.randint(2, 9), rng.randint(2, 12)
        return rng.choice(MORE).format(k=k, c=c, **teller), [(k, "*", c, k * c), (count, "+", k * c, count + k * c)]
    if kind == "times":
        k = rng.randint(2, 5)
        return rng.choice(TIMES).format(k=k, **teller), [(count, "*", k, count * k)]
    if kind == "loss" and count > 1:
        b = rng.randint(1, min(count - 1, 60))
        return rng.choice(LOSS).format(b=b, **teller), [(count, "-", b, count - b)]
    b = rng.randint(1, 40)
    return rng.choice(GAIN).format(b=b, **teller), [(count, "+", b, count + b)]


def drill(rng):
    """One sum, or a sheet of up to five: many answers for few words."""
    if rng.random() < 0.3:
        step = _sum(rng)
        prompt = rng.choice(DRILL).format(e="{} {} {}".format(*step))
        return Item(prompt, worked([step]), TASK, dict(kind="drill", final=step[3]))
    steps = [_sum(rng) for _ in range(rng.randint(2, 5))]
    listed = ", ".join("{} {} {}".format(*s) for s in steps)
    answer = "\n".join("{} {} {} = {}".format(*s) for s in steps)
    return Item(rng.choice(SHEET).format(e=listed), answer, TASK, dict(kind="sheet"))


def _sum(rng):
    """(x, operation, y, result), never below zero."""
    op = rng.choice("++--*")
    x, y = (rng.randint(2, 9), rng.randint(2, 12)) if op == "*" else (rng.randint(1, 99), rng.randint(1, 60))
    if op == "-" and x < y:
        x, y = y, x
    return x, op, y, DO[op](x, y)
