"""An exact denoiser for masked diffusion: a table over a list of strings, not a neural network.

A masked diffusion model predicts every masked position from the revealed tokens. Over a short list of strings this
prediction can be computed exactly, so any error in the text is due to the decoder. For a canvas the table returns the
marginals of the strings that agree with it, p(x_j | revealed tokens).
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from playground.engine.canvas.canvas_pass import CanvasPass
from playground.engine.checkpoint.catalogue import ORACLE, TABLES
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

END, UNKNOWN = "[END]", "[unknown word]"
SUGGESTIONS = 4  # continuations named in the message if a prompt fits no string


class OracleDenoiser:
    """An exact table over N strings of L tokens, in place of a Model for canvas decoders.

    `strings` are token ids [N, L]. `weights` [N] are positive and need not sum to one. Raises ValueError otherwise.
    """

    fills: Literal[True] = True  # fills masked positions, does not continue text
    launched_ahead = None  # no forward begins before it is asked for
    shifted = False  # the logits of a position predict its own token
    quantization, depth, device, dtype = "none", 1, torch.device("cpu"), torch.float64

    def __init__(
        self,
        strings: Tensor,
        weights: Tensor,
        tokens: Tokens,
        end_ids: frozenset[int] = frozenset(),
        name: str = ORACLE,
    ):
        if weights.shape != strings.shape[:1] or not len(weights) or not bool((weights > 0).all()):
            raise ValueError("at least one string is needed, and each needs a positive weight")
        self.strings, self.p = strings, weights.double() / weights.sum()
        self.tokens, self.end_ids, self.name, self.lock = tokens, end_ids, name, RLock()
        self.vocabulary = int(strings.max()) + 1  # up to the largest id that occurs
        self.parameters, self.context = strings.shape
        self.revision = sha256(repr((strings.tolist(), self.p.tolist())).encode()).hexdigest()[:12]

    @classmethod
    def from_table(cls, table: Tensor, tokens: Tokens, end_ids: frozenset[int] = frozenset()) -> OracleDenoiser:
        """From the probability of each of the V^L strings, [V, ..., V] with one axis per position."""
        return cls(table.nonzero(), table[table > 0], tokens, end_ids, "table")

    @classmethod
    def from_texts(
        cls, texts: Sequence[str], weights: Sequence[float] | None = None, name: str = ORACLE
    ) -> OracleDenoiser:
        """From sentences with one token per word, padded with end tokens; every sentence has at least one."""
        tokenizer = _word_tokenizer(texts)
        tokens, end = Tokens(tokenizer, len(tokenizer)), tokenizer.eos_token_id
        rows = [tokens.encode(text) for text in texts]
        length = max(map(len, rows)) + 1
        strings = torch.tensor([row + [end] * (length - len(row)) for row in rows])
        return cls(strings, torch.tensor(weights or [1.0] * len(rows)), tokens, frozenset([end]), name)

    @classmethod
    def bundled(cls, name: str = ORACLE, file: Path | None = None) -> OracleDenoiser:
        """From bundled sentences. Raises Refusal if their file is missing."""
        file = file or TABLES[name]
        try:
            sentences = json.loads(file.read_text(encoding="utf-8"))["sentences"]
        except OSError:
            raise Refusal(
                f"The sentences of the {name} ({file.name}) are missing from assets: download the project's files "
                "again.",
                "model",
            ) from None
        return cls.from_texts(
            [sentence["text"] for sentence in sentences], [float(sentence["weight"]) for sentence in sentences], name
        )

    def denoise(self, canvas: Sequence[int | None]) -> Tensor:
        """Log-probability of every token at every position given the revealed tokens, [L, V]; None is masked.

        Decoders that fill several positions at once can reveal tokens that no string has together. Then the strings
        that agree with most of them are used: the limit of vanishing token noise.
        """
        known = [position for position, token in enumerate(canvas) if token is not None]
        agreeing = (
            self.strings[:, known] == torch.tensor([canvas[position] for position in known], dtype=torch.long)
        ).sum(-1)
        weights = self.p * (agreeing == agreeing.max())
        marginals = torch.zeros(self.context, self.vocabulary, dtype=self.dtype)
        marginals.scatter_add_(1, self.strings.T, weights.expand(self.context, -1))
        return (marginals / weights.sum()).log()

    def forward(self, passes: Sequence[CanvasPass], plan: Any = None) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Log-probabilities [len(wanted) + len(shadows), V] of each canvas, and no captured states: the interface of
        `Model.forward`.
        """
        return [self._predict(one) for one in passes], {}

    def _predict(self, one: CanvasPass) -> Tensor:
        """The rows of a canvas; a shadow's is what all other revealed tokens say about its position."""
        without = [
            self.denoise([*one.canvas[:place], None, *one.canvas[place + 1:]])[place] for place in one.shadows
        ]
        return torch.cat([self.denoise(one.canvas)[one.predicted], *(row[None] for row in without)])

    def answer_length(self, prompt: list[int], most: int) -> int:
        """Positions left to fill after a prompt. Raises Refusal if no string begins with it, or if they are more than
        `most`.
        """
        if not bool(self._begins_with(prompt).any()):
            raise Refusal(
                f"No sentence of the {self.name} begins with {self._text(prompt)!r}: try {self._suggestions(prompt)}.",
                "prompt",
            )
        length = self.context - len(prompt)
        if most < length:
            raise Refusal(
                f"This prompt has {length} positions to fill, but only {most} tokens are allowed: allow at least "
                f"{length}.",
                "max_new_tokens",
            )
        return length

    def flops(self, rows: int, context: int, layers: int) -> float:
        """One comparison and one addition per token of each string."""
        return 2.0 * self.parameters * rows

    def _begins_with(self, prompt: list[int]) -> Tensor:
        """Which strings begin with these tokens, [N]."""
        return (self.strings[:, :len(prompt)] == torch.tensor(prompt, dtype=torch.long)).all(-1)

    def _suggestions(self, prompt: list[int]) -> str:
        """The most probable continuations of the longest part of the prompt that some string begins with."""
        fits = max(size for size in range(len(prompt)) if bool(self._begins_with(prompt[:size]).any()))
        found: Counter[int] = Counter()
        for string, weight, begins in zip(
            self.strings.tolist(), self.p.tolist(), self._begins_with(prompt[:fits]).tolist()
        ):
            found[string[fits]] += weight * begins
        likely = [token for token, weight in found.most_common(SUGGESTIONS) if weight]
        return " or ".join(repr(self._text([*prompt[:fits], token])) for token in likely)

    def _text(self, ids: list[int]) -> str:
        return "".join(self.tokens.pieces(ids)).strip()


def _word_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per word, with the space before it, and per run of punctuation; lower case."""
    normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=True)
    words = [word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))]
    ids = {word: id for id, word in enumerate(dict.fromkeys([END, UNKNOWN, *words]))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, splitter, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN)
