"""The independent validator: jsonschema, which shares nothing with the grammar engine. Numbers are compared exactly, as
decimals.
"""
from __future__ import annotations

import json
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

from playground.errors import Refusal

DIGITS = 2000  # of a quotient, for multipleOf
LARGEST = 400  # power of ten up to which a whole number is written out
# of a schema that names none: the first whose form it has
DRAFTS = ("Draft202012Validator", "Draft7Validator", "Draft4Validator")


class Validity(NamedTuple):
    """What became of a text: valid, invalid, no JSON, or unchecked where the validator itself gives up."""

    outcome: str
    reason: str = ""


class Judge:
    """Judges texts by one schema."""

    def __init__(self, schema: Any):
        schema = exact(json.dumps(schema))
        form = _form(schema)
        self._validator = form(schema, format_checker=form.FORMAT_CHECKER)

    def __call__(self, text: str) -> Validity:
        try:
            data = exact(text)
        except json.JSONDecodeError as reason:
            return Validity("no JSON", str(reason))
        except (ValueError, ArithmeticError, RecursionError) as reason:  # numbers and depths past what Python holds
            return Validity("unchecked", f"{type(reason).__name__}: {reason}")
        try:
            with localcontext(prec=DIGITS):
                problem = next(self._validator.iter_errors(data), None)
        except Exception as reason:  # patterns that Python cannot read, references it cannot follow
            return Validity("unchecked", f"{type(reason).__name__}: {reason}")
        return Validity("invalid", problem.message) if problem else Validity("valid")


def _form(schema: Any) -> Any:
    try:
        from jsonschema import SchemaError, validators
    except ImportError:
        raise Refusal(
            'The study needs a validator that is not the grammar engine: pip install "jsonschema>=4.26,<5".',
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
    """JSON with numbers that lose no digit; 1.0 is the whole number 1."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    return int(number) if number.adjusted() < LARGEST and number == number.to_integral_value() else number
