"""Programs: a short Python function from a description, composed of steps, judged by running it.

A function keeps, changes and finally reduces a list, one to three steps in all, so the number of different programs
is far beyond what can be learned by heart. `score` runs the tests in a separate process with limits.
"""
import json
import subprocess
import sys

from playground.pocket.world.item import Item, on_side

TASK = "programs"
KEEP = [
    ("keep the items above {k}", "items = [x for x in items if x > {k}]"),
    ("keep the items below {k}", "items = [x for x in items if x < {k}]"),
    ("keep the even items", "items = [x for x in items if x % 2 == 0]"),
    ("keep the odd items", "items = [x for x in items if x % 2 == 1]"),
    ("drop every {k}", "items = [x for x in items if x != {k}]"),
    ("keep the items that {k} divides", "items = [x for x in items if x % {k} == 0]"),
    ("keep the first {k} items", "items = items[:{k}]"),
    ("drop the first {k} items", "items = items[{k}:]"),
]
CHANGE = [
    ("add {k} to each", "items = [x + {k} for x in items]"),
    ("multiply each by {k}", "items = [x * {k} for x in items]"),
    ("subtract {k} from each", "items = [x - {k} for x in items]"),
    ("square each", "items = [x * x for x in items]"),
    ("cap each at {k}", "items = [min(x, {k}) for x in items]"),
    ("negate each", "items = [-x for x in items]"),
]
RESULT = [
    ("return the sum", "return sum(items)"),
    ("return how many there are", "return len(items)"),
    ("return them sorted", "return sorted(items)"),
    ("return them in reverse", "return items[::-1]"),
    ("return the list", "return items"),
    ("return the sum plus {k}", "return sum(items) + {k}"),
    ("return the largest, or {k} if there is none", "return max(items, default={k})"),
    ("return whether {k} is among them", "return {k} in items"),
]
FRAMES = """
Write a Python function {n}(items). {d}
{d} Call the function {n}(items).
Python: def {n}(items). {d}
I need a function named {n} in Python. {d}
Program {n}(items): {d}
Please code {n}(items) in Python. {d}
Define {n}(items). {d}
{d} Name it {n}.
Make a Python function. Name: {n}. Task: {d}
Function {n}, argument items. {d}
Give me Python code for {n}(items). {d}
How would you write {n}(items)? {d}
""".strip().splitlines()
NAMES = "work solve pick total change handle answer process compute result".split()
INPUTS = [[], [3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [12, 5, 30, 7, 7, 18], [40, 21, 9, 2, 16, 35]]
ALLOWED = "sum len sorted min max range abs enumerate list reversed any all int zip map filter set".split()
RUNNER = """
import ast, json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))            # seconds
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))  # bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
code, name, inputs, allowed = json.load(sys.stdin)
tree = ast.parse(code)
for node in ast.walk(tree):
    named = str(getattr(node, "attr", "")) + str(getattr(node, "id", ""))
    if isinstance(node, (ast.Import, ast.ImportFrom)) or "__" in named:
        sys.exit("not allowed")
space = {"__builtins__": {a: __builtins__.__dict__[a] for a in allowed}}
exec(compile(tree, "answer", "exec"), space)
json.dump([space[name](list(x)) for x in inputs], sys.stdout)
"""


def generate(rng, held_out=False):
    """A description and a function; split by a hash of the code, so no wording of a held-out program was ever seen."""
    return on_side(_program, rng, held_out, key=lambda item: item.meta["body"])


def score(item, text):
    """1.0 if the function gives the same results as the known one on every test input."""
    return float(run(text.strip(), item.meta["name"]) == item.meta["results"])


def run(code, name):
    """The results of `name` on the test inputs, or None if it fails: in a child without imports, files or much time."""
    request = json.dumps([code, name, INPUTS, ALLOWED])
    try:
        command = [sys.executable, "-I", "-S", "-c", RUNNER]
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=5)
        return json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        return None


def _program(rng):
    keep, change = [rng.choice(KEEP)] * (rng.random() < 0.7), [rng.choice(CHANGE)] * (rng.random() < 0.6)
    steps = keep + change + [rng.choice(RESULT)]
    numbers = [rng.randint(2, 20) for _ in steps]
    filled = [(words.format(k=k), code.format(k=k)) for (words, code), k in zip(steps, numbers)]
    says = ", then ".join(words for words, _ in filled).capitalize() + "."
    name, body = rng.choice(NAMES), [code for _, code in filled]
    answer = f'def {name}(items):\n    """{says}"""\n' + "\n".join("    " + line for line in body)
    meta = dict(kind=f"{len(body)} steps", name=name, body="\n".join(body), results=_expected(body))
    return Item(rng.choice(FRAMES).format(n=name, d=says), answer, TASK, meta)


def _expected(body):
    """What the known program returns: run here, since its lines come from the tables above."""
    space = {}
    exec("def known(items):\n" + "\n".join("    " + line for line in body), space)
    return [space["known"](list(x)) for x in INPUTS]
