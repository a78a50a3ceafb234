"""Compiles one constraint, in a fork of the confined child (`grammar.work`).

The result is plain data: for llguidance the text of a grammar that has been compiled once here, within the limits
of the kernel and of the parser, so that the same text compiles in the process that runs the models; for SynCode the
tables of its automata and of its parser. Imports neither torch nor transformers.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from playground.confined.walls import resident_bytes
from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.forced_bytes import NO_FORCING
from playground.grammar.kinds import KINDS, parser_limits
from playground.grammar.lark.gbnf_to_lark import lark_of
from playground.grammar.lark.lexed_sentences import unreadable
from playground.grammar.lark.productive_rules import endless, rules_of_lark, with_schemas
from playground.grammar.schema.keywords import CHECKABLE, nearest_type
from playground.grammar.schema.source import read_schema
from playground.grammar.schema.subset import FIXED_WHITESPACE, check_size, enforceable
from playground.grammar.tagged_grammar import TaggedSource, lark_of_tags
from playground.grammar.template_grammar import Template, lark_of_template
from playground.grammar.triggered_grammar import TriggeredSource, lark_around

PROBED = 16  # tokens the compiled grammar is followed over
NOWHERE = "no finite text satisfies it, or none that is short enough to follow"
TOO_COMPLEX = re.compile(r"row has|[Ll]exer|fuel|too complex")  # as llguidance words its limits
TOO_DEEP = "it is nested too deeply"
OVERLAPPING = (
    "The JSON Schema cannot be used: alternatives of oneOf may hold at the same time, and then no mask enforces it."
    " Let them differ in their type or in a required property with a const of its own, or write anyOf if more than one"
    " may hold, or use checked_schema, which checks the text as well."
)
COUNTED = (
    "The JSON Schema cannot be used: a mask enforces minProperties and maxProperties only where all listed properties"
    " are required. Require them, or use checked_schema, which checks the text as well."
)
UNIMPLEMENTED, INVALID_TYPE = re.compile(r"Unimplemented keys: \[(.*?)\]"), re.compile(r"Invalid type: (\w+)")


def compile_grammar(tokenizer: LLTokenizer, kind: str, source: str) -> dict[str, Any]:
    """The grammar as llguidance reads it; raises Refusal.

    {"text", "seconds", "bytes"}: seconds of processor time and bytes of memory are those of building its parser.
    """
    text = _composed(tokenizer, kind, source) if kind in _COMPOSERS else _checked_text(tokenizer, kind, source)
    start, before = process_time(), resident_bytes()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    seconds, size = process_time() - start, len(text) + max(0, resident_bytes() - before)
    _probe(kind, matcher)
    if seconds > limits.REPEATED_SECONDS:
        raise refusal(
            kind, f"its parser takes {seconds:.1f} s to build, and at most {limits.REPEATED_SECONDS} s are allowed"
        )
    return {"text": text, "seconds": seconds, "bytes": size}


def _composed(tokenizer: LLTokenizer, kind: str, source: str) -> str:
    """A grammar around others, which are compiled alone before: messages about them are about what people wrote."""
    text = LLMatcher.grammar_from_lark(_COMPOSERS[kind](tokenizer, source))
    _validate(tokenizer, kind, text)
    return text


def _template(tokenizer: LLTokenizer, source: str) -> str:
    template = Template.read(source)
    for hole in template.holes:
        try:
            _check_alone(tokenizer, "regex", hole.pattern or ".")
        except Refusal as refused:
            raise Refusal(f"The hole {hole.name!r}: {refused}", "source") from None
    return lark_of_template(template)


def _triggered(tokenizer: LLTokenizer, packed: str) -> str:
    parts = TriggeredSource.unpacked(packed)
    parts.check()
    return lark_around(parts, _within(tokenizer, parts))


def _tagged(tokenizer: LLTokenizer, packed: str) -> str:
    source = TaggedSource.unpacked(packed)
    source.check()
    return lark_of_tags(source, [_tag(tokenizer, tag) for tag in source.tags])


def _tag(tokenizer: LLTokenizer, tag: TriggeredSource) -> str:
    try:
        return _within(tokenizer, tag)
    except Refusal as refused:
        raise Refusal(f"The tag {tag.trigger[:40]!r}: {refused}", "source") from None


def _within(tokenizer: LLTokenizer, parts: TriggeredSource) -> str:
    """The constraint after a trigger, as llguidance reads it."""
    source = _with_fixed_whitespace(parts.source) if parts.kind == "json_schema" else parts.source
    alone = _check_alone(tokenizer, parts.kind, source)
    if parts.kind == "gbnf" and parts.end:
        alone = lark_of(source, parts.end)
    return alone


def _check_alone(tokenizer: LLTokenizer, kind: str, source: str) -> str:
    """A grammar inside another, as llguidance reads it; raises Refusal if no text satisfies it."""
    text = _checked_text(tokenizer, kind, source)
    _probe(kind, LLMatcher(tokenizer, text, log_level=0, limits=parser_limits()))
    return text


def _checked_text(tokenizer: LLTokenizer, kind: str, source: str) -> str:
    """The grammar as llguidance reads it; raises Refusal if it cannot be used."""
    text = _in_one_sentence(kind, _READERS[kind], source)
    _validate(tokenizer, kind, text)
    if kind == "lark" and (reason := endless(rules_of_lark(source), "start") or unreadable(source)):
        raise refusal(kind, reason)
    return text


def _validate(tokenizer: LLTokenizer, kind: str, text: str) -> None:
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, tokenizer, limits=parser_limits())
    if failed:
        raise refusal(kind, messages[0])


def _in_one_sentence(kind: str, read: Callable[[str], str], source: str) -> str:
    try:
        return read(source)
    except RecursionError:
        raise refusal(kind, TOO_DEEP) from None


def _probe(kind: str, start: LLMatcher) -> None:
    """Advance a grammar over its first tokens; raises Refusal if none is possible."""
    if not start.is_accepting() and (cause := _dead_end(start)) is not None:
        raise refusal(kind, f"it is too complex to follow ({cause})" if TOO_COMPLEX.search(cause) else NOWHERE)
    matcher = start.deep_copy()
    for _ in range(PROBED):
        token = None if matcher.is_stopped() else next(_allowed(matcher), None)
        if token is None or not matcher.consume_token(token):
            break


def _dead_end(start: LLMatcher) -> str | None:
    """Why no token can be the first, in the parser's words; None if one can."""
    cause = ""
    for token in _allowed(start):
        fork = start.deep_copy()
        if fork.consume_token(token):
            return None
        cause = fork.get_error()
    return ((cause or start.get_error()).splitlines() or [""])[0].partition(";")[0]


def _allowed(matcher: LLMatcher) -> Iterator[int]:
    """The tokens of the mask, the last one first: among those are the long ones, which reach further into a grammar."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    while bits and not matcher.is_error():
        yield (token := bits.bit_length() - 1)
        bits ^= 1 << token


def _read_schema(source: str) -> str:
    return LLMatcher.grammar_from_json_schema(_sound_schema(source))


def _sound_schema(source: str) -> str:
    schema = read_schema(source).schema
    check_size(schema)
    return json.dumps(enforceable(schema))


def _read_lark(source: str) -> str:
    return LLMatcher.grammar_from_lark(f"{with_schemas(source, _sound_schema)}\n{NO_FORCING}")


def _with_fixed_whitespace(source: str) -> str:
    """A schema whose texts have no white space at their end, where an end string may have some."""
    schema = read_schema(source).schema
    return json.dumps({**schema, "x-guidance": FIXED_WHITESPACE}) if isinstance(schema, dict) else source


def _read_gbnf(source: str) -> str:
    return LLMatcher.grammar_from_lark(lark_of(source))


def _read_choice(source: str) -> str:
    options = source.split("|")  # spaces belong to an option: many models begin a word with one
    if not all(map(str.strip, options)):
        raise Refusal(
            'An option of the list of choices is empty: write them with one "|" between each two, as in "yes|no".'
        )
    return LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    )


_READERS = {
    "json_schema": _read_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": _read_lark,
    "gbnf": _read_gbnf,
    "choice": _read_choice,
}

_COMPOSERS = {"triggered": _triggered, "template": _template, "tags": _tagged}


def refusal(kind: str, message: str) -> Refusal:
    """A message of llguidance in one sentence, without the lines that quote the source."""
    if "coerce_one_of" in message:  # it advises leniency, which is refused
        return Refusal(OVERLAPPING)
    if unimplemented := UNIMPLEMENTED.search(message):
        return _not_by_a_mask(re.findall(r'"([^"]*)"', unimplemented[1]))
    if "min/maxProperties only supported" in message:
        return Refusal(COUNTED)
    if (wrong := INVALID_TYPE.search(message)) and (meant := nearest_type(wrong[1])):
        return Refusal(f"The JSON Schema cannot be used: {wrong[0]}. Write {meant} if that is meant.")
    first, *rest = message.strip().splitlines() or ["its compiler gave no reason"]
    if kind in ("regex", "gbnf"):
        first = re.sub(r"^at \d+\(\d+\): ", "", first)  # a position in the generated Lark grammar
    causes = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    reason = " ".join([_shortened(first), *causes]).rstrip(".:")
    return Refusal(f"The {KINDS[kind]} cannot be used: {_shortened(reason)}. Change or remove that part.")


def _not_by_a_mask(keys: list[str]) -> Refusal:
    """Which constraint enforces the keywords that llguidance does not."""
    others = [key for key in keys if key not in CHECKABLE]
    start = f"The JSON Schema cannot be used: Unimplemented keys: {json.dumps(keys)}."
    if others == ["dependencies"]:
        return Refusal(f"{start} Write dependentRequired or dependentSchemas, and use checked_schema: it checks them.")
    if others:
        return Refusal(f"{start} No constraint here enforces {', '.join(others)}: write the schema without.")
    return Refusal(f"{start} No mask enforces them: use checked_schema, which checks the text as well.")


def _shortened(text: str, most: int = 400) -> str:
    return text if len(text) <= most else text[:most] + " …"
