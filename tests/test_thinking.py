"""Thinking is a part of the text: where it is, how many tokens it has, and what is left as the answer."""
from __future__ import annotations

import random
import re

import pytest
from toys import byte_tokenizer

import playground
from playground.engine.text.thinking_tags import KNOWN, WORKED_STEPS
from playground.engine.text.tokens import Tokens
from playground.events import Commit, Header
from playground.trace.thinking import ThinkingSpan, thinking_and_answer, thinking_parts
from playground.trace.transcript import Written, sequences
from support.page_scripts import browser, defining, evaluating  # noqa: F401

QUESTION = "Gecost buys 6 boxes of 7 keys. Then 3 of the keys are gone. How many keys does Gecost have now?"
TAGS = ["<think>", "</think>"]
OPEN = {"prompt_pieces": ["<user>", "Why?", "<think>", "\n"]}


def header(thinking: list[str], **more) -> Header:
    return Header(thinking=thinking, **more)


TEXTS = {
    "one special token each": (header(TAGS), ["<think>", "hm", "</think>", "yes"], [(0, 3, True)]),
    "tags of several tokens": (header(TAGS), ["so ", "<th", "ink>", "hm", "</", "thi", "nk>", "yes"], [(1, 7, True)]),
    "a tag that ends within a token": (header(TAGS), ["<think>", "hm</think", ">\n", "yes"], [(0, 3, True)]),
    "not ended yet": (header(TAGS), ["a", "<think>", "hm", "</thin"], [(1, 4, False)]),
    "only begun": (header(TAGS), ["a", "<thi"], []),
    "several parts": (
        header(TAGS), ["<think>", "</think>", "a", "<think>", "b", "</think>", "c"], [(0, 2, True), (3, 6, True)]
    ),
    "two parts that share a token": (
        header(TAGS), ["<think>", "</think><think>", "b", "</think>"], [(0, 2, True), (2, 4, True)]
    ),
    "begun by the prompt": (header(TAGS, **OPEN), ["hm", "</think>", "yes"], [(0, 2, True)]),
    "begun and ended by the prompt": (
        header(TAGS, prompt_pieces=["<think>", "</think>"]), ["yes", "</think>"], []
    ),
    "steps before a sign": (header(["", "####"]), ["6 * 7", "\n", "####", " 42"], [(0, 3, True)]),
    "no sign, no steps": (header(["", "####"]), ["Mia", " ran"], []),
    "another sign after the first": (header(["", "####"]), ["a", "####", "b", "####"], [(0, 2, True)]),
    "no tags": (header([]), ["<think>", "hm", "</think>"], []),
    "tags that a hostile file has": (header(["", ""]), ["a"], []),
    "no text": (header(TAGS, **OPEN), [], []),
}


# --- where it is ---

@pytest.mark.parametrize("head, pieces, parts", TEXTS.values(), ids=TEXTS)
def test_a_part_reaches_from_its_start_tag_to_its_end_tag(head, pieces, parts):
    assert thinking_parts(head, pieces) == [ThinkingSpan(*part) for part in parts]


def parts_by_regex(head: Header, pieces: list[str]) -> list[tuple[int, int, bool]]:
    """With a regular expression over the text, to which a part that the prompt left open adds its tag."""
    start, end = head.thinking
    added = start if head.prompt_pieces else ""
    owner = [number for number, piece in enumerate(pieces) for _ in piece]
    found, last = [], 0
    for match in re.finditer(f"{re.escape(start)}.*?({re.escape(end)}|$)", added + "".join(pieces), re.DOTALL):
        from_, to = (max(0, place - len(added)) for place in match.span())
        if from_ < to:
            closed = bool(match[1])
            found.append((max(owner[from_], last), owner[to - 1] + 1 if closed else len(pieces), closed))
            last = found[-1][1]
    return found


def random_texts(count: int) -> list[tuple[Header, list[str]]]:
    chance = random.Random(3)
    pieces = ["<", ">", "a", "<b", "b>", "<b>", "</", "/b", "</b>", "é🙂", "</b><b>"]
    prompts = [[], ["x<b>y"]]
    return [(header(["<b>", "</b>"], prompt_pieces=chance.choice(prompts)),
             [chance.choice(pieces) for _ in range(chance.randrange(14))]) for _ in range(count)]


def test_parts_are_those_that_a_regular_expression_finds():
    texts = random_texts(3000)
    found = [thinking_parts(*text) for text in texts]
    assert found == [parts_by_regex(*text) for text in texts]
    assert sum(len(parts) > 1 for parts in found) > 100 and sum(not parts for parts in found) > 100


@pytest.mark.journey
def test_the_page_finds_the_same_parts(browser):  # noqa: F811
    texts = [*((head, pieces) for head, pieces, _ in TEXTS.values()), *random_texts(1000)]
    given = [[{"thinking": head.thinking, "prompt_pieces": head.prompt_pieces}, [{"piece": one} for one in pieces]]
             for head, pieces in texts]
    shown = evaluating(browser, defining("components/thinking.js"))(
        "texts => texts.map(([header, tokens]) => thinkingParts(header, tokens).map((p) => [p.from, p.to, p.closed]))",
        given,
    )
    assert shown == [[[*part] for part in thinking_parts(*text)] for text in texts]


# --- what it says ---

def written(*tokens: tuple[str, str]) -> Written:
    """A text of tokens, each with its piece and with what it adds to what people read."""
    found = Written()
    for i, (piece, text) in enumerate(tokens):
        found.add(Commit(i, [i], [piece], text), i)
    return found


def alike(*pieces: str) -> list[tuple[str, str]]:
    return [(piece, piece) for piece in pieces]


@pytest.mark.parametrize("head, tokens, thinking, answer", [
    (header(TAGS), alike("<think>", "\nhm", "</think>", "\nyes"), "\nhm", "\nyes"),
    (header(TAGS), [("<think>", ""), ("hm", "hm"), ("</think>", ""), ("yes", "yes"), ("<|end|>", "")], "hm", "yes"),
    (header(TAGS, **OPEN), [(" hm", "hm"), ("</think>", ""), (" yes", " yes")], "hm", " yes"),  # a dropped blank
    (header(TAGS), [("<think>", ""), ("<0xC3>", ""), ("<0xA9>", "é"), ("</think>", ""), ("ü", "ü")], "é", "ü"),
    (header(TAGS), alike("a", "<think>", "b", "</think>", "c", "<think>", "d", "</think>", "e"), "bd", "ace"),
    (header(TAGS), alike("a", "<think>", "b"), "b", "a"),
    (header(["", "####"]), alike("6 * 7 = 42\n", "####", " 42"), "6 * 7 = 42\n", " 42"),
    (header([]), alike("yes"), "", "yes"),
])
def test_the_text_is_split_into_thinking_and_answer(head, tokens, thinking, answer):
    assert thinking_and_answer(head, written(*tokens)) == (thinking, answer)


def test_worked_steps_of_the_bundled_model_are_its_thinking():
    result = playground.run("greedy", QUESTION, chat=True)
    assert result.header.thinking == ["", "####"] and result.answer.strip() == "39"
    assert result.thinking + "####" + result.answer == result.text and "42" in result.thinking
    counted, pieces = result.metrics, [token.piece for token in sequences(result.trace.events)[0].tokens]
    assert counted["thinking_tokens"] == pieces.index("####") + 1
    assert counted["thinking_tokens"] + counted["answer_tokens"] == counted["tokens"]
    assert result.to_dict()["thinking"] == result.thinking and result.to_dict()["answer"] == result.answer


def test_a_text_without_thinking_is_all_answer_and_counts_nothing_apart():
    result = playground.run("greedy", "Mia found a", max_new_tokens=8)
    assert (result.thinking, result.answer) == ("", result.text)
    assert result.metrics["thinking_tokens"] is None and "thinking" not in result.to_dict()


def test_a_lane_with_tags_of_its_own_counts_by_them():
    result = playground.run("thinking_budget", QUESTION, chat=True, knobs={"start": "", "end": "####", "budget": 5})
    assert f"The thinking part has {result.metrics['thinking_tokens']} tokens, its tags included." in result.notes
    other = playground.run("thinking_budget", QUESTION, chat=True, knobs={"start": "", "end": "=", "budget": -1})
    assert other.thinking == other.text.partition("=")[0]


# --- whose tags ---

def tokenizer_with(template: str = "", tokens: tuple[str, ...] = (), special: bool = False):
    made = byte_tokenizer(merges=0, template=template)
    made.add_tokens(list(tokens), special_tokens=special)
    return Tokens(made, len(made))


@pytest.mark.parametrize("tags", KNOWN, ids="".join)
def test_tags_are_found_in_the_vocabulary_and_in_the_template(tags):
    assert tokenizer_with(tokens=tags).thinking_tags() == tags
    assert tokenizer_with(tokens=tags, special=True).thinking_tags() == tags
    assert tokenizer_with(f"{{{{ '{tags[0]}' }}}}{{{{ '{tags[1]}' }}}}").thinking_tags() == tags


def test_a_model_without_both_tags_has_none():
    assert tokenizer_with().thinking_tags() is None
    assert tokenizer_with(tokens=("</think>",)).thinking_tags() is None
    assert tokenizer_with("{{ messages }}").thinking_tags() is None


def test_the_bundled_models_think_in_worked_steps():
    assert playground.load(draft="none").target.tokens.thinking_tags() == WORKED_STEPS
