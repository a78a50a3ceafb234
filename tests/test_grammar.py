"""Token masks of grammars, against enumeration, forks and an independent validator."""
import json
import random
import re

import jsonschema
import pytest
import torch
from toys import END, byte_tokenizer

from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine
from support.tokenizer_kinds import KINDS

TOKENIZER = byte_tokenizer(merges=80)
PADDING = 7
TOKENS = Tokens(TOKENIZER, len(TOKENIZER) + PADDING)
ENDS = [TOKENIZER.convert_tokens_to_ids(END), TOKENIZER.convert_tokens_to_ids("<|user|>")]

FINITE = {
    ("choice", "red|green|greenish|the bird|Größe| red "): [" red ", "red", "green", "greenish", "the bird", "Größe"],
    ("regex", "(the|then) (fox|bird)?[0-2]"): [
        f"{a} {b}{d}" for a in ("the", "then") for b in ("fox", "bird", "") for d in "012"
    ],
    ("lark", 'start: "a" middle? "z"\nmiddle: "nd" | " trees"'): ["az", "andz", "a treesz"],
    ("json_schema", '{"enum": ["tea", 36, [true]], "x-guidance": {"whitespace_flexible": false}}'): [
        '"tea"',
        "36",
        "[true]",
    ],
}
RECORD = json.dumps({
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "trees"]}, "minItems": 1, "maxItems": 3},
        "old": {"type": "boolean"},
    },
    "required": ["name", "age", "likes", "old"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
})


@pytest.fixture(scope="module")
def engine():
    return GrammarEngine(TOKENIZER, TOKENS.vocabulary, ENDS)


def walk(matcher, chance, steps):
    """Advance over random tokens of the mask and return them; stops early at the end of the text."""
    path = []
    while len(path) < steps and matcher.mask().any():
        path.append(chance.choice(matcher.mask().nonzero().flatten().tolist()))
        assert matcher.advance(path[-1])
    return path


def legal(matcher):
    return {id for id in range(TOKENS.vocabulary) if matcher.fork().advance(id)}


def oracle(prefix, language):
    """Tokens after which some text of the language can still be reached."""
    follow = {
        id
        for id in range(TOKENS.vocabulary)
        if TOKENS.bytes(id) and any(t.encode().startswith(prefix + TOKENS.bytes(id)) for t in language)
    }
    return follow | (set(ENDS) if prefix in [text.encode() for text in language] else set())


@pytest.mark.parametrize("grammar", FINITE, ids=lambda g: g[0])
@pytest.mark.parametrize("seed", range(4))
def test_allowed_tokens_are_those_that_lead_to_a_text_of_the_language(engine, grammar, seed):
    chance, matcher, path = random.Random(seed), engine.compile(*grammar).matcher(), []
    while not matcher.stopped:
        prefix = b"".join(map(TOKENS.bytes, path))
        assert legal(matcher) == oracle(prefix, FINITE[grammar])
        path.append(chance.choice(sorted(legal(matcher) - set(ENDS))))
        matcher.advance(path[-1])
    assert TOKENS.decode(path) in FINITE[grammar]


@pytest.mark.parametrize("grammar", FINITE, ids=lambda g: g[0])
@pytest.mark.parametrize("seed", range(4))
def test_the_mask_omits_allowed_tokens_only_where_one_tokenisation_is_forced(engine, grammar, seed):
    chance, matcher, path = random.Random(seed), engine.compile(*grammar).matcher(), []
    while matcher.mask().any():
        prefix = b"".join(map(TOKENS.bytes, path))
        allowed, possible = set(matcher.mask().nonzero().flatten().tolist()), oracle(prefix, FINITE[grammar])
        assert allowed <= possible
        if allowed < possible:
            (only,) = allowed
            assert all(
                t.encode().startswith(prefix + TOKENS.bytes(only))
                for t in FINITE[grammar]
                if t.encode().startswith(prefix)
            )
        path += walk(matcher, chance, 1)


def test_the_mask_is_as_wide_as_the_model_and_bans_rows_without_a_token(engine):
    mask = engine.compile("regex", "(?s:.*)").matcher().mask()
    assert mask.shape == (TOKENS.vocabulary,)
    assert not mask[-PADDING:].any()


@pytest.mark.parametrize("kind, said", [("t5", "joined by Metaspace"), ("bert", "WordPiece"), ("words", "no decoder")])
def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused_in_words(kind, said):
    tokenizer = KINDS[kind]()
    with pytest.raises(Refusal, match=f"Grammars do not work with this model's tokenizer .it[s ].*{said}") as refused:
        GrammarEngine(tokenizer, len(tokenizer), [])
    assert "Some(" not in str(refused.value)


def test_a_model_with_fewer_rows_than_the_tokenizer_gets_a_mask_of_its_own_width():
    narrow = GrammarEngine(TOKENIZER, len(TOKENIZER) - 3, ENDS)
    assert narrow.compile("regex", "[a-z]+").matcher().mask().shape == (len(TOKENIZER) - 3,)


def test_an_all_accepting_grammar_does_not_change_the_argmax(engine):
    matcher = engine.compile("regex", "(?s:.*)").matcher()
    text = [id for id in range(len(TOKENIZER)) if not TOKENS.is_special(id) and "<0x" not in TOKENS.piece(id)]
    torch.manual_seed(0)
    for _ in range(50):
        scores = torch.randn(TOKENS.vocabulary)
        scores[[id for id in range(TOKENS.vocabulary) if id not in text + ENDS]] = -9.0
        favourite = int(scores.argmax())
        assert int(scores.masked_fill(~matcher.mask(), -torch.inf).argmax()) == favourite
        if favourite not in ENDS:
            assert matcher.advance(favourite)


@pytest.mark.parametrize("end", ENDS)
def test_every_end_token_ends_an_accepting_text_and_nothing_follows(engine, end):
    matcher = engine.compile("regex", "a+").matcher()
    assert not matcher.mask()[ENDS].any()
    assert not matcher.advance(end)
    matcher.advance(TOKENS.encode("a")[0])
    assert matcher.accepting and not matcher.stopped
    assert matcher.mask()[ENDS].all()
    assert matcher.advance(end)
    assert matcher.stopped and not matcher.mask().any()
    assert legal(matcher) == set()


def test_a_complete_text_is_stopped_although_its_end_is_not_written_yet(engine):
    matcher = engine.compile("choice", "tea").matcher()
    for id in TOKENS.encode("tea"):
        assert not matcher.stopped
        matcher.advance(id)
    assert matcher.stopped and matcher.accepting
    assert sorted(matcher.mask().nonzero().flatten().tolist()) == sorted(ENDS)


def test_a_rejected_token_does_not_change_the_matcher(engine):
    matcher = engine.compile("json_schema", RECORD).matcher()
    walk(matcher, random.Random(0), 6)
    before, state = matcher.mask(), matcher.state
    banned = [id for id in range(-1, TOKENS.vocabulary + 1) if not matcher.fork().advance(id)]
    assert banned[0] == -1 and banned[-1] == TOKENS.vocabulary
    assert not any(matcher.advance(id) for id in banned)
    assert torch.equal(matcher.mask(), before) and matcher.state == state


@pytest.mark.parametrize("grammar", [("json_schema", RECORD), *FINITE], ids=lambda g: g[0])
def test_rolling_back_any_number_of_tokens_restores_the_mask(engine, grammar):
    matcher, chance, masks, states = engine.compile(*grammar).matcher(), random.Random(1), [], []
    length = 0
    while True:
        masks.append(matcher.mask())
        states.append((matcher.state, matcher.accepting, matcher.stopped))
        if not walk(matcher, chance, 1):
            break
        length += 1
    for k in range(length + 1):
        twin = matcher.fork()
        twin.rollback(k)
        assert torch.equal(twin.mask(), masks[length - k])
        assert (twin.state, twin.accepting, twin.stopped) == states[length - k]
    with pytest.raises(ValueError):
        matcher.rollback(length + 1)


def test_a_forked_matcher_is_independent(engine):
    matcher = engine.compile("choice", "red|green").matcher()
    before = matcher.mask()
    twin = matcher.fork()
    walk(twin, random.Random(0), 9)
    assert twin.stopped and torch.equal(matcher.mask(), before)


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_a_tree_are_those_of_a_fork_for_every_path(engine, seed):
    chance, matcher = random.Random(seed), engine.compile("json_schema", RECORD).matcher()
    walk(matcher, chance, chance.randint(0, 30))
    tokens, parents, forks = [], [], [matcher.fork()]
    for node in range(24):
        parent = chance.randint(-1, node - 1)
        above = forks[1 + parent]
        choices = above.mask().nonzero().flatten().tolist() if above else []
        tokens.append(
            chance.choice(choices) if choices and chance.random() < 0.8 else chance.randrange(TOKENS.vocabulary)
        )
        parents.append(parent)
        below = above.fork() if above else None
        forks.append(below if below and below.advance(tokens[-1]) else None)
    expected = torch.stack(
        [fork.mask() if fork else torch.zeros(TOKENS.vocabulary, dtype=torch.bool) for fork in forks]
    )
    assert torch.equal(matcher.masks_of_tree(tokens, parents), expected)
    assert torch.equal(matcher.mask(), expected[0])


def test_a_node_with_a_disallowed_token_has_an_empty_row_without_affecting_siblings(engine):
    matcher = engine.compile("choice", "red|green").matcher()
    r, x, g = (TOKENS.encode(letter)[0] for letter in "rxg")
    alone = matcher.masks_of_tree([r, g], [-1, -1])
    masks = matcher.masks_of_tree([r, x, r, g], [-1, -1, 1, -1])
    assert not masks[2].any() and not masks[3].any()
    assert torch.equal(masks[[0, 1, 4]], alone)


@pytest.mark.parametrize("grammar", [("json_schema", RECORD), *FINITE], ids=lambda g: g[0])
def test_forced_tokens_are_those_with_a_single_token_mask(engine, grammar):
    matcher, chance, found = engine.compile(*grammar).matcher(), random.Random(2), 0
    while matcher.mask().any():
        run, twin = matcher.forced(), matcher.fork()
        for id in run:
            assert twin.mask().nonzero().flatten().tolist() == [id]
            twin.advance(id)
        assert twin.accepting or twin.mask().sum() != 1
        found += len(run)
        walk(matcher, chance, 1)
    assert found or grammar[0] == "regex"


@pytest.mark.parametrize("seed", range(25))
def test_every_finished_text_under_uniform_logits_validates(engine, seed):
    matcher = engine.compile("json_schema", RECORD).matcher()
    path = walk(matcher, random.Random(seed), 300)
    assert matcher.stopped and path[-1] in ENDS
    jsonschema.validate(json.loads(TOKENS.decode(path)), json.loads(RECORD))


def test_the_state_describes_the_position_in_words(engine):
    matcher = engine.compile("choice", "tea|teas").matcher()
    assert matcher.state == "must continue 'tea'"
    walk(matcher, random.Random(0), len(matcher.forced()))
    assert matcher.state == "may end"
    matcher.advance(ENDS[0])
    assert matcher.state == "ended"
    assert engine.compile("regex", "[a-z]+").matcher().state == "open"


@pytest.mark.parametrize(
    "kind, source, says",
    [
        ("json_schema", '{"type": "objec"}', "Invalid type: objec"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: \\["not"\\]'),
        ("json_schema", '{"dependencies": {"a": ["b"]}}', "Write dependentRequired or .*, and use checked_schema"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "array", "contains": {"type": "null"}}', "contains"),
        (
            "json_schema",
            '{"type": "integer", "minimum": 5, "maximum": 3}',
            "minimum \\(5\\) is greater than maximum \\(3\\)",
        ),
        ("json_schema", "false", "Unsatisfiable schema"),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"minimum": 3}]}', "write anyOf if more than one may hold"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-ahead"),
        ("json_schema", '{"type": "string", "format": "zork"}', "Unknown format: zork"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "not present"),
        ("json_schema", "{bad", "not valid JSON: .* line 1 column 2"),
        ("json_schema", "[1, 2]", "an object in braces"),
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "[^\\s\\S]", "no finite text satisfies it"),
        ("lark", "start: foo", 'unknown name: "foo"'),
        ("lark", 'strt: "a"', "no start rule"),
        ("lark", "start: /a(/", "unclosed group"),
        ("lark", 'start: "a" start', "no finite text satisfies it"),
        ("choice", "yes || no", "empty"),
        ("choice", " | ", "empty"),
        ("regex", "", "is empty"),
        ("prose", "anything", "choose one of json_schema, regex, lark, gbnf, choice, triggered, template, tags"),
    ],
)
def test_unsupported_constraints_are_refused_in_one_line_before_anything_runs(engine, kind, source, says):
    with pytest.raises(Refusal, match=says) as refused:
        engine.compile(kind, source)
    assert "\n" not in str(refused.value)


def test_a_grammar_is_compiled_once(engine):
    assert engine.compile("choice", "a|b") is engine.compile("choice", "a|b")


LETTERS = "5٣aéß_ \u00a0\u2003²"
ASCII = {r"\d": "5", r"\w": "5a_", r"\s": " \u00a0\u2003"}


def accepted(engine: GrammarEngine, kind: str, source: str, text: str) -> bool:
    matcher = engine.compile(kind, source).matcher()
    return all(matcher.advance(token) for token in TOKENS.encode(text)) and matcher.accepting


@pytest.mark.strategy("regex", "lark", "json_schema")
@pytest.mark.parametrize("sign", ASCII)
def test_character_classes_are_unicode_except_in_a_schema(engine, sign):
    """Python's `re` has the same ones of Unicode."""
    unicode = {letter for letter in LETTERS if re.fullmatch(sign, letter)} - {"²"}
    schema = json.dumps({"type": "string", "pattern": f"^{sign}$"})
    assert {letter for letter in LETTERS if accepted(engine, "regex", sign, letter)} == unicode
    assert {letter for letter in LETTERS if accepted(engine, "lark", f"start: /{sign}/", letter)} == unicode
    assert {letter for letter in LETTERS if accepted(engine, "json_schema", schema, f'"{letter}"')} == set(ASCII[sign])


OVERLAP = [{"type": "integer"}, {"type": "number", "minimum": 3}]
APART = [{"type": "integer"}, {"type": "string", "const": "none"}]
BY_CONST = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]


@pytest.mark.strategy("json_schema")
def test_what_the_refusal_of_an_overlapping_one_of_advises_works(engine):
    with pytest.raises(Refusal, match="differ in their type or in a required property with a const") as refused:
        engine.compile("json_schema", json.dumps({"oneOf": OVERLAP}))
    assert "coerce" not in str(refused.value)
    assert accepted(engine, "json_schema", json.dumps({"anyOf": OVERLAP}), "3.5")
    assert accepted(engine, "json_schema", json.dumps({"oneOf": APART}), '"none"')
    assert accepted(engine, "json_schema", json.dumps({"oneOf": BY_CONST}), '{"kind": "b"}')
