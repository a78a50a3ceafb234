"""Programs: a short Python function from a description, composed of typed steps and scored by running it.

Every step maps numbers, words or a text to one of these types, or to a result. A program is a chain of steps with
matching types, so there are many thousands, apart from the numbers in them. `score` runs the tests in a separate
process with limits. Grades: 1 one or two steps; 2 three; 3 four or five, some with a special case for empty input; 4 a
helper function that is called for every item, and further steps.
"""
import json
import re
from dataclasses import dataclass

from playground.algorithms.programs.sandbox import call
from playground.questions.world.item import Item, on_side
from playground.questions.world.program_steps import RESULTS, STEPS
from playground.questions.world.wording import Wordings, expand

TASK = "programs"
GRADES = (1, 2, 3, 4)
LENGTHS = {1: (1, 2), 2: (3, 3), 3: (4, 5), 4: (3, 4)}          # steps, the result counted
CASES = 3                                                       # the grade from which empty input is a case of its own
HELPED = 4                                                      # the grade with a helper
ARGUMENT = dict(numbers="items", words="words", text="text")
INPUTS = dict(
    numbers=[
        [],
        [3],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [12, 5, 30, 7, 7, 18],
        [40, 21, 9, 2, 16, 35],
        [-4, 0, 11, -15, 6],
    ],
    words=[
        [],
        ["sun"],
        ["apple", "cat", "moon", "bread"],
        ["dog", "dog", "river", "a", "stone"],
        ["Lamp", "ice", "oven", "key"],
    ],
    text=["", "one", "the cat sat on the mat", "a big red boat left", "Every  road ends here", "no moon no moon"],
)
# inputs for searches that run candidate programs; disjoint from INPUTS, on which programs are scored
GUIDES = dict(
    numbers=[[2, 9], [6, 6, 1], [15, 4, 22, 8, 8], [7, -3, 10, 31]],
    words=[["tree"], ["oak", "bird", "fire"], ["b", "b", "window", "Hat"], ["egg", "night", "a", "rose", "egg"]],
    text=["two words", "an old grey fox ran home", "A  wide gap", "so it is so"],
)
FRAMES = Wordings("""
[Write|Give me|Make|Show] a Python function {n}({a}). {d}
{d} [Call|Name] the function {n}({a}).
[Python|In Python|Code]: def {n}({a}). {d}
[I need|We need|I want] a function named {n} in Python[, with one argument {a}|, argument {a}]. {d}
[Program|Code|Write] {n}({a}): {d}
[Please code|Please write|Could you write] {n}({a})[| in Python]. {d}
Define {n}({a}). {d}
[Make|Build] a Python function. Name: {n}. Argument: {a}. [Task|Job]: {d}
Function {n}, argument {a}. {d}
[Give|Send|Show] me Python code for {n}({a}). {d}
[How would you write|How do I write|What is] {n}({a})[| in Python]? {d}
[Fill in|Complete] def {n}({a}): ... {d}
~ [My homework|The job] is {n}({a}) in Python. {d}
~ [Programmer wanted]: {n}({a}). {d}
""")
NAMES = "work solve pick total change handle answer process compute result build find check make run clean".split()
HELPERS = "helper step one part small inner".split()


@dataclass(frozen=True)
class ProgramLine:
    """One step of a concrete program: its wording, and its lines of code without indentation."""
    says: str
    code: str


def generate(rng, held_out=False, grade=None):
    """A description and a function. The split hashes the code: a held-out program is not trained on in any wording."""
    return on_side(lambda voice: _program(voice, grade or voice.rng.choice(GRADES)), rng, held_out)


def score(item, text):
    """1.0 if the function returns the same results as the reference on every test input."""
    results = run(text.strip(), item.meta["name"], item.meta["takes"])
    return float(json.dumps(results) == json.dumps(item.meta["results"]))      # as JSON: true is not 1


def run(code, name, takes="numbers"):
    """Results of `name` on the test inputs, or None if it fails, in a sandboxed child process with limits."""
    return call(code, name, INPUTS[takes])


def _program(voice, grade):
    """A program whose results on the test inputs are not all the same."""
    rng, results = voice.rng, [None]
    while len(set(map(str, results))) < 2:
        takes, name = rng.choice(sorted(ARGUMENT)) if grade < HELPED else "numbers", rng.choice(NAMES)
        helper, lines = _composed(rng, takes, grade)
        says, body = _described(lines), "\n".join(line.code for line in lines)
        code = helper + _function(name, ARGUMENT[takes], says, body)
        results = _expected(code, name, takes)
    meta = dict(kind=f"grade {grade}", name=name, takes=takes, body=body, results=results)
    prompt = voice.say(FRAMES, n=name, a=ARGUMENT[takes], d=says)
    return Item(prompt, code, TASK, meta, grade, key=helper + body)


def _composed(rng, takes, grade):
    """Code of the helper, empty if the grade has none, and the lines of the function."""
    lines = _chain(rng, takes, rng.randint(*LENGTHS[grade]))
    case = [_case(rng, ARGUMENT[takes])] if grade >= CASES and rng.random() < 0.5 else []
    if grade < HELPED:
        return "", case + lines
    helper = _helper(rng)
    return helper.code, case + [helper.call] + lines


def _chain(rng, takes, length):
    """A chain of different steps with matching types, from the argument's type to a result."""
    lines, used, holds = [], [], takes
    while len(lines) < length - 1:
        step = rng.choice([step for step in STEPS[holds] if step not in used])
        used.append(step)
        lines.append(_line(rng, step, ARGUMENT[takes]))
        holds = step.makes
    return lines + [_line(rng, rng.choice(RESULTS[holds]), ARGUMENT[takes])]


def _line(rng, step, argument):
    """A step with a random number. The variable keeps the argument's name, whatever its type becomes."""
    k = rng.randint(*step.numbers)
    code = re.sub(r"\bit\b", argument, step.code.replace("{k}", str(k)))
    return ProgramLine(expand(rng, step.says).replace("{k}", str(k)), code)


def _case(rng, argument):
    """An early return for empty input."""
    value = rng.choice(["0", "-1", "None", "[]"])
    words = expand(rng, "[if there is nothing, return {v}|return {v} for empty input|give back {v} if it is empty]")
    return ProgramLine(words.replace("{v}", value), f"if not {argument}:\n    return {value}")


@dataclass(frozen=True)
class Helper:
    """A function of one number, and the step that applies it to each item."""
    code: str
    call: ProgramLine


def _helper(rng):
    name, (says, code) = rng.choice(HELPERS), rng.choice(PER_NUMBER)
    k = str(rng.randint(2, 12))
    lines = "\n".join("    " + line for line in code.replace("{k}", k).splitlines())
    words = f"change each with the helper {name}, which {says.replace('{k}', k)}"
    return Helper(f"def {name}(x):\n{lines}\n\n", ProgramLine(words, f"items = [{name}(x) for x in items]"))


PER_NUMBER = [
    ("halves even numbers and adds {k} to odd ones", "if x % 2 == 0:\n    return x // 2\nreturn x + {k}"),
    ("returns the distance to {k}", "return abs(x - {k})"),
    ("returns 1 above {k}, else 0", "return 1 if x > {k} else 0"),
    ("adds up the digits", "total = 0\nfor digit in str(abs(x)):\n    total += int(digit)\nreturn total"),
    ("subtracts {k} until the number is below {k}", "while x >= {k}:\n    x -= {k}\nreturn x"),
    ("multiplies by {k} below ten and leaves the rest alone", "if x < 10:\n    return x * {k}\nreturn x"),
    ("returns the larger of the number and {k}", "return max(x, {k})"),
    ("counts the steps of {k} from 0 up to the number", "return len(range(0, x, {k}))"),
    ("turns numbers below {k} negative", "if x < {k}:\n    return -x\nreturn x"),
    ("adds the squares of both the number and {k}", "return x * x + {k} * {k}"),
    (
        "doubles it {k} times while it is below a hundred",
        "for _ in range({k}):\n    if x < 100:\n        x *= 2\nreturn x",
    ),
    ("swaps {k} and 0 and keeps all others", "if x == {k}:\n    return 0\nif x == 0:\n    return {k}\nreturn x"),
]


def _described(lines):
    """Description of the program in one sentence."""
    words = ", then ".join(line.says for line in lines)
    return words[0].upper() + words[1:] + "."


def _function(name, argument, says, body):
    lines = "\n".join("    " + line for line in body.splitlines())
    return f'def {name}({argument}):\n    """{says}"""\n{lines}'


def _expected(code, name, takes):
    """Results of the reference program, as JSON values. It runs in this process, since its code is trusted."""
    space = {}
    exec(code, space)
    return json.loads(json.dumps([space[name](list(x) if takes != "text" else x) for x in INPUTS[takes]]))
