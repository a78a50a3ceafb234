"""Allowed tokens: bundled grammars, GBNF, and rejection sampling with unbiased weights."""
from __future__ import annotations

import ast
import json
import keyword
import math
import random
import re
import sqlite3
from collections import defaultdict
from datetime import date
from itertools import accumulate, product
from statistics import median
from time import perf_counter

import pytest
import torch
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from tables import Enumerating, TableModel, distance, write
from toys import END, byte_tokenizer

from playground.algorithms.constrained.bundled_grammars import NAMES
from playground.bench.schemas.random_writer import RandomWriter
from playground.contract import Constraint, find, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.grammar_matcher import GrammarEngine, Matcher
from playground.engine.tokens import Tokens
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.constrained.awrs import token_rejection as rejections
from strategies.constrained.awrs.token_rejection import Tries, counting, first_legal, recursive
from strategies.constrained.static.csr_trie import ROOT, CsrTrie
from support.dates import is_day
from support.laws import EXACT, WRONG
from support.particles import SKEWED, coins, legal_chances, steered, weighed_law, zeros

TOKENIZER = byte_tokenizer(merges=80)
TOKENS = Tokens(TOKENIZER, len(TOKENIZER))
LEAP = ("1904", "2000", "2024", "2096")


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [TOKENIZER.convert_tokens_to_ids(END)])


def accepts(engine: GrammarEngine, constraint, text: str) -> bool:
    matcher = engine.compile(*constraint.grammar()).matcher()
    return all(matcher.advance(token) for token in TOKENS.encode(text)) and matcher.accepting


# --- bundled grammars ---

def is_sql(text: str) -> None:
    try:
        sqlite3.connect(":memory:").execute(f"EXPLAIN {text}")
    except sqlite3.Error as error:  # missing tables are no fault of the grammar
        assert not any(fault in str(error) for fault in ("syntax", "unrecognized", "incomplete")), error


READERS = {
    "json": json.loads,
    "arithmetic": lambda text: ast.parse(text, mode="eval"),
    "date": date.fromisoformat,
    "sql": is_sql,
    "python": ast.parse,
}


def test_every_bundled_grammar_has_an_independent_parser():
    assert READERS.keys() == set(NAMES) and make("lark").grammar()[1] != make("lark", ready="json").grammar()[1]


@pytest.mark.oracle("lark")
@pytest.mark.parametrize("name", READERS)
def test_text_under_a_bundled_grammar_is_accepted_by_the_real_parser(engine, name):
    grammar, scribbler = engine.compile(*make("lark", ready=name).grammar()), RandomWriter(TOKENS, len(TOKENIZER))
    written = [scribbler.write(grammar.matcher(), seed, 120) for seed in range(30)]
    texts = {TOKENS.decode(ids) for ids in written if ids is not None}
    assert len(texts) >= 12
    for text in texts:
        READERS[name](text)


SENTENCES = {
    "json": (['{"a": [1, -2.5e3, null], "b": "\\u00e9"}', "true"], ["{'a': 1}", "01", '{"a": 1,}', '"\n"']),
    "arithmetic": (["(12 + 7) * -3", "1.5 / 2"], ["12 +", "2 ** 3", "(1", "007"]),
    "date": (
        ["2024-12-31", "1999-04-30", *(f"{year}-02-29" for year in LEAP)],
        ["2024-13-01", "1999-04-31", "1900-02-29", "2023-02-29", "2024-02-30", "99-01-01"],
    ),
    "sql": (
        [
            (
                "SELECT name, COUNT(*) AS n FROM birds WHERE age >= 3 AND (x = 'it''s' OR NOT z < 2) GROUP BY name"
                " ORDER BY n DESC LIMIT 3"
            ),
            "SELECT * FROM a LEFT JOIN b ON a.x = b.y WHERE t IN ('a', 3)",
            "SELECT fromage FROM wherever",
        ],
        [
            "SELECT FROM a",
            "SELECT select FROM a",
            "DROP TABLE a",
            "SELECT * FROM a LIMIT 0; DROP TABLE a",
            "SELECT 'a FROM b",
        ],
    ),
    "python": (
        [
            "def f(x):\n    if x > 3:\n        return x\n    return x + 1\nprint(f(2))\n",
            'x = "a"\nfor i in range(3):\n    x += i\n',
            "iffy = [1, forx]\n",
        ],
        ["return 3\n", "if x:\npass\n", "x = 007\n", "x = \n", "  x = 1\n"],
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_bundled_grammar_accepts_the_expected_sentences_only(engine, name):
    legal, illegal = SENTENCES[name]
    assert [text for text in legal if not accepts(engine, make("lark", ready=name), text)] == []
    assert [text for text in illegal if accepts(engine, make("lark", ready=name), text)] == []


def test_keywords_are_not_accepted_as_names(engine):
    python, sql = make("lark", ready="python"), make("lark", ready="sql")
    assert [word for word in keyword.kwlist if accepts(engine, python, f"{word} = 1\n")] == []
    for word in ("select", "from", "order", "index", "like", "returning", "window", "replace", "key"):
        if accepts(engine, sql, f"SELECT {word} FROM {word}"):
            is_sql(f"SELECT {word} FROM {word}")


# --- GBNF ---

LLAMA_JSON = r'''# as llama.cpp ships it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}'''
GBNF = {
    "as it comes": (LLAMA_JSON, ['{"a": [1, true], "é": "x"}', "{}"], ["[1]", '{"a": }']),
    "rules within rules": ('root ::= "a" x "b"\nx ::= "c" x | ""', ["ab", "accb"], ["a", "acc"]),
    "names with hyphens and capitals": (
        'root ::= my-rule\nmy-rule ::= "a" my-rule | theEnd\ntheEnd ::= "b" my-rule | "c"',
        ["abac"],
        ["ab"],
    ),
    "letters by number": ('root ::= "\\u00e9\\x41" [\\u4e00-\\u9fff]+', ["éA日本"], ["eA日", "éA"]),
    "any character is a line break too": ('root ::= "<" .{2,3} ">"', ["<a\n>", "<abc>"], ["<a>"]),
    "dots and hashes that are letters": (
        'root ::= "a.b#" x # a . in a remark\nx ::= "+" x | [.#]',
        ["a.b#+.", "a.b##"],
        ["axb#.", "a.b#"],
    ),
    "brackets and escapes": ('root ::= "\\\\[\\]\\n" x\nx ::= "+" x | [\\x5d\\]a]', ["\\[]\n+]"], ["\\[]\nb"]),
    "nothing special in a class": (
        'root ::= [&&] [a~~b] [+--] x\nx ::= "!" | "?" x',
        ["&~,!", "&b-?!"],
        ["&c,!", "&a.!"],
    ),
    "repeats": ('root ::= [0-9]{2,3} "-" ("ab"){2} x?\nx ::= "!" x?', ["12-abab", "123-abab!!"], ["1-abab", "12-ab"]),
    "a rule that begins with itself": ('root ::= root "a" | "b"', ["b", "baa"], ["a", "bb"]),
}


@pytest.mark.oracle("gbnf")
@pytest.mark.parametrize("source, legal, illegal", GBNF.values(), ids=GBNF)
def test_gbnf_accepts_what_llama_cpp_accepts(engine, source, legal, illegal):
    constraint = make("gbnf", source=source)
    assert [text for text in legal if not accepts(engine, constraint, text)] == []
    assert [text for text in illegal if accepts(engine, constraint, text)] == []


@pytest.mark.parametrize(
    "name, text",
    [
        ("letters by number", "éA日本"),
        ("any character is a line break too", "<a\n>"),
        ("brackets and escapes", "\\[]\n+]"),
        ("nothing special in a class", "&~,!"),
    ],
)
def test_the_converter_alone_would_reject_or_misread_it(engine, name, text):
    try:
        assert not accepts(engine, make("lark", source=gbnf_to_lark(GBNF[name][0])), text)
    except (Refusal, GbnfToLarkError):
        pass


# as llama.cpp ships it, and the sentence of its documentation
ARITHMETIC = r'''root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*'''


@pytest.mark.oracle("gbnf")
def test_a_terminal_does_not_consume_what_must_follow_it(engine):
    """Greedily, `ws` would read the line break that ends a line, and `name` the word "end"."""
    arithmetic, name = make("gbnf", source=ARITHMETIC), make("gbnf", source='root ::= n "end" n?\nn ::= [a-z] n?')
    for text, legal in (("x=1\n", True), ("(a+b_2 )*3 = 14 \n\n", True), ("x=1", False), ("x=\n", False)):
        assert accepts(engine, arithmetic, text) == legal, text
    for text in ("end", "foo", "fooend", "endend", "enendd", "fooendbar", "fooen"):
        assert accepts(engine, name, text) == (re.fullmatch("[a-z]+end[a-z]*", text) is not None), text


Rule = str | tuple  # a letter, or ("seq" | "alt", parts), ("any", part), ("ref", number)


def random_rule(chance: random.Random, rules: int, depth: int = 3) -> Rule:
    kind = chance.choice(["seq", "seq", "alt", "any", "ref", "letter"]) if depth else "letter"
    if kind == "letter":
        return chance.choice("ab")
    if kind == "ref":
        return "seq", (chance.choice("ab"), ("ref", chance.randrange(rules)))  # no left recursion
    if kind == "any":
        return "any", random_rule(chance, rules, 0)
    return kind, tuple(random_rule(chance, rules, depth - 1) for _ in range(chance.randint(1, 3)))


def gbnf_of(rule: Rule) -> str:
    match rule:
        case ("seq", parts):
            return f"({' '.join(map(gbnf_of, parts))})"
        case ("alt", parts):
            return f"({' | '.join(map(gbnf_of, parts))})"
        case ("any", part):
            return f"{gbnf_of(part)}*"
        case ("ref", number):
            return f"r{number}" if number else "root"
    return f'"{rule}"'


def ends(rules: list[Rule], rule: Rule, text: str, at: int) -> set[int]:
    """Where a rule may stop that begins at a place of a text, read character by character."""
    match rule:
        case ("seq", parts):
            found = {at}
            for part in parts:
                found = {end for place in found for end in ends(rules, part, text, place)}
            return found
        case ("alt", parts):
            return {end for part in parts for end in ends(rules, part, text, at)}
        case ("any", part):
            found, new = {at}, {at}
            while new := {end for place in new for end in ends(rules, part, text, place)} - found:
                found |= new
            return found
        case ("ref", number):
            return ends(rules, rules[number], text, at)
    return {at + 1} if text[at:at + 1] == rule else set()


@pytest.mark.oracle("gbnf")
def test_random_grammars_accept_the_same_texts_with_and_without_a_lexer():
    tokenizer = byte_tokenizer(merges=0)
    engine, tokens = GrammarEngine(tokenizer, len(tokenizer), [0]), Tokens(tokenizer, len(tokenizer))
    texts, compared = ["".join(letters) for size in range(6) for letters in product("ab", repeat=size)], 0
    for seed in range(40):
        chance = random.Random(seed)
        rules = [random_rule(chance, 3) for _ in range(3)]
        source = "\n".join(f"{f'r{i}' if i else 'root'} ::= {gbnf_of(rule)}" for i, rule in enumerate(rules))
        expected = {text for text in texts if len(text) in ends(rules, rules[0], text, 0)}
        try:
            grammar = engine.compile("gbnf", source)
        except Refusal:
            assert not expected, source
            continue
        found = set()
        for text in texts:
            matcher = grammar.matcher()
            if all(matcher.advance(token) for token in tokens.encode(text)) and matcher.accepting:
                found.add(text)
        assert found == expected, source
        compared += 0 < len(found) < len(texts)
    assert compared > 20


@pytest.mark.parametrize("source", [
    'start: W "end"\nW: /[a-z]+/',
    'start: line+\nline: ID "=" ID "\\n"\nID: /[a-z]+[ \\n]*/',
    'start: "(" start ")" | W "a"\nW: /[ab]+/',
    'start: "x" | W "end"\nW: /[a-z]+/',  # only x can be completed, and every other letter is a trap
    'start: item ("," item)* "."\nitem: W | N "9"\nN: /[0-9]+/\nW: /[a-z]+/',
])
def test_a_lark_grammar_whose_terminals_never_stop_is_refused_before_anything_runs(engine, source):
    with pytest.raises(Refusal, match="read as far as it goes") as refused:
        engine.compile("lark", source)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("source, text", [
    ('start: W " end"\nW: /[a-z]+/', "the end"),
    ('start: W | W "end"\nW: /[a-z]+/', "weekend"),  # the second branch adds nothing, and no text is lost in it
    ('start: "x" | "y" W "end"\nW: /[A-Z]+/', "yUend"),
    ('start: "(" start ")" | W | "0" N\nN: /[0-9]+/\nW: /[a-z]+/', "((012))"),
    ('start: W "end"\nW: /[a-c]+/', "abend"),
    ('start: W+ "end"\nW: /[a-z]+/\nWS: / +/\n%ignore WS', "a b end"),
    ('start: A B\nA: /a*/\nB: /b+/', "b"),
    ('start: W\nW: /[a-z]+/ & /.{3}/', "abc"),
])
def test_a_lark_grammar_with_a_parsable_text_is_accepted(engine, source, text):
    assert accepts(engine, make("lark", source=source), text)


@pytest.mark.parametrize(
    "source, says",
    [
        ('top ::= "a"', "no rule called root"),
        ('root = "a"', "no rule called root"),
        ("root ::= foo", 'Rule "foo" not found'),
        ('root ::= "a"\nroot ::= "b"', 'two rules called "root"'),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\n"b"', "line 2"),
        ('root ::= <think> "a"', "Expected name at line 1"),
        ('root ::= "\\q"', "Invalid escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a" root', "no finite text"),
        ("root ::= []", "unclosed character class"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
        ("", "is empty"),
    ],
)
def test_gbnf_that_cannot_be_used_is_refused_in_one_line(engine, source, says):
    with pytest.raises(Refusal) as refused:
        engine.compile("gbnf", source)
    assert says in str(refused.value) and "GBNF grammar" in str(refused.value) and "\n" not in str(refused.value)


def is_animals(text: str) -> bool:
    return all(part.startswith("a ") and 3 <= len(part) - 2 <= 6 and part[2:].isalpha() for part in text.split(" and "))


ANIMALS = 'root ::= animal (" and " animal){0,3} "."\nanimal ::= "a " [a-z]{3,6}'
SOUND = {"gbnf": [({"source": ANIMALS}, lambda text: text[-1] == "." and is_animals(text[:-1]))],
         "lark": [({"ready": "date"}, is_day)]}


# --- rejections: E[weight, if v was taken] = p(v) for each allowed v ---

P = torch.tensor([0.4, 0.05, 0.25, 0.0, 0.2, 0.1], dtype=torch.float64)
LEGAL = {"some": {1, 3, 4}, "all": set(range(6)), "one": {1}, "the favourite": {0}}


def weighed(way, p: torch.Tensor, legal: set[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Exact E[weight, if v was taken] and P(v was taken), over every random outcome."""
    draws, mass, law = Enumerating(), defaultdict(float), defaultdict(float)
    for _ in draws.runs():
        token, weight = way(Tries(p, legal.__contains__, lambda q: draws.pick(q, "try", 0)))
        mass[token] += draws.weight * weight
        law[token] += draws.weight
    return dict(mass), dict(law)


PATIENT = pytest.mark.parametrize("patience", [1, 2, rejections.PATIENCE])


@PATIENT
@pytest.mark.oracle("awrs")
@pytest.mark.parametrize("legal", LEGAL.values(), ids=LEGAL)
def test_the_recursive_estimate_is_exact_on_average_for_every_token(legal, patience, monkeypatch):
    """Also where the whole vocabulary is checked after a rejection or two."""
    monkeypatch.setattr(rejections, "PATIENCE", patience)
    mass, law = weighed(recursive, P, legal)
    wanted = {v: float(P[v]) for v in legal if P[v] > 0}
    assert distance({v: m for v, m in mass.items() if m}, wanted) < EXACT
    assert (
        distance(
            {v: q for v, q in law.items() if v is not None}, {v: p / sum(wanted.values()) for v, p in wanted.items()}
        )
        < EXACT
    )


def test_if_all_tokens_are_allowed_the_weight_is_one_after_two_trials():
    tries = Tries(P, lambda token: True, lambda q: Draws(1).pick(q, "try", 0))
    assert recursive(tries)[1] == 1.0 and len(tries.asked) == 2


def one_over_the_tries(tries: Tries):
    token, _ = first_legal(tries)
    return token, 1 / len(tries.asked) if token is not None else 0.0


def forgets_what_is_gone(tries: Tries):
    """q of the whole distribution, not of the remaining tokens."""
    token, weight = recursive(tries)
    refused = [float(tries.p[v]) for v, ok in tries.asked.items() if not ok]
    return token, weight and math.prod(1 - p for p in refused)


@pytest.mark.refuses("awrs")
@pytest.mark.parametrize("wrong", [first_legal, one_over_the_tries, forgets_what_is_gone])
def test_wrong_weights_are_detected(wrong):
    mass, _ = weighed(wrong, P, LEGAL["some"])
    assert distance({v: m for v, m in mass.items() if m}, {1: 0.05, 4: 0.2}) > WRONG


def drawn(way, p: torch.Tensor, legal: set[int], times: int, seed: int) -> list[tuple[int | None, float, int]]:
    """Token, weight and number of trials of many samples."""
    chance, found, values = random.Random(seed), [], list(range(len(p)))
    for _ in range(times):
        tries = Tries(p, legal.__contains__, lambda q: chance.choices(values, q.tolist())[0])
        found.append((*way(tries, chance.random), len(tries.asked)))
    return found


def counts(accepts: int, most: int = 10**6):
    return lambda tries, uniform: counting(tries, uniform, accepts, most)


def off_by(found: list, p: torch.Tensor, legal: set[int]) -> float:
    """Largest deviation of E[weight, if v was taken] from p(v), in standard errors."""
    errors = []
    for v in range(len(p)):
        values = torch.tensor([weight if token == v else 0.0 for token, weight, _ in found], dtype=torch.float64)
        wanted = float(p[v]) if v in legal else 0.0
        errors.append(abs(float(values.mean()) - wanted) / max(float(values.std()) / math.sqrt(len(found)), 1e-12))
    return max(errors)


@pytest.mark.oracle("awrs")
@pytest.mark.parametrize("patience", [1, rejections.PATIENCE])
@pytest.mark.parametrize("accepts, most", [(2, 10**6), (4, 10**6), (2, 3), (3, 1)])
def test_counts_are_unbiased_within_four_standard_errors(accepts, most, patience, monkeypatch):
    """12,000 samples: a bias of 4 % of the mass would be detected."""
    monkeypatch.setattr(rejections, "PATIENCE", patience)
    legal = LEGAL["some"]
    assert off_by(drawn(counts(accepts, most), P, legal, 12_000, seed=accepts), P, legal) < 4


@pytest.mark.refuses("awrs")
@pytest.mark.parametrize("wrong", ["counts no refused token twice", "counts the last that passed"])
def test_the_same_test_detects_wrong_counts(wrong, monkeypatch):
    if wrong == "counts no refused token twice":
        monkeypatch.setattr(rejections, "_again", lambda share, uniform: 0)
        way = counts(2)
    else:
        def way(tries, uniform):
            token, weight = counting(tries, uniform, 2, 10**6)
            return token, 2 / (1 / weight + 1)
    assert off_by(drawn(way, P, LEGAL["some"], 12_000, seed=2), P, LEGAL["some"]) > 6


def test_requiring_more_accepted_tokens_lowers_variance_and_costs_trials():
    """For a uniform row, of which a sixth is allowed."""
    flat = torch.full((12,), 1 / 12, dtype=torch.float64)
    found = [
        drawn(way, flat, {3, 7}, 6000, seed=5)
        for way in (lambda tries, uniform: recursive(tries), counts(2), counts(4))
    ]
    spread = [float(torch.tensor([weight for _, weight, _ in draws]).var()) for draws in found]
    tried = [sum(count for *_, count in draws) for draws in found]
    assert spread[2] < spread[1] and tried[2] > tried[1] > 0 and spread[2] < spread[0]


@pytest.mark.parametrize(
    "way", [counts(2), counts(8), lambda tries, uniform: recursive(tries), lambda tries, uniform: first_legal(tries)]
)
def test_without_allowed_tokens_each_is_tried_once_and_the_weight_is_zero(way):
    assert drawn(way, P, set(), 3, seed=0) == [(None, 0.0, 5)] * 3


def test_one_allowed_token_among_many_is_found_without_thousands_of_draws():
    p, draws = torch.full((4000,), 1 / 4000, dtype=torch.float64), []
    found = recursive(Tries(p, lambda token: token == 3999, lambda q: draws.append(q) or Draws(1).pick(q, "try", 0)))
    assert found[0] == 3999 and len(draws) <= rejections.PATIENCE + 1
    assert found[1] == pytest.approx(1 / 4000)


# --- the strategy ---

@pytest.mark.oracle("awrs")
@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("particles", [1, 2])
def test_weighted_answers_are_unbiased_estimates_of_the_models_probabilities(particles, threshold):
    found = weighed_law(
        LaneConfig("awrs", {"particles": particles, "threshold": threshold, "estimate": "recursive"}, [SKEWED]),
        coins(2, 0.3),
    )
    assert distance(found, legal_chances(0.3)) < EXACT


@pytest.mark.refuses("awrs")
def test_dropping_the_weights_of_a_population_is_detected(monkeypatch):
    monkeypatch.setattr(find("awrs"), "_tried", lambda self, tries, uniform: first_legal(tries))
    found = weighed_law(LaneConfig("awrs", {"particles": 2, "threshold": 1.0}, [SKEWED]), coins(2, 0.3))
    assert distance(found, legal_chances(0.3)) > WRONG


def test_one_particle_equals_a_plain_mask_and_more_weighted_ones_approach_the_model():
    """A mask gives 1/2, the model's own distribution 1/3."""
    assert zeros_of(1, 0.0, weights=False) == pytest.approx(1 / 2) == zeros(1, 0.0)
    assert 1 / 3 < zeros_of(2, 0.0) < 0.49


def zeros_of(particles: int, threshold: float, **knobs) -> float:
    """Probability of the answer 00 among the allowed answers of two fair coins."""
    recipe, draws, found = (
        LaneConfig(
            "awrs", {"particles": particles, "threshold": threshold, "estimate": "recursive", **knobs}, [SKEWED]
        ),
        Enumerating(),
        0.0,
    )
    for _ in draws.runs():
        text = steered(recipe, coins(2), draws).text
        found += draws.weight * (text == "00")
    return found


def test_with_many_texts_the_answer_follows_the_model_given_the_grammar():
    """00000 or 1 and four more of a fair coin: a mask says 1/2, the model 1/17. 120 answers of 64 texts, counted: a
    share above 0.2 has no chance.
    """
    skewed = ("regex", {"pattern": "0{5}|1[01]{4}"})
    lanes = [steered(LaneConfig("awrs", {"particles": 64}, [skewed]), coins(5), Draws(seed)) for seed in range(12)]
    assert sum(lane.text == "00000" for lane in lanes) <= 3
    assert all(lane.text == "00000" or lane.text[0] == "1" and len(lane.text) == 5 for lane in lanes)


def test_if_all_tokens_are_allowed_all_texts_count_and_nothing_is_rejected():
    lane = steered(
        LaneConfig("awrs", {"particles": 5, "threshold": 1.0}, [("regex", {"pattern": "[01]{3}"})]), coins(3), Draws(0)
    )
    effective = [
        event.data["series"]["effective sample size"]
        for event in lane.recorded
        if isinstance(event, Figure) and event.name == "effective sample size"
    ]
    refused = [
        event.data["series"]["refused"]
        for event in lane.recorded
        if isinstance(event, Figure) and event.name.startswith("tries")
    ]
    assert effective == pytest.approx([5.0] * 4) and refused == [0.0] * 4


class Balanced:
    """A black box: balanced brackets, at most three deep. It counts its calls."""

    def __init__(self):
        self.asked = 0

    def __deepcopy__(self, memo: dict) -> Balanced:
        return self

    def viable(self, text: bytes) -> bool:
        self.asked += 1
        depths = list(accumulate(1 if byte == ord("(") else -1 for byte in text))
        return set(text) <= set(b"()") and all(0 <= depth <= 3 for depth in depths)

    def complete(self, text: bytes) -> bool:
        self.asked += 1
        return text.count(b"(") == text.count(b")")


class Brackets(Constraint):
    """Has no grammar; without a name it is not registered."""

    def __init__(self, box: Balanced):
        self.box = box

    def checker(self):
        return self.box


def brackets(context: tuple[int, ...]) -> torch.Tensor:
    """Mostly brackets with equal probability, the end after six at the earliest, and little of everything else."""
    row = torch.full((len(TOKENIZER),), math.log(1e-4), dtype=torch.float64)
    row[TOKENIZER.convert_tokens_to_ids(list("()"))] = math.log(0.45)
    row[TOKENIZER.eos_token_id] = math.log(0.5 if len(context) > 6 else 1e-9)
    return row


def boxed(name: str, seed: int = 0, **knobs):
    """A lane constrained by the black box, and the box."""
    box, decoder = Balanced(), make(name, **knobs)
    toggles = [*decoder.toggles(), Brackets(box)]
    model = TableModel(tokenizer=TOKENIZER, rule=brackets)
    samplers = [part for part in toggles if part.kind == "sampler"]
    return write(Assembly(decoder, samplers, constraint=toggles[-1]), {"target": model}, [5], Limits(seed, 24),
                 Draws(seed)), box


def tried(lane) -> float:
    """Tokens checked in all texts of a lane."""
    return sum(event.data["series"]["tokens tried"] for event in lane.recorded
               if isinstance(event, Figure) and event.name.startswith("tries"))


def test_awrs_computes_no_mask_and_reports_its_checks(monkeypatch):
    checked, inner = [], Matcher.allows
    monkeypatch.setattr(Matcher, "allows", lambda self, token: checked.append(token) or inner(self, token))
    monkeypatch.setattr(Matcher, "bitmask", lambda self: pytest.fail("a mask was computed"))
    lane = steered(LaneConfig("awrs", {"particles": 1}, [("regex", {"pattern": "1[01]{5}"})]), coins(6), Draws(0))
    assert len(lane.main.written) == 7 and len(checked) == tried(lane)
    assert len(checked) < 30 < lane.vocabulary


def test_awrs_checks_few_tokens_of_a_black_box_where_a_mask_checks_all():
    lane, box = boxed("awrs", particles=1)
    assert Balanced().complete(lane.text.encode()) and Balanced().viable(lane.text.encode()) and lane.reason == "end"
    assert box.asked < 6 * len(lane.main.written)
    masked, asked = boxed("sample", temperature=1.0, top_p=1.0)
    assert Balanced().complete(masked.text.encode()) and asked.asked > 300 * len(masked.main.written)


@pytest.mark.parametrize("name, knobs", [("greedy", {}), ("smc", {"particles": 3}), ("beam_search", {"beams": 2})])
def test_every_decoder_supports_a_black_box_constraint(name, knobs):
    lane, _ = boxed(name, **knobs)
    assert Balanced().viable(lane.text.encode())
    assert lane.reason == "length" or Balanced().complete(lane.text.encode())


def test_syncode_permits_single_tokens_as_in_its_mask():
    strategy = make("syncode", ready="arithmetic", undecided="banned")
    strategy.begin(0, TOKENS.bytes)
    history = TOKENS.encode("(1")
    everything = torch.ones(1, len(TOKENIZER), dtype=torch.bool)
    wanted = strategy.narrow(everything, [history])[0].tolist()
    assert [strategy.permits(history, token, len(TOKENIZER)) for token in range(len(TOKENIZER))] == wanted
    assert any(wanted) and not all(wanted)


def test_rejected_and_accepted_tokens_are_reported():
    lane = steered(LaneConfig("awrs", {"particles": 6}, [("regex", {"pattern": "1[01]"})]), coins(2), Draws(0))
    notes = [event.text for event in lane.recorded if isinstance(event, Note) and "tries of" in event.text]
    assert notes and all("refused '0'" in note and "passed '1'" in note for note in notes)


# --- items: the trie as a matrix, against a trie of dictionaries ---

Items = list[list[int]]


def random_items(seed: int, vocabulary: int = 40, count: int = 30, length: int = 6, ragged: bool = False) -> Items:
    """None is a prefix of another: each ends with a unique token."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, length - 1) if ragged else length - 1 for _ in range(count)]
    return [
        [chance.randrange(1, 6 if i % 2 else vocabulary) for _ in range(size)] + [0] for i, size in enumerate(lengths)
    ]


def children(items: Items, prefix: tuple[int, ...]) -> set[int]:
    return {item[len(prefix)] for item in items if tuple(item[:len(prefix)]) == prefix and len(item) > len(prefix)}


def prefixes(items: Items) -> set[tuple[int, ...]]:
    return {tuple(item[:i]) for item in items for i in range(len(item))}


def walk(trie: CsrTrie, prefix: tuple[int, ...]) -> int:
    """State after a prefix; fails where an edge is missing."""
    state = ROOT
    for depth, token in enumerate(prefix):
        tokens, states, count = trie.following(torch.tensor([state]), depth)
        [place] = ((tokens[0] == token) & count[0]).nonzero()[:, 0].tolist()
        state = int(states[0, place])
    return state


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_the_transition_matrix_equal_the_trie(seed, ragged):
    items = random_items(seed, ragged=ragged)
    trie = CsrTrie(items, 40)
    for prefix in prefixes(items):
        tokens, _, count = trie.following(torch.tensor([walk(trie, prefix)]), len(prefix))
        assert tokens[count].tolist() == sorted(children(items, prefix))
    assert all(trie.complete(walk(trie, tuple(item))) for item in items)
    assert trie.edges == len({tuple(item[:i]) for item in items for i in range(2, len(item) + 1)})
    assert trie.widest == [
        max(len(children(items, prefix)) for prefix in prefixes(items) if len(prefix) == depth)
        for depth in range(trie.length)
    ]


@pytest.mark.parametrize("items", [[], [[]], [[1, 2], [1, 2, 3]]])
def test_indistinguishable_items_are_refused(items):
    with pytest.raises(ValueError):
        CsrTrie(items, 9)


def test_the_order_of_items_and_their_repeats_do_not_matter():
    items = random_items(3)
    once, again = CsrTrie(items, 40), CsrTrie(items[::-1] + items[:9], 40)
    assert torch.equal(once.packed, again.packed) and torch.equal(once.indptr, again.indptr)


def test_a_step_takes_no_longer_with_a_thousand_times_the_items():
    """Medians of 200 steps of 16 beams; a search through all items would take a hundred times longer."""
    taken = []
    for count in (100, 100_000):
        chance = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 30, (count, 6), generator=chance)
        trie = CsrTrie(rows.tolist() if count < 1000 else rows.unique(dim=0).tolist(), 30)
        states = torch.randint(1, 31, (16,), generator=chance)
        taken.append(median(clocked(lambda trie=trie, states=states: trie.following(states, 1)) for _ in range(200)))
    assert taken[1] < 5 * taken[0]


def clocked(act) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start


LETTERS = "abcdefg!"  # the last ends a text


def table(seed: int) -> TableModel:
    return TableModel(LETTERS, "!", seed)


def words(seed: int, count: int = 14) -> list[str]:
    chance = random.Random(seed)
    return list(dict.fromkeys("".join(chance.choices("abcdefg", k=chance.randint(1, 4))) for _ in range(count)))


def search(model: TableModel, items: list[str], beams: int):
    return write(
        assemble(LaneConfig("static", {"items": "|".join(items), "beams": beams})),
        {"target": model},
        [0, 1],
        Limits(0, 12),
        Draws(0),
    )


def chance_of(model: TableModel, text: str) -> float:
    """Log-probability of a text and its end after the prompt."""
    ids = [LETTERS.index(letter) for letter in f"{text}!"]
    return sum(float(model.scores((0, 1, *ids[:i])).log_softmax(-1)[token]) for i, token in enumerate(ids))


def found_by_dictionaries(model: TableModel, items: list[str], beams: int) -> str:
    """Beam search over strings; whole items stay in the competition."""
    pool = [("", 0.0)]
    while any(not text.endswith("!") for text, _ in pool):
        whole = [entry for entry in pool if entry[0].endswith("!")]
        growing = [text + letter for text, _ in pool if not text.endswith("!") for letter in LETTERS]
        longer = [text for text in growing if any(f"{item}!".startswith(text) for item in items)]
        pool = sorted(
            [*whole, *((text, chance_of_beginning(model, text)) for text in longer)], key=lambda entry: -entry[1]
        )[:beams]
    return pool[0][0][:-1]


def chance_of_beginning(model: TableModel, text: str) -> float:
    return chance_of(model, text[:-1]) if text.endswith("!") else chance_of(model, text) - float(
        model.scores((0, 1, *map(LETTERS.index, text))).log_softmax(-1)[LETTERS.index("!")])


@pytest.mark.oracle("static")
@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_the_search_equals_a_search_over_dictionaries(seed, beams):
    model, items = table(seed), words(seed)
    lane = search(model, items, beams)
    assert lane.text in items and lane.reason == "end"
    assert lane.text == found_by_dictionaries(model, items, beams)


@pytest.mark.parametrize("seed", range(6))
def test_with_as_many_beams_as_items_the_most_probable_item_is_found(seed):
    model, items = table(seed), words(seed)
    assert search(model, items, 64).text == max(items, key=lambda item: chance_of(model, item))


def test_a_single_item_is_always_written():
    assert search(table(1), ["gfedc"], 4).text == "gfedc"


@pytest.mark.refuses("static")
def test_unmasked_padding_of_a_row_is_detected(monkeypatch):
    """The search would leave the items, since other rows of the matrix follow."""
    following = CsrTrie.following

    def unmasked(self, states, depth):
        tokens, after, count = following(self, states, depth)
        return tokens, after, torch.ones_like(count)

    monkeypatch.setattr(CsrTrie, "following", unmasked)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(6):
            assert search(table(seed), words(seed), 4).text in words(seed)


@pytest.mark.parametrize(
    "items, length, says",
    [
        ("|", 12, "no item to choose"),
        ("abcdefg", 3, "7 tokens, and 3 can be written"),
        ("abc|xyz", 12, "no tokens for the item 'xyz'"),
    ],
)
def test_items_that_cannot_be_searched_are_refused(items, length, says):
    with pytest.raises((Refusal, AssertionError), match=says):
        write(
            assemble(LaneConfig("static", {"items": items})), {"target": table(0)}, [0, 1], Limits(0, length), Draws(0)
        )
