"""The limits of all constraints, in one place.

A source is measured before any work (`check_text`, `check_options`, `check_items`). The expansion of a short source
is bounded at compilation, in a separate process whose time, memory and stack the kernel limits, and
while decoding, by the parser's own limits and a deadline. Imports neither torch nor the parser.
"""
from __future__ import annotations

from typing import Any

from playground.confined.task_bounds import TaskBounds
from playground.errors import Refusal

TABLES = "syncode"  # the kind of source that is compiled to tables, without a tokenizer

# Sources, before any work
SOURCE_CHARACTERS = 100_000
OPTIONS = 1000  # of a list of choices; the parser follows at most PARSER["max_items_in_row"] alternatives
TRIGGER_CHARACTERS = 200  # of a trigger, and of the string that ends what it triggers
HOLES = 100  # of a template
TAGS = 64  # of structural tags
ITEMS = 10_000  # of the list that `static` searches
ITEMS_CHARACTERS = 500_000
ITEM_CHARACTERS = 2000
ITEM_CELLS = 2_000_000  # the items are rows of one matrix, as wide as the longest has tokens

# JSON Schemas
SCHEMA_DEPTH = 100  # objects and arrays inside each other
SCHEMA_NODES = 20_000  # values of any type
REF_CHAIN = 100  # a $ref that leads to a $ref, and so on
ENUM_VALUES = 5000  # in one enum
PROPERTIES = 1000  # in one schema
PATTERN_CHARACTERS = 5000
MULTIPLE_OF = 10_000  # significant digits as an integer, so 0.25 counts as 25: the automaton has as many states
LENGTH = 10_000  # minLength, maxLength, minItems, maxItems, minProperties, maxProperties
NUMBER_DIGITS = 100

# GBNF, whose reader is quadratic in the length of the source
GBNF_RULES = 1000
GBNF_DEPTH = 100
GBNF_REPEATS = 10_000

# SynCode
TERMINALS = 128
DFA_STATES = 4000  # of all terminals together
PARSER_STATES = 5000
PARSER_DEPTH = 20_000  # symbols on its stack
STORE_BYTES = 256 << 20  # of the masks one lane looks up
STORES = 4  # stores kept for later runs, together of STORE_BYTES
STEP_BYTES = 20_000_000  # bytes of tokens that the lookups of one step may walk over, about 1 s

# `monitors`, whose analysis reads them again at every dot
CODE_CHARACTERS = 20_000

# The process that compiles
CPU_SECONDS = 1.0
WALL_SECONDS = 3.0
MEMORY_BYTES = 512 << 20  # beyond what the process has before it compiles
STACK_BYTES = 1 << 20  # an eighth of an ordinary thread's: what passes there does not overflow here
ANSWER_BYTES = 16 << 20
SLOTS = 4  # constraints compiled at a time
SLOT_SECONDS = 2.0  # waiting time for one of them
TOKENIZERS = 4  # in the compiler process
BOUNDS = TaskBounds(CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES, STACK_BYTES, ANSWER_BYTES, SLOTS, TOKENIZERS)

# Caches
GRAMMARS = 64  # compiled grammars of one model
GRAMMARS_BYTES = 256 << 20
TABLES_KEPT = 16  # compiled grammars of SynCode
CHECKED = 1024  # constraints known to compile, checked without a model

# Decoding
PARSER: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # 1 to 2 kB each, in every sequence of a lane
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
REPEATED_SECONDS = 0.5  # the part of the compilation that is repeated in this process
STEP_SECONDS = 1.5  # processor time of the masks of one step
FORCED_SECONDS = 0.25  # after so much processor time the rest of a forced run is found in the next step


def check_text(name: str, source: str, most: int = SOURCE_CHARACTERS) -> None:
    """Raises Refusal for a source that is too long, or cannot be written as UTF-8."""
    if len(source) > most:
        raise Refusal(f"The {name} has {len(source):,} characters, and at most {most:,} are accepted: shorten it.")
    if "\0" in source:
        raise Refusal(f"The {name} contains a NUL character: remove it.")
    if any("\ud800" <= character <= "\udfff" for character in source):
        raise Refusal(f"The {name} contains half of a surrogate pair, which is no character: remove it.")


def check_options(source: str) -> None:
    """Raises Refusal for a list of choices with too many options."""
    if (count := source.count("|") + 1) > OPTIONS:
        raise Refusal(
            f"The list of choices has {count:,} options, and at most {OPTIONS:,} are accepted: remove some, or use"
            " static."
        )


def check_items(source: str) -> None:
    """Raises Refusal for a list of items that is too long, or has an item that is; `source` has one "|" or line break
    between items.
    """
    check_text("list of items", source, ITEMS_CHARACTERS)
    items = source.replace("\n", "|").split("|")
    if len(items) > ITEMS:
        raise Refusal(f"There are {len(items):,} items, and at most {ITEMS:,} are accepted: remove some.", "items")
    if (longest := max(map(len, items))) > ITEM_CHARACTERS:
        raise Refusal(
            f"An item has {longest:,} characters, and at most {ITEM_CHARACTERS:,} are accepted: shorten it.", "items"
        )


def check_rows(count: int, longest: int) -> None:
    """Raises Refusal where `count` items with up to `longest` tokens are too many to be sorted as one matrix."""
    if count * longest > ITEM_CELLS:
        raise Refusal(
            f"{count:,} items, the longest of {longest:,} tokens, are too many to search: remove some, or shorten the"
            " longest.",
            "items",
        )
