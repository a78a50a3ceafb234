"""XGrammar behind the interface that the comparison needs: compile, mask, advance."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.model import Model

PLACE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # time and line of the library's source
INSTALL = "Comparing engines needs XGrammar, which is not installed: pip install xgrammar."


class XGrammarEngine:
    """Compiles grammars for one model. JSON has the white space of `json_schema`, and further properties where its
    schema allows them.
    """

    name = "xgrammar"

    def __init__(self, target: Model):
        try:
            import xgrammar
        except ImportError as reason:
            raise Refusal(f"{INSTALL} ({reason})" if "xgrammar" not in str(reason) else INSTALL, "xgrammar") from None
        self.vocabulary, self.end_index = target.vocabulary, sorted(id for id in target.end_ids)
        tokens = xgrammar.TokenizerInfo.from_huggingface(
            target.tokens.tokenizer, vocab_size=target.vocabulary, stop_token_ids=self.end_index or None
        )
        self._library, self._compiler = xgrammar, xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, source: str) -> XGrammarGrammar:
        """Raises Refusal, with the reason of the library."""
        read = {
            "json_schema": lambda text: self._compiler.compile_json_schema(
                text, any_whitespace=False, separators=(", ", ": "), strict_mode=False
            ),
            "regex": self._compiler.compile_regex,
            "gbnf": self._compiler.compile_grammar,
            "lark": self._compiler.compile_lark,
        }
        try:
            return XGrammarGrammar(self, self._library, read[kind](source))
        except (RuntimeError, ValueError, TypeError) as reason:
            raise Refusal(" ".join(PLACE.sub("", str(reason)).split())[:200]) from None


class XGrammarGrammar:
    def __init__(self, engine: XGrammarEngine, library: Any, compiled: Any):
        self.engine, self._library, self._compiled = engine, library, compiled

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.engine, self._library, self._library.GrammarMatcher(self._compiled))


class XGrammarMatcher:
    """State of one text in its grammar."""

    def __init__(self, engine: XGrammarEngine, library: Any, matcher: Any):
        self._engine, self._matcher = engine, matcher
        self._bits = library.allocate_token_bitmask(1, engine.vocabulary)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset(self._engine.end_index)

    def bitmask(self) -> Tensor:
        """One bit a token, in 32-bit integers."""
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._bits

    def mask(self) -> Tensor:
        """Tokens that may come next, bool [V], with the end tokens if the text may end."""
        words = self.bitmask()[0].numpy().view(numpy.uint8)
        bits = numpy.unpackbits(words, count=self._engine.vocabulary, bitorder="little")
        return torch.from_numpy(bits.view(numpy.bool_).copy())

    def advance(self, token: int) -> bool:
        return self._matcher.accept_token(token)

    @property
    def accepting(self) -> bool:
        return bool(self.mask()[self._engine.end_index].any())

    @property
    def stopped(self) -> bool:
        """Whether only the end can follow."""
        mask = self.mask()
        mask[self._engine.end_index] = False
        return not bool(mask.any())
