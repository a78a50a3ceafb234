"""The steps that programs are composed of, each with its input and output type, its wording and its code.

In the code, `it` is the program's single variable and `{k}` a number. `STEPS[type]` transform the variable,
`RESULTS[type]` return a result; the types are numbers, words and text.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramStep:
    """takes, makes: input and output type. says: wording with choices. numbers: range of {k}."""
    takes: str
    makes: str
    says: str
    code: str
    numbers: tuple[int, int] = (2, 20)


def _steps(takes, makes, table):
    return [ProgramStep(takes, makes, says, code, *numbers) for says, code, *numbers in table]


FEW = (1, 4)                    # range of {k} if it counts items
NUMBERS = _steps(
    "numbers",
    "numbers",
    [
        ("keep [the items|those] above {k}", "it = [x for x in it if x > {k}]"),
        ("keep [the items|those] below {k}", "it = [x for x in it if x < {k}]"),
        ("keep the even [items|ones]", "it = [x for x in it if x % 2 == 0]"),
        ("keep the odd [items|ones]", "it = [x for x in it if x % 2 == 1]"),
        ("[drop|remove] every {k}", "it = [x for x in it if x != {k}]"),
        ("keep [the items that {k} divides|multiples of {k}]", "it = [x for x in it if x % {k} == 0]", (2, 9)),
        ("keep the first {k}[| items]", "it = it[:{k}]", FEW),
        ("[drop|skip] the first {k}[| items]", "it = it[{k}:]", FEW),
        ("keep the last {k}[| items]", "it = it[-{k}:]", FEW),
        ("keep every second [item|one]", "it = it[::2]"),
        ("[remove|drop] the items between -{k} and {k}", "it = [x for x in it if not -{k} <= x <= {k}]", (2, 9)),
        ("keep what is larger than the item before", "it = [y for x, y in zip(it, it[1:]) if y > x]"),
        ("add {k} to each", "it = [x + {k} for x in it]"),
        ("multiply each by {k}", "it = [x * {k} for x in it]", (2, 9)),
        ("subtract {k} from each", "it = [x - {k} for x in it]"),
        ("divide each by {k}, rounding down", "it = [x // {k} for x in it]", (2, 9)),
        ("[take|keep] the rest of each after division by {k}", "it = [x % {k} for x in it]", (2, 9)),
        ("square each", "it = [x * x for x in it]"),
        ("[cap|limit] each at {k}", "it = [min(x, {k}) for x in it]"),
        ("raise each to at least {k}", "it = [max(x, {k}) for x in it]"),
        ("[negate|change the sign of] each", "it = [-x for x in it]"),
        ("[take|use] the distance of each from {k}", "it = [abs(x - {k}) for x in it]"),
        ("add its position to each", "it = [x + i for i, x in enumerate(it)]"),
        ("[take|use] the differences of neighbours", "it = [y - x for x, y in zip(it, it[1:])]"),
        ("add up neighbours", "it = [x + y for x, y in zip(it, it[1:])]"),
        ("[sort them|put them in order]", "it = sorted(it)"),
        ("[sort them downwards|sort them from large to small]", "it = sorted(it, reverse=True)"),
        ("[reverse them|turn the list around]", "it = it[::-1]"),
        ("[remove repeats|keep each only once]", "it = list(dict.fromkeys(it))"),
        ("append {k}", "it = it + [{k}]"),
        ("put {k} in front", "it = [{k}] + it"),
        ("[replace negative numbers by|turn negative numbers into] {k}", "it = [{k} if x < 0 else x for x in it]"),
        ("halve the even ones", "it = [x // 2 if x % 2 == 0 else x for x in it]"),
        (
            "[make|replace them by] running totals",
            "total, sums = 0, []\nfor x in it:\n    total += x\n    sums.append(total)\nit = sums",
        ),
        ("double those below {k}", "for i, x in enumerate(it):\n    if x < {k}:\n        it[i] = 2 * x"),
    ],
)
WORDS = _steps("words", "words", [
    ("keep words longer than {k}[| letters]", "it = [w for w in it if len(w) > {k}]", FEW),
    ("keep words shorter than {k}[| letters]", "it = [w for w in it if len(w) < {k}]", (3, 6)),
    ("keep words [with|that have] an a", 'it = [w for w in it if "a" in w]'),
    ("[drop|remove] words [with|that have] an o", 'it = [w for w in it if "o" not in w]'),
    ("write each in capitals", "it = [w.upper() for w in it]"),
    ("write each in small letters", "it = [w.lower() for w in it]"),
    ("reverse each word", "it = [w[::-1] for w in it]"),
    ("cut each to {k} letters", "it = [w[:{k}] for w in it]", FEW),
    ("double each word", "it = [w + w for w in it]"),
    ("add an s to each", 'it = [w + "s" for w in it]'),
    ("[sort them|put them in order]", "it = sorted(it)"),
    ("sort them by length", "it = sorted(it, key=len)"),
    ("[reverse them|turn the list around]", "it = it[::-1]"),
    ("[remove repeats|keep each only once]", "it = list(dict.fromkeys(it))"),
    ("keep the first {k}[| words]", "it = it[:{k}]", FEW),
    ("[drop|skip] the first {k}[| words]", "it = it[{k}:]", FEW),
    ("keep every second word", "it = it[::2]"),
    ("number them from {k} on", "it = [str(i) + w for i, w in enumerate(it, {k})]", FEW),
])
COUNTED = _steps("words", "numbers", [
    ("[take|use] the length of each", "it = [len(w) for w in it]"),
    ("count the letter e in each", 'it = [w.count("e") for w in it]'),
    ("count the vowels of each", 'it = [len([c for c in w if c in "aeiou"]) for w in it]'),
])
TEXTS = _steps("text", "text", [
    ("write it in capitals", "it = it.upper()"),
    ("write it in small letters", "it = it.lower()"),
    ("[reverse it|turn it around]", "it = it[::-1]"),
    ("[drop|remove] the spaces", 'it = it.replace(" ", "")'),
    ("[replace|change] every a by o", 'it = it.replace("a", "o")'),
    ("[replace|change] every space by a dash", 'it = it.replace(" ", "-")'),
    ("cut it to {k} letters", "it = it[:{k}]", (3, 12)),
    ("[drop|skip] its first {k} letters", "it = it[{k}:]", FEW),
    ("keep every second letter", "it = it[::2]"),
    ("add an exclamation mark", 'it = it + "!"'),
])
SPLIT = _steps("text", "words", [
    ("split it into words", "it = it.split()"),
    ("[take|use] its words in order of the alphabet", "it = sorted(it.split())"),
    ("make a list of its letters", "it = list(it)"),
])
JOINED = _steps("words", "text", [
    ("join them with spaces", 'it = " ".join(it)'),
    ("join them with dashes", 'it = "-".join(it)'),
    ("join their first letters", 'it = "".join([w[0] for w in it if w])'),
])
STEPS = dict(numbers=NUMBERS, words=WORDS + COUNTED * 3 + JOINED * 2, text=TEXTS + SPLIT * 3)
RESULTS = dict(
    numbers=_steps("numbers", "result", [
        ("return [the sum|their sum]", "return sum(it)"),
        ("return how many there are", "return len(it)"),
        ("return them sorted", "return sorted(it)"),
        ("return them in reverse", "return it[::-1]"),
        ("return the list", "return it"),
        ("return the sum plus {k}", "return sum(it) + {k}"),
        ("return {k} times the sum", "return {k} * sum(it)"),
        ("return the largest, or {k} if there is none", "return max(it, default={k})"),
        ("return the smallest, or {k} if there is none", "return min(it, default={k})"),
        ("return whether {k} is among them", "return {k} in it"),
        ("return whether all are below {k}", "return all(x < {k} for x in it)"),
        ("return whether any is above {k}", "return any(x > {k} for x in it)"),
        ("return how many are above {k}", "return len([x for x in it if x > {k}])"),
        ("return how often {k} is in it", "return it.count({k})"),
        ("return the first, or {k} if there is none", "return it[0] if it else {k}"),
        ("return the last, or {k} if there is none", "return it[-1] if it else {k}"),
        ("return the mean, rounded down, or {k} if there is none", "return sum(it) // len(it) if it else {k}"),
        ("return the largest minus the smallest, or {k} if there is none", "return max(it) - min(it) if it else {k}"),
        ("return the product", "total = 1\nfor x in it:\n    total *= x\nreturn total"),
        ("return whether they are in order", "return it == sorted(it)"),
    ]),
    words=_steps("words", "result", [
        ("return the list", "return it"),
        ("return them sorted", "return sorted(it)"),
        ("return how many there are", "return len(it)"),
        ("return how many letters they have", "return sum(len(w) for w in it)"),
        ("return the longest, or nothing", 'return max(it, key=len, default="")'),
        ("return the first in the alphabet, or nothing", 'return min(it, default="")'),
        ("return them joined by commas", 'return ",".join(it)'),
        ("return whether any has more than {k} letters", "return any(len(w) > {k} for w in it)", (2, 6)),
        ("return how many begin with a vowel", 'return len([w for w in it if w[:1] in list("aeiou")])'),
        ("return the length of each under its word", "return {w: len(w) for w in it}"),
    ]),
    text=_steps("text", "result", [
        ("return it", "return it"),
        ("return its length", "return len(it)"),
        ("return how many words it has", "return len(it.split())"),
        ("return how often e is in it", 'return it.count("e")'),
        ("return its first {k} letters", "return it[:{k}]", FEW),
        ("return its last word, or nothing", 'return it.split()[-1] if it.split() else ""'),
        ("return whether it reads the same backwards", "return it == it[::-1]"),
        ("return whether it is longer than {k}", "return len(it) > {k}"),
        ("return it with each word reversed", 'return " ".join([w[::-1] for w in it.split()])'),
        ("return how many vowels it has", 'return len([c for c in it if c in "aeiou"])'),
    ]),
)
