"""Formats of JSON Schema that the parser of llguidance reads too widely, as regular expressions.

By itself it lets through 29 February in every year, a leap second at any time of day, and "xn--" labels that are no
punycode. Left out here: the year 0000, which Python and others cannot read; leap seconds with another offset than 0;
and labels with two hyphens in third place, which only the letters of other alphabets, spelled as punycode, may have.
Formats after RFC 3339 and RFC 1123; the remaining ones, such as ipv4, ipv6, email, uuid, uri and duration, are left to
llguidance.
"""
from __future__ import annotations

from typing import Any

DAY = r"(0[1-9]|1[0-9]|2[0-8])"
YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
LONG_MONTH, SHORT_MONTH = r"(0[13578]|1[02])", r"(0[469]|11)"
DATE = (
    rf"({YEAR}-({LONG_MONTH}-({DAY}|29|30|31)|{SHORT_MONTH}-({DAY}|29|30)|02-{DAY})|{LEAP_YEAR}-02-29)"
)
MINUTES, FRACTION = r"([01][0-9]|2[0-3]):[0-5][0-9]", r"(\.[0-9]+)?"
TIME = rf"{MINUTES}:[0-5][0-9]{FRACTION}([Zz]|[+-]{MINUTES})"
LEAP_SECOND = rf"23:59:60{FRACTION}([Zz]|[+-]00:00)"
LETTER, INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
LABEL = (
    rf"{LETTER}({LETTER}|{INNER}({LETTER}|{INNER}{LETTER}|({LETTER}{INNER}|-{LETTER}){INNER}{{0,58}}{LETTER}))?"
)
HOST_CHARACTERS = 253
PATTERNS = {
    "date": DATE,
    "time": rf"({TIME}|{LEAP_SECOND})",
    "date-time": rf"({DATE}[Tt]{TIME}|{YEAR}-(06-30|12-31)[Tt]{LEAP_SECOND})",
    "hostname": rf"{LABEL}(\.{LABEL})*",
}


def tightened(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with a pattern in place of a format that would be read too widely."""
    if not isinstance(name := schema.get("format"), str) or name not in PATTERNS:
        return schema
    rest = {key: part for key, part in schema.items() if key != "format"}
    if name == "hostname":
        given = rest.get("maxLength")
        rest["maxLength"] = min(given, HOST_CHARACTERS) if isinstance(given, (int, float)) else HOST_CHARACTERS
    pattern = {"pattern": f"^{PATTERNS[name]}$"}
    return rest | ({"allOf": [*rest.get("allOf", []), pattern]} if "pattern" in rest else pattern)
