"""An independent validator: jsonschema, which shares no code with the grammar engine. Numbers are compared exactly, as
decimals.
"""
from __future__ import annotations

import json
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

from playground.errors import Refusal

DIGITS = 2000  # of a quotient, for multipleOf
LARGEST = 400  # power of ten up to which a whole number becomes an int
# for a schema without $schema: the first whose metaschema it satisfies
DRAFTS = ("Draft202012Validator", "Draft7Validator", "Draft4Validator")


class Validity(NamedTuple):
    """Outcome for a text: valid, invalid, no JSON, or unchecked if the validator itself fails."""

    outcome: str
    reason: str = ""


class Judge:
    """Validates texts against one schema."""

    def __init__(self, schema: Any):
        schema = exact(json.dumps(schema))
        draft = _draft(schema)
        self._validator = draft(schema, format_checker=draft.FORMAT_CHECKER)

    def __call__(self, text: str) -> Validity:
        try:
            data = exact(text)
        except json.JSONDecodeError as reason:
            return Validity("no JSON", str(reason))
        except (ValueError, ArithmeticError, RecursionError) as reason:  # numbers or depths that Python cannot handle
            return Validity("unchecked", f"{type(reason).__name__}: {reason}")
        try:
            with localcontext(prec=DIGITS):
                problem = next(self._validator.iter_errors(data), None)
        except Exception as reason:  # patterns that Python cannot compile, references it cannot resolve
            return Validity("unchecked", f"{type(reason).__name__}: {reason}")
        return Validity("invalid", problem.message) if problem else Validity("valid")


def _draft(schema: Any) -> Any:
    try:
        from jsonschema import SchemaError, validators
    except ImportError:
        raise Refusal(
            'The schema benchmark needs an independent validator: pip install "jsonschema>=4.26,<5".',
            "jsonschema",
        ) from None
    drafts = [getattr(validators, name) for name in DRAFTS]
    if isinstance(schema, dict) and "$schema" in schema:
        return validators.validator_for(schema, default=drafts[0])
    for draft in drafts:
        try:
            draft.check_schema(schema)
        except SchemaError:
            continue
        return draft
    return drafts[0]


def exact(text: str) -> Any:
    """JSON with exact numbers; 1.0 is the integer 1."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    return int(number) if number.adjusted() < LARGEST and number == number.to_integral_value() else number
