"""JSON Schemas: accepted schemas are enforced exactly, and the benchmark that shows it counts correctly."""
from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from pairs import pair
from saved import save_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import END, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from playground.bench.schemas.cases import Case, Instance, read_cases
from playground.bench.schemas.independent_validator import Judge
from playground.bench.schemas.schema_trial import (
    MaskTime,
    SchemaResult,
    SchemaTrial,
    WrittenInstance,
    ordered,
    spellings,
)
from playground.bench.schemas.schemas_report import OUTCOMES, document, group_rows, schema_rows, verdict
from playground.cli import main
from playground.contract import make
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import Grammar, GrammarEngine, Matcher
from playground.grammar.schema.string_formats import PATTERNS
from playground.grammar.schema.subset import enforceable, unlike

FOLDER = Path(__file__).parent / "schemas"
CASES = read_cases(str(FOLDER))
INTEGER, OBJECT = {"type": "integer"}, {"type": "object"}
KEYWORDS = """type enum const minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern
format items prefixItems additionalItems minItems maxItems uniqueItems contains minContains unevaluatedItems
properties required additionalProperties patternProperties minProperties maxProperties propertyNames dependentRequired
dependentSchemas dependencies unevaluatedProperties anyOf allOf oneOf not if then else $ref $defs definitions
$dynamicRef $schema title description default examples $comment""".split()


@pytest.fixture(scope="module")
def findings() -> dict[str, SchemaResult]:
    return {finding.case.name: finding for finding in SchemaTrial(pair(), most=16, scribbles=4).try_all(CASES)}


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    tokenizer = byte_tokenizer(merges=0)
    return GrammarEngine(tokenizer, len(tokenizer), [tokenizer.convert_tokens_to_ids(END)])


TOKENS = Tokens(byte_tokenizer(merges=0), 259)


def lets_through(engine: GrammarEngine, schema: dict, text: str) -> bool:
    return follows(engine.compile(*make("json_schema", source=json.dumps(schema)).grammar()).matcher(), text)


def follows(matcher: Matcher, text: str) -> bool:
    return all(matcher.advance(token) for token in TOKENS.encode(text)) and matcher.accepting


# --- the benchmark over the schemas of the tests ---

def test_the_schemas_of_the_tests_are_many_and_name_every_keyword():
    assert len(CASES) >= 60 and len({case.name for case in CASES}) == len(CASES)
    written = " ".join(case.source for case in CASES)
    assert [keyword for keyword in KEYWORDS if f'"{keyword}"' not in written] == []


@pytest.mark.slow
def test_no_accepted_schema_is_violated(findings):
    assert [violation for finding in findings.values() for violation in finding.violations] == []
    accepted = [finding for finding in findings.values() if not finding.refusal]
    assert len(accepted) > 70 and {finding.outcome for finding in accepted} <= {"valid", "cut off"}
    assert sum(finding.outcome == "valid" for finding in accepted) >= len(accepted) - 3


@pytest.mark.slow
def test_every_instance_that_fits_an_accepted_schema_can_be_written(findings):
    """But for one with a key that is not named and begins with a named one."""
    assert {name: finding.forbidden for name, finding in findings.items() if finding.forbidden} == {
        "suite/properties.json: others of one kind": ['{"ab": true, "abc": "x"}']
    }


@pytest.mark.slow
def test_the_validators_public_interface_agrees(findings):
    """Without our decimals, so without multiples of fractions."""
    texts = [(finding.case.schema, writing.text) for finding in findings.values() if finding.case.group != "multipleOf"
             for writing in finding.writings if writing.verdict.outcome == "valid"]
    assert len(texts) > 200
    for schema, text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_refused_schemas_have_a_reason_and_nothing_runs(findings):
    refused = [finding for finding in findings.values() if finding.refusal]
    assert {finding.case.name for finding in refused} >= {
        name for name in findings if name.startswith("suite/unenforced")
    }
    for finding in refused:
        assert (
            finding.outcome == "refused" and finding.reason.endswith(".") and not finding.writings and not finding.masks
        )


def test_every_mask_is_timed_in_three_parts_and_the_median_is_below_100_microseconds(findings):
    masks = [mask for finding in findings.values() for mask in finding.masks]
    assert len(masks) > 1000 and all(part > 0 for part in masks[0]) and masks[0].whole == pytest.approx(sum(masks[0]))
    assert median(mask.whole for mask in masks) < 100e-6
    assert all(finding.compile_seconds > 0 for finding in findings.values())


def wide_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """All bytes, and random longer tokens of the letters JSON is full of."""
    chance, names = random.Random(0), {END: 0}
    names |= {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    while len(names) < size:
        names.setdefault(
            "".join(
                chance.choices('abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789"{}[],:.-ĠĠĠĠ', k=chance.randint(2, 9))
            ),
            len(names),
        )
    tokenizer = Tokenizer(models.BPE(names, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


@pytest.mark.slow
def test_a_mask_over_150000_tokens_takes_less_than_a_millisecond():
    size = 150_000
    tokenizer, bench = wide_tokenizer(size), SchemaTrial.__new__(SchemaTrial)
    bench.scores, times = torch.zeros(size), []
    order = json.loads((FOLDER / "collection" / "order.json").read_text())
    grammar = GrammarEngine(tokenizer, size, [0]).compile(*make("json_schema", source=json.dumps(order)).grammar())
    text = (
        '{"day": "2024-02-28", "to": "Mia Foxley", "lines": [{"item": "tea", "number": 12, "price": 2.25}, {"item":'
        ' "wool", "number": 3}]}'
    )
    assert bench._match(grammar, tokenizer(text)["input_ids"], times)
    assert len(times) > 100 and median(mask.compute + mask.unpack for mask in times) < 1e-3


# --- violations of the engine alone, and the schema rewrite ---

LEAKS = {
    "a key spelled with escapes": ({**OBJECT, "properties": {"a": INTEGER}}, r'{"\u0061": "x"}'),
    "a quote spelled with escapes": ({**OBJECT, "properties": {'a"b': INTEGER}}, r'{"a\u0022b": "x"}'),
    "others of a kind": (
        {**OBJECT, "properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}},
        r'{"\u0061": "x"}',
    ),
    "further down": ({"type": "array", "items": {**OBJECT, "properties": {"a": INTEGER}}}, r'[{"\u0061": "x"}]'),
    "a key of a form": ({**OBJECT, "patternProperties": {"^é": INTEGER}}, r'{"\u00e9": "x"}'),
    "one key twice": ({**OBJECT, "minProperties": 2, "additionalProperties": INTEGER}, '{"b": 1, "b": 2}'),
    "leniency": ({"type": "string", "format": "zork", "not": {"const": "b"}, "x-guidance": {"lenient": True}}, '"b"'),
    "one of, read as any of": ({"oneOf": [INTEGER, {"minimum": 3}], "x-guidance": {"coerce_one_of": True}}, "3"),
}


@pytest.mark.parametrize("schema, text", LEAKS.values(), ids=LEAKS)
def test_known_violations_cannot_be_written(engine, schema, text):
    assert Judge(schema)(text).outcome == "invalid"
    try:
        assert not lets_through(engine, schema, text)
    except Refusal as refusal:
        assert "to the letter" in str(refusal)


@pytest.mark.parametrize("schema, text", LEAKS.values(), ids=LEAKS)
def test_without_the_schema_rewrite_violations_occur(schema, text):
    tokenizer = byte_tokenizer(merges=0)
    engine = GrammarEngine(tokenizer, len(tokenizer), [0])
    source = LLMatcher.grammar_from_json_schema(make("json_schema", source=json.dumps(schema)).grammar()[1])
    assert follows(Grammar(engine, "json_schema", LLMatcher(engine.llguidance, source, log_level=0)).matcher(), text)


def in_python(pattern: str) -> str:
    """The engine's escape for a code point, as Python's."""
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08X}", pattern)


def readable(schema):
    """A rewritten schema with patterns that the validator can read."""
    if isinstance(schema, dict):
        return {in_python(key): readable(part) for key, part in schema.items()}
    return [readable(part) for part in schema] if isinstance(schema, list) else schema


MENDED = [
    case
    for case in CASES
    if case.group == "properties" and "line break" not in case.name and case.name[-9:] != "no object"
]


@pytest.mark.parametrize("case", MENDED, ids=lambda case: case.name)
def test_the_rewrite_preserves_the_meaning_of_a_schema_but_for_keys_that_begin_with_a_named_one(case):
    before, after = Judge(case.schema), Judge(readable(enforceable(case.schema)))
    values = (1, "x", True, None)
    objects = [instance.data for instance in case.instances] + [
        {key: value} for key in ("a", "b", "ab", "abc", "", "c", "$a.*", "é") for value in values
    ]
    named = [*case.schema.get("properties", {}), *case.schema.get("required", [])]
    for data in objects:
        longer = [key for key in data if key not in named and any(name and key.startswith(name) for name in named)]
        expected = "invalid" if longer else before(json.dumps(data)).outcome
        assert after(json.dumps(data)).outcome == expected, data


def test_a_schema_without_problems_is_not_rewritten():
    closed = [
        case
        for case in CASES
        if case.group in ("patternProperties", "enum", "references")
        and '"additionalProperties": false' in case.source
    ]
    assert len(closed) >= 5 and all(enforceable(case.schema) == case.schema for case in closed)


def test_names_that_look_like_keywords_are_names():
    schema = {
        **OBJECT,
        "properties": {"minProperties": INTEGER, "x-guidance": {"const": 3}, "properties": INTEGER},
        "additionalProperties": False,
    }
    assert enforceable(schema) == schema
    assert enforceable({"const": {"properties": {"a": INTEGER}, "minProperties": 9}}) == {
        "const": {"properties": {"a": INTEGER}, "minProperties": 9}
    }


@pytest.mark.parametrize("texts", [["ab"], ["a", "ab"], ["", "b"], ["]a", "^", "-", "\\"], ["aa", "ab", "ba"]], ids=str)
def test_a_pattern_for_every_text_that_begins_with_none_of_these(texts):
    pattern = re.compile(in_python(unlike(texts)))
    for letters in [letters for length in range(4) for letters in product("ab]^-\\", repeat=length)]:
        text = "".join(letters)
        begun = any(text == each or each and text.startswith(each) for each in texts)
        assert bool(pattern.fullmatch(text)) != begun


KEYS_IN_ORDER = {
    "an optional key": ({**OBJECT, "properties": {"alpha": INTEGER, "b": INTEGER}, "required": ["b"]}, '{"b": 1, "'),
    "of any kind": ({**OBJECT, "properties": {"alpha": {}, "b": {}}, "required": ["b"]}, '{"b": 1, "'),
    "only required": ({**OBJECT, "required": ["alpha"]}, '{"alpha": 1, "'),
    "others of a kind": ({**OBJECT, "properties": {"alpha": INTEGER}, "additionalProperties": INTEGER}, '{"x": 1, "'),
    "one that may not be there": ({**OBJECT, "properties": {"alpha": False, "al": INTEGER}}, '{"x": 1, "'),
    "further down": ({"type": "array", "items": {**OBJECT, "properties": {"alpha": {}}}}, '[{"x": 1, "'),
}


def after(matcher: Matcher, text: str) -> set[str]:
    """The next characters that may follow a text."""
    assert all(matcher.advance(token) for token in TOKENS.encode(text)), text
    return {TOKENS.decode([token]) for token in matcher.mask().nonzero()[:, 0].tolist()}


@pytest.mark.strategy("json_schema")
@pytest.mark.parametrize("schema, before", KEYS_IN_ORDER.values(), ids=KEYS_IN_ORDER)
def test_a_key_whose_turn_is_over_is_not_begun_and_every_other_key_can_be_closed_at_once(engine, schema, before):
    grammar = engine.compile(*make("json_schema", source=json.dumps(schema)).grammar())
    reached = ""
    while (letter := "alpha"[len(reached):][:1]) in (following := after(grammar.matcher(), before + reached)):
        assert not reached or '"' in following
        reached += letter
    assert reached in ("a", "alph") and '"' in following
    for key in ("x", "x1", "a-", "AL"):
        assert '"' in after(grammar.matcher(), before + key)


@pytest.mark.refuses("json_schema")
def test_llguidance_alone_begins_a_key_that_it_does_not_close(engine):
    schema, before = KEYS_IN_ORDER["of any kind"]
    source = LLMatcher.grammar_from_json_schema(make("json_schema", source=json.dumps(schema)).grammar()[1])
    grammar = Grammar(engine, "json_schema", LLMatcher(engine.llguidance, source, log_level=0))
    assert '"' not in after(grammar.matcher(), before + "alpha")


def test_a_required_key_without_a_schema_of_its_own_keeps_that_of_the_others(engine):
    schema = {**OBJECT, "required": ["z"], "additionalProperties": INTEGER}
    assert lets_through(engine, schema, '{"z": 1}') and not lets_through(engine, schema, '{"z": "x"}')


# --- formats ---

FORMATS = {  # valid, invalid; by RFC 3339 and RFC 1123, those of the official test suite among them
    "date": (
        ["2024-02-29", "2000-02-29", "2021-12-31", "0004-02-29"],
        ["2021-02-29", "1900-02-29", "2024-02-30", "2021-04-31", "2021-13-01", "2021-00-10", "0000-01-01", "21-01-01"],
    ),
    "time": (
        ["12:30:05Z", "23:59:60Z", "23:59:60.5+00:00", "00:00:00.123-23:59", "08:30:06z"],
        ["22:59:60Z", "23:58:60Z", "23:59:60+01:00", "24:00:00Z", "12:00:61Z", "12:00:00", "12:00:00+24:00"],
    ),
    "date-time": (
        ["2024-02-29T12:30:05Z", "1998-12-31T23:59:60Z", "2021-06-30t23:59:59.9+05:30"],
        ["2021-02-29T12:00:00Z", "1998-12-31T22:59:60Z", "1998-12-30T23:59:60Z", "2021-06-30 12:00:00Z"],
    ),
    "hostname": (
        ["example.org", "a", "a-b", "a--b", "1.2", "x" * 63, ".".join(["x" * 61] * 4), "ab-c"],
        ["xn--X", "XN--a", "ab--cd", "-a", "a-", "a.", ".a", "a..b", "a_b", "x" * 64, ".".join(["x" * 63] * 4), ""],
    ),
}


@pytest.mark.oracle("json_schema")
@pytest.mark.parametrize("name", FORMATS)
def test_formats_accept_what_their_standards_define(engine, name):
    valid, invalid = FORMATS[name]
    schema = {"type": "string", "format": name}
    assert [text for text in valid if not lets_through(engine, schema, json.dumps(text))] == []
    assert [text for text in invalid if lets_through(engine, schema, json.dumps(text))] == []


def test_every_day_of_the_calendar_and_no_other_is_a_date():
    pattern = re.compile(PATTERNS["date"])
    for year, month, day in product((1, 4, 100, 1900, 1999, 2000, 2023, 2024, 9999), range(14), range(33)):
        try:
            known = bool(date(year, month, day))
        except ValueError:
            known = False
        assert bool(pattern.fullmatch(f"{year:04}-{month:02}-{day:02}")) == known


def test_host_names_are_validated_label_by_label():
    pattern = re.compile(PATTERNS["hostname"])
    for letters in [letters for length in range(1, 7) for letters in product("a-.", repeat=length)]:
        labels = (text := "".join(letters)).split(".")
        fine = all(label and label[0] != "-" != label[-1] and label[2:4] != "--" for label in labels)
        assert bool(pattern.fullmatch(text)) == fine, text


def test_a_format_beside_a_pattern_a_length_and_another_type_keeps_them(engine):
    both = {"type": ["string", "null"], "format": "date", "pattern": "^2", "maxLength": 10}
    assert lets_through(engine, both, '"2024-02-29"') and lets_through(engine, both, "null")
    assert not lets_through(engine, both, '"1024-02-29"') and not lets_through(engine, both, '"2023-02-29"')
    short = {"type": "string", "format": "hostname", "maxLength": 3}
    assert lets_through(engine, short, '"a.b"') and not lets_through(engine, short, '"a.bc"')
    assert lets_through(engine, {"properties": {"format": {"const": "date"}}}, '{"format": "date"}')


# --- the validator ---

@pytest.mark.parametrize("schema, text, outcome", [
    ({"type": "number", "multipleOf": 0.3}, "5310.6", "valid"),
    ({"type": "number", "multipleOf": 0.3}, "5310.7", "invalid"),
    ({"type": "integer"}, "1.0", "valid"),
    ({"type": "array", "items": [INTEGER], "additionalItems": False}, "[1, 2]", "invalid"),
    ({"type": "array", "items": [INTEGER], "additionalItems": False}, "[1]", "valid"),
    ({"type": "string", "pattern": "\\p{L}"}, '"a"', "unchecked"),
    ({"type": "string", "format": "date"}, '"2024-02-30"', "invalid"),
    ({"type": "integer"}, "01", "no JSON"),
    ({"type": "integer"}, "1" * 5000, "unchecked"),
    ({"type": "number"}, "1e99999999999999999999", "unchecked"),
], ids=str)
def test_the_validator_judges_exactly_or_says_that_it_cannot(schema, text, outcome):
    assert Judge(schema)(text).outcome == outcome


# --- the benchmark itself ---

class FakeMatcher:
    """A matcher that accepts everything, or nothing."""

    def __init__(self, lets: bool):
        self.lets = self.accepting = lets

    def matcher(self) -> FakeMatcher:
        return self

    def advance(self, token: int) -> bool:
        return self.lets


class Faked(SchemaTrial):
    """A benchmark of such an engine, without texts."""

    def __init__(self, lets: bool):
        super().__init__(pair())
        self.engine, self.lets = self, lets

    def compile(self, kind: str, source: str) -> FakeMatcher:
        return FakeMatcher(self.lets)

    def _written(self, case, grammar):
        return iter(())


@pytest.mark.slow
def test_engines_that_accept_everything_or_nothing_are_detected():
    instances = [instance for case in CASES for instance in case.instances]
    everything, nothing = [list(Faked(lets).try_all(CASES)) for lets in (True, False)]
    assert (
        sum(len(finding.let_through) for finding in everything)
        == sum(not instance.valid for instance in instances)
        > 100
    )
    assert not any(finding.forbidden for finding in everything)
    assert sum(len(finding.forbidden) for finding in nothing) == sum(instance.valid for instance in instances) > 100
    assert not any(finding.violations for finding in nothing)
    assert verdict(everything).startswith(f"{sum(not instance.valid for instance in instances)} violations")


def test_a_text_that_breaks_its_schema_is_a_violation_and_one_that_was_cut_off_is_not():
    judge, blank = Judge(INTEGER), SchemaResult(Case("a", "g", INTEGER))
    broken = replace(
        blank,
        writings=[WrittenInstance("the model", "2.5", judge("2.5")), WrittenInstance("scribble 1", "2", judge("2"))],
    )
    assert broken.outcome == "invalid" and broken.violations == [
        "the model wrote '2.5': Decimal('2.5') is not of type 'integer'"
    ]
    whole = replace(blank, writings=[WrittenInstance("scribble 1", "2", judge("2"))])
    assert (whole.outcome, blank.outcome) == ("valid", "cut off")


def test_counts_of_the_tables_add_up(findings):
    everything = list(findings.values())
    head, *rows, total = group_rows(everything)
    assert total[1:2 + len(OUTCOMES)] == [str(sum(int(row[i]) for row in rows)) for i in range(1, 2 + len(OUTCOMES))]
    assert int(total[1]) == len(CASES) == sum(map(int, total[2:2 + len(OUTCOMES)]))
    assert len(schema_rows(everything)) == 1 + len(CASES) and {len(row) for row in [head, *rows, total]} == {len(head)}
    assert verdict(everything) == "No accepted schema was violated."
    exported = json.loads(json.dumps(document({}, everything), allow_nan=False))
    assert [entry["name"] for entry in exported["schemas"]] == [case.name for case in CASES]
    assert all(
        entry["mask_seconds"]["median"] <= entry["mask_seconds"]["p99"]
        for entry in exported["schemas"]
        if entry["masks"]
    )


def test_the_time_of_a_mask_is_that_of_its_parts():
    finding = SchemaResult(
        Case("a", "g", INTEGER),
        compile_seconds=2e-3,
        masks=[MaskTime(3e-6, 2e-6, 1e-6)] * 99 + [MaskTime(1e-3, 2e-6, 1e-6)],
    )
    assert schema_rows([finding])[1][2:8] == ["2.0", "6", "6", "3", "2", "1"]
    assert schema_rows([replace(finding, masks=finding.masks[-2:] * 3)])[1][4] == "1003"


def test_an_instance_is_written_in_the_order_of_its_schema_too():
    schema = {"properties": {"x": {}, "y": {"properties": {"b": {}, "a": {}}}}, "required": ["z"]}
    assert list(ordered({"w": 0, "z": 1, "y": {"a": 1, "b": 2}, "x": 3}, schema)) == ["x", "y", "z", "w"]
    assert spellings({"y": {"a": 1, "b": 2}, "x": 3}, schema)[1] == '{"x": 3, "y": {"b": 2, "a": 1}}'


def test_three_layouts_are_read(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "plain.json").write_text('{"type": "integer"}')
    (tmp_path / "set" / "masks.json").write_text('{"schema": true, "tests": [{"data": 1, "valid": true}]}')
    (tmp_path / "minimum.json").write_text(
        '[{"description": "d", "schema": {"minimum": 3}, "tests": [{"description": "t", "data": 2, "valid": false}]}]'
    )
    assert read_cases(str(tmp_path)) == [
        Case("minimum.json: d", "minimum", {"minimum": 3}, (Instance("t", 2, False),)),
        Case("set/masks.json", "set", True, (Instance("1", 1, True),)),
        Case("set/plain.json", "set", {"type": "integer"})]


@pytest.mark.parametrize("text, says", [("{bad", "cannot be read as JSON"), ("[1]", "none of the known layouts"),
                                        ('[{"schema": 1, "tests": [3]}]', "none of the known layouts")])
def test_a_file_that_is_none_of_them_is_refused_by_name(tmp_path, text, says):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(Refusal, match=f"odd.json.*{says}"):
        read_cases(str(tmp_path))


def test_the_command_reports_every_schema_and_writes_a_file(tmp_path, capsys):
    out = tmp_path / "out.json"
    folder = str(FOLDER / "suite" / "const.json")
    assert (
        main(
            [
                "bench",
                "schemas",
                folder,
                "--model",
                save_models(tmp_path).target,
                "--max-new-tokens",
                "8",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "const.json: an object" in shown and "No accepted schema was violated." in shown
    exported = json.loads(out.read_text())
    assert len(exported["schemas"]) == 2 and exported["settings"]["scribbles"] == 4 and exported["machine"]["torch"]


def test_a_violation_sets_the_exit_code_after_the_whole_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("playground.bench.schemas.schema_trial.SchemaTrial", lambda *given: Faked(True))
    out = tmp_path / "out.json"
    assert (
        main(
            [
                "bench",
                "schemas",
                str(FOLDER / "suite" / "const.json"),
                "--model",
                save_models(tmp_path).target,
                "--json",
                str(out),
            ]
        )
        == 2
    )
    shown = capsys.readouterr()
    assert "violations:" in shown.out and "violates its schema" in shown.err and json.loads(out.read_text())["schemas"]


def test_the_command_refuses_an_empty_folder_before_a_model_is_loaded(tmp_path, capsys):
    assert main(["bench", "schemas", str(tmp_path), "--model", "no/such"]) == 2
    assert "There is no .json in" in capsys.readouterr().err
