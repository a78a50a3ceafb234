"""What the confined child does that compiles constraints: it keeps tokenizers, and compiles one constraint a fork."""
from __future__ import annotations

from typing import Any

from llguidance import LLTokenizer

from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.compiler import compile_grammar
from playground.grammar.lark.lalr import tables
from playground.grammar.limits import BOUNDS as BOUNDS


def warm() -> None:
    """Everything is loaded with this module."""


def learn(lesson: list) -> LLTokenizer:
    """A tokenizer of its JSON description, the width of the model's logits, and its end tokens; raises ValueError."""
    description, width, ends = lesson
    return LLTokenizer(description, n_vocab=width, eos_token=ends)


def answer(order: list[str], tokenizer: LLTokenizer | None) -> dict[str, Any]:
    """One compiled constraint, {"refusal", "about"}, or {"error"}."""
    kind, source = order
    try:
        if kind == limits.TABLES:
            return tables(source)
        if tokenizer is None:
            raise ValueError("a constraint is compiled for a tokenizer")
        return compile_grammar(tokenizer, kind, source)
    except Refusal as refused:
        return {"refusal": str(refused), "about": refused.about}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except MemoryError:
        return {"error": f"it takes more than {limits.MEMORY_BYTES >> 20} MB of memory"}
    except Exception as reason:  # a source that the compiler did not expect is bad input, whatever it stumbled over
        return {"error": f"it is not well-formed ({type(reason).__name__})"}
