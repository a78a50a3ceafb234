"""The exact value of a written number: fractions, powers, roots, percentages, LaTeX and common typography."""
from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from math import isqrt

LONGEST = 160  # characters of an expression; bounds the recursion
MOST_BITS = 4096  # of a power that is computed
NESTED = 8  # levels of LaTeX arguments that are rewritten
NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
TOKEN = re.compile(rf"\s*({NUMBER}|sqrt|[-+*/^%()])")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
SYMBOLS = {
    r"\{": "⟦", r"\}": "⟧", r"\left": "", r"\right": "", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\%": "%",
    r"\times": "*", r"\cdot": "*", "×": "*", "·": "*", "÷": "/", "⁄": "/", "−": "-", "–": "-", r"\pm": "±",
    r"^{\circ}": "", r"^\circ": "", "°": "", r"\$": "", "$": "", "€": "", "£": "", r"\,": "", r"\!": "", r"\;": " ",
    r"\:": " ", r"\ ": " ", "~": " ",
}
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"(?<![\d.])(\d*)\s*\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
MIXED = re.compile(r"(?<![\d.,/])(\d+)\s+(\d+)/(\d+)(?![\d./])")


class NotANumber(ValueError):
    """The expression has no exact rational value that is worth computing."""


def plain(text: str) -> str:
    """LaTeX and typography as + - * / ^ % sqrt( ) and digits; the braces of a set become ⟦ ⟧."""
    for symbol, replacement in SYMBOLS.items():
        text = text.replace(symbol, replacement)
    text = re.sub(r"(?<=[\d)])\*\*(?=[-\d(])", "^", text).replace("**", "")  # else bold type
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: f"^({run[0].translate(SUPERSCRIPTS)})", text)
    text = "".join(_vulgar(character) for character in text)
    text = re.sub(r"\s*\b(?:percent|per cent)\b", "%", _without_braces(text))
    return MIXED.sub(r"(\1+\2/\3)", text)


def value(expression: str) -> Fraction:
    """The value of an expression made plain. Raises NotANumber."""
    if len(expression) > LONGEST:
        raise NotANumber
    try:
        return _Reader(expression).read()
    except ZeroDivisionError:
        raise NotANumber from None


def written(number: Fraction) -> str:
    """A decimal if it terminates, else a fraction in lowest terms: "1200.5", "-1/3"."""
    denominator, digits = number.denominator, 0
    for prime in (2, 5):
        power = 0
        while denominator % prime == 0:
            denominator, power = denominator // prime, power + 1
        digits = max(digits, power)
    if denominator > 1:
        return str(number)
    whole = str(abs(number.numerator) * 10 ** digits // number.denominator).zfill(digits + 1)
    sign, point = "-" * (number < 0), len(whole) - digits
    return sign + whole[:point] + "." * (digits > 0) + whole[point:]


def _vulgar(character: str) -> str:
    """ "½" as " 1/2"."""
    if character.isascii() or not unicodedata.decomposition(character).startswith("<fraction>"):
        return character
    return " " + unicodedata.normalize("NFKC", character).replace("⁄", "/")


def _without_braces(text: str) -> str:
    """LaTeX commands with arguments rewritten from the inside out, other braces dropped."""
    for _ in range(NESTED):
        text = WRAPPED.sub(r" \1 ", text)
        text = re.sub(r"\\sqrt\s*(?:\{([^{}]*)\}|(\d))", r" sqrt(\1\2)", text)
        text = re.sub(r"\^\s*\{([^{}]*)\}", r"^(\1)", text)
        text = FRACTION.sub(_fraction, text)
    return text.replace("{", "").replace("}", "")


def _fraction(found: re.Match) -> str:
    """A LaTeX fraction; digits before it make it a mixed number."""
    whole, above, above_digit, below, below_digit = found.groups()
    above, below = (part if part.isdigit() else f"({part})" for part in (above or above_digit, below or below_digit))
    return f"({whole}{'+' if whole else ''}{above}/{below})"


class _Reader:
    """Recursive descent over sums, products, signs, powers, percentages, roots and parentheses."""

    def __init__(self, expression: str):
        self.tokens, at, expression = [], 0, expression.strip()
        while at < len(expression):
            if not (found := TOKEN.match(expression, at)):
                raise NotANumber
            self.tokens.append(found[1])
            at = found.end()

    def read(self) -> Fraction:
        self.tokens.reverse()
        number = self._sum()
        if self.tokens:
            raise NotANumber
        return number

    def _take(self, *wanted: str) -> str | None:
        """The next token if it is one of these."""
        return self.tokens.pop() if self.tokens and self.tokens[-1] in wanted else None

    def _sum(self) -> Fraction:
        total = self._product()
        while sign := self._take("+", "-"):
            total += self._product() * (1 if sign == "+" else -1)
        return total

    def _product(self) -> Fraction:
        result = self._signed()
        while operator := self._take("*", "/"):
            factor = self._signed()
            result = result * factor if operator == "*" else result / factor
        return result

    def _signed(self) -> Fraction:
        sign = self._take("+", "-")
        return -self._signed() if sign == "-" else self._signed() if sign else self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if self._take("^"):
            base = power(base, self._signed())
        return base / 100 if self._take("%") else base

    def _atom(self) -> Fraction:
        if self._take("sqrt"):
            return power(self._group(), Fraction(1, 2))
        if self.tokens and self.tokens[-1] == "(":
            return self._group()
        if not self.tokens or self.tokens[-1] in "-+*/^%)":
            raise NotANumber
        return Fraction(self.tokens.pop().replace(",", ""))

    def _group(self) -> Fraction:
        if not self._take("("):
            raise NotANumber
        number = self._sum()
        if not self._take(")"):
            raise NotANumber
        return number


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent. Raises NotANumber if it is irrational or too long to compute."""
    if exponent.denominator == 2:
        base, exponent = root(base), exponent * 2
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > MOST_BITS:
        raise NotANumber
    return base ** exponent.numerator


def root(number: Fraction) -> Fraction:
    """The square root. Raises NotANumber if it is irrational."""
    if number < 0:
        raise NotANumber
    found = Fraction(isqrt(number.numerator), isqrt(number.denominator))
    if found * found != number:
        raise NotANumber
    return found
