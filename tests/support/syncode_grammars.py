"""Grammars for SynCode."""
from __future__ import annotations

from toys import byte_tokenizer

from playground.contract import make
from playground.engine.text.tokens import Tokens

TOKENIZER = byte_tokenizer(merges=40)
CROSSING = [
    '"}',
    '", "',
    '": "',
    "1.5",
    ") + (",
    "+(",
    "de",
    "def",
    "def ",
    "<=",
    "< ",
    "12",
    "2)+",
    ")+",
    "x<=",
    " =",
    "true}",
    "e3",
    "ab",
    "abc",
    "bb",
    "bca",
    "aabb",
]
TOKENIZER.add_tokens(CROSSING)
TOKENS = Tokens(TOKENIZER, len(TOKENIZER))
SUM = make("syncode").source
WORDS = (
    'start: line+\nline: "def" NAME | NAME ("<" | "<=") NUMBER\nNAME: /[a-z]+/\nNUMBER:'
    " /[0-9]+(\\.[0-9]+)?(e[0-9]+)?/\nWS: / +/\n%ignore WS"
)
SOURCES = {
    "sums": {"source": SUM},
    "words": {"source": WORDS},
    "json": {"ready": "json"},
    "arithmetic": {"ready": "arithmetic"},
    "date": {"ready": "date"},
}
# over three letters, with terminals that begin alike or match the same text
OVERLAPPING = (
    'start: A BC | AB D | D\nA: "a"\nAB: "ab"\nBC: "bc"\nD: "d"',  # "abc" is read as AB, after which no c may come
    'start: part+\npart: B D D | B D | C part A\nA: /[ab]c/\nB: /c(ab)*/\nC: "a"\nD: "b"',
    'start: part+\npart: D B | D A | D part B\nA: "b"\nB: "ab"\nC: /c(ab)*/\nD: "a"',
    'start: part+\npart: C A | D | B part A\nA: "bc"\nB: "b"\nC: /b+c?/\nD: "abb"',
    'start: part+\npart: A | C D C | D part B\nA: "ab"\nB: /b+c?/\nC: /[ab]c/\nD: "b"',
)
