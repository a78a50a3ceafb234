"""The final answer of a text: equal answers are recognised as such, different ones are not."""
from __future__ import annotations

from fractions import Fraction
from time import perf_counter, thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playground.algorithms.search.final_answer import final_answer, last_words, whole_text


@pytest.mark.parametrize(
    "text, number",
    [
        (" 6 * 7 = 42\n42 - 3 = 39\n#### 39", "39"),
        ("The answer is 1,200.50. Then 3 more.", "1200.5"),
        (r"so \boxed{-7} and 8", "-7"),
        ("first 3, then 4", "4"),
        ("27-35", "35"),
        ("it is (-3)", "-3"),
        ("#### 4\nno, the answer is: 5.0", "5"),
        ("0.00", "0"),
        ("1e3 00100", "100"),
        ("none", None),
    ],
)
def test_the_number_an_answer_ends_in(text, number):
    assert final_answer(text) == number


SPELLINGS = {
    "0.5": ["1/2", "2/4", ".5", "0.50", "½", r"\boxed{\frac{1}{2}}", r"\boxed{\dfrac12}"],
    "0.07": ["7%", r"\boxed{7\%}", "7 percent", "0.07"],
    "1/3": ["1/3", r"$\tfrac{1}{3}$", r"\boxed{\frac{2}{6}}", "#### 1/3"],
    "-1/3": ["-1/3", r"\boxed{-\frac{1}{3}}", r"\boxed{\frac{-1}{3}}", "−1/3"],
    "2.5": ["2 1/2", "2½", r"\boxed{2\frac{1}{2}}", "10 / 4", "The answer is 5/2."],
    "100000": ["10^5", "10**5", "10⁵", r"\boxed{10^{5}}", "100,000", "1e5", "1 × 10^5", r"\boxed{100{,}000}"],
    "0.01": ["10^-2", r"\boxed{10^{-2}}", "1%"],
    "2": [r"\boxed{\sqrt{4}}", r"\boxed{x = 2}", r"\boxed{2\text{ cm}}", "it is 2 cm^2", "$2.00",
          "The answer is 1 + 1 = 2."],
    "-7": ["-7", "x = -7", "(-7)", "-$7", "the answer is **-7**"],
    "(1,2)": ["(1, 2)", r"\boxed{(1,2)}", r"\boxed{\left(1,\frac{4}{2}\right)}", "The answer is (1, 2)."],
    "[1,2)": ["[1, 2)", r"\boxed{[1,2)}"],
    "{1,2}": [r"\boxed{\{2, 1\}}", r"\boxed{\{1, \frac{4}{2}\}}"],
    "1,2": ["The answer is 1, 2.", r"\boxed{1, 2}"],
    "2sqrt(2)": [r"\boxed{2\sqrt{2}}", r"\boxed{2 \sqrt2}"],
    "x^2+1": [r"\boxed{x^2 + 1}", r"\boxed{x^{2}+1}"],
    "10^100000": ["10^100000", r"\boxed{10^{100000}}"],
    "1/0": ["1/0"],
    "±3": ["±3", r"\boxed{\pm 3}"],
    "yes": [r"\boxed{\text{Yes}}"],
    "3pi": [r"\boxed{3\pi}"],
    "3:4": ["3:4"],
}


@pytest.mark.parametrize("normal, spelling", [(key, text) for key, texts in SPELLINGS.items() for text in texts])
def test_spellings_of_one_answer_are_equal_and_different_answers_are_not(normal, spelling):
    assert final_answer(spelling) == normal
    assert final_answer(f"Of 40 we take 3.\n{spelling}") == normal, "what comes before does not matter"


@settings(deadline=None, max_examples=60)
@given(st.fractions(min_value=-50, max_value=50, max_denominator=60), st.integers(1, 9))
def test_every_fraction_has_one_normal_form_with_its_exact_value(number, factor):
    above, below = number.numerator * factor, number.denominator * factor
    forms = {final_answer(text) for text in (
        f"so {above}/{below}", rf"\boxed{{\frac{{{above}}}{{{below}}}}}", f"#### {above}/{below}", str(number)
    )}
    assert len(forms) == 1 and Fraction(forms.pop()) == number


def test_the_last_of_several_stated_answers_counts_and_an_empty_box_states_none():
    assert final_answer(r"\boxed{1/3}, no: the answer is 1/4. I checked 9 cases.") == "0.25"
    assert final_answer(r"The answer is 4. In a box: \boxed{\frac{\frac{1}{2}}{3}}") == "1/6"
    assert final_answer(r"12 \boxed{}") == "12" and final_answer(r"12 \boxed{3") == "3"


HOSTILE = ["(", "(1,200", "1*", r"\frac{", r"\boxed{", "1,", "sqrt(", "^{", "9", "answer is ", "- "]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_texts_are_parsed_in_linear_time(piece):
    began = perf_counter()
    final_answer(piece * 3000)
    final_answer(rf"\boxed{{{piece * 500}}}")
    assert perf_counter() - began < 2


def test_answers_in_words_forget_case_punctuation_and_spacing():
    assert last_words("It was the Red  boat!", 2) == "red boat" and last_words("...", 2) is None
    assert whole_text(" a\n b ") == "a b" and whole_text(" ") is None


HOSTILE = {
    "a unit that is none": r"\boxed{1" + "a" * 60 + "!}",
    "units and more units": r"\boxed{" + "1a " * 3000 + "!}",
    "blanks": " " * 20_000,
    "blanks in a box": r"\boxed{1" + " " * 20_000 + "!}",
    "blank lines": "\n \n" * 7000,
    "blanks in a bracket": "(" + " " * 20_000,
    "blanks before a root": "sqrt" + " " * 9000,
    "superscripts": "x" + "²" * 5000,
    "digits": "1" * 10_000,
    "digits in a bracket": "(1" * 5000,
    "lists in lists": r"\boxed{" + "(" * 3000 + "1" + ",2)" * 3000 + "}",
    "a long list": r"\boxed{(" + "1," * 3000 + "1)}",
    "boxes that stay open": r"\boxed{" * 1500,
    "powers of powers": r"\boxed{9^9^9^9^9^9}",
    "powers in brackets": r"\boxed{(9^9999)^9999}",
    "fractions": r"\frac{1}{2}" * 1500,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_is_read_in_time(text):
    """It is read in the process of the page, between two forwards: one of 60 letters took hours."""
    start = thread_time()
    final_answer(text)
    assert thread_time() - start < 2.0
