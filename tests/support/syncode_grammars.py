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
EXACT = ("sums", "json", "arithmetic", "date")  # without keywords that match names
