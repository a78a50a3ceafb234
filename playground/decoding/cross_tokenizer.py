"""A stream whose model has another tokenizer: it retokenizes the lane's text and answers in the lane's tokens."""
from __future__ import annotations

from codecs import getincrementaldecoder
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import TokenTree
from playground.decoding.requests import StepsTo
from playground.decoding.stream import Stream
from playground.engine.sampling import REMOVED
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.decoding.lane.lane_state import LaneState
    from playground.engine.model import Model


class Lexicon:
    """A one-to-one mapping between tokens of two vocabularies with the same bytes; end tokens map to end tokens.

    Raises Refusal if the vocabularies have no token in common.
    """

    def __init__(self, ours: Model, theirs: Model):
        own_tokens, other_tokens = _by_bytes(ours), _by_bytes(theirs)
        pairs = {other_tokens[text]: token for text, token in own_tokens.items() if text in other_tokens} | dict(
            _ends(ours, theirs)
        )
        if not pairs:
            raise Refusal(f"{ours.name} and {theirs.name} have no token in common: choose another draft.", "draft")
        self.ours, self.theirs = pairs, {token: other for other, token in pairs.items()}  # by id in the other one
        self.columns = torch.tensor([list(self.theirs), list(self.theirs.values())], device=theirs.device)

    def project(self, logits: Tensor, size: int) -> Tensor:
        """Logits [n, V of theirs] as logits [n, size] of ours; tokens without a counterpart are removed."""
        ours, theirs = self.columns
        return logits.new_full((len(logits), size), REMOVED).index_copy_(1, ours, logits[:, theirs])


def _by_bytes(model: Model) -> dict[bytes, int]:
    """The tokens of a model by their bytes; among tokens with equal bytes, the one its tokenizer uses."""
    found: dict[bytes, list[int]] = {}
    for token in range(model.vocabulary):
        if text := model.tokens.bytes(token):
            found.setdefault(text, []).append(token)
    return {text: tokens[0] if len(tokens) == 1 else _used(model, text, tokens) for text, tokens in found.items()}


def _used(model: Model, text: bytes, tokens: list[int]) -> int:
    """The token that the tokenizer produces for `text`: tokenizers with byte fallback have two for some characters."""
    encoded = model.tokens.encode_continuation(text.decode("utf-8", "replace"))
    return next((token for token in tokens if token in encoded), tokens[0])


def _ends(ours: Model, theirs: Model) -> list[tuple[int, int]]:
    """Pairs (their end token, our end token) with the same name, or else the first of both."""
    pairs = [(other, own) for own in sorted(ours.end_ids) for other in sorted(theirs.end_ids)]
    same_name = [(other, own) for other, own in pairs if ours.tokens.piece(own) == theirs.tokens.piece(other)]
    return same_name or pairs[:1]


class CrossTokenizerStream(Stream):
    """A model in step with a text that is tokenized differently.

    Whenever the text changes, all of it is retokenized. The slots of the common prefix of old and new tokens remain in
    the cache. Trees passed to it may contain only tokens with a counterpart.
    """

    def __init__(self, name: str, model: Model, lane: LaneState, prompt: list[int]):
        super().__init__(name, model, lane, prompt)
        self.takes_unread = False
        self.lexicon = Lexicon(lane.target_model, model)
        self._lane_tree = self._own_tree = TokenTree()  # the requested tree, in the lane's and in this model's tokens
        self._retokenize()

    # --- the text in its own tokens ---

    def _retokenize(self) -> None:
        """Update `_text`, which is prompt and text, and `_incomplete`.

        `_incomplete` says that the text ends within a UTF-8 character, which this model cannot read.
        """
        decoder = getincrementaldecoder("utf-8")("replace")
        self._text = [*self.prompt, *self._tokenize_within(decoder.decode(b"".join(self._bytes(0))))]
        self._incomplete = bool(decoder.getstate()[0])

    def _bytes(self, start: int) -> list[bytes]:
        """The bytes of each generated token from `start` on."""
        return list(map(self.lane.target_model.tokens.bytes, self.lane.tokens[self.lane.prompt_length + start:]))

    def _tokenize_within(self, text: str) -> list[int]:
        """The tokens of a text that continues another one."""
        tokens = self.model.tokens
        return [token for token in tokens.encode_continuation(text) if not tokens.is_special(token)]

    @property
    def room(self) -> int:
        return 0 if self._incomplete else self.model.context - len(self._text)

    @property
    def full(self) -> bool:
        """Whether its model can read nothing after the text."""
        return len(self._text) >= self.model.context

    def behind(self) -> int:
        return len(self._text) - self.store.length

    def unread(self) -> list[int]:
        return self._text[self.store.length:]

    def spellings(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        """Generated tokens from `start` on that begin and end at token boundaries of this model.

        Each comes with its tokens in this model, as ids of the lane's vocabulary; tokens without a counterpart there
        are omitted.
        """
        own = self._text[len(self.prompt):]
        own_bytes = [self.model.tokens.bytes(token) for token in own]
        index_at = {offset: index for index, offset in enumerate(accumulate(map(len, own_bytes), initial=0))}
        offsets = list(accumulate(map(len, self._bytes(0)), initial=0))
        found = []
        for token, text, offset in zip(
            self.lane.tokens[self.lane.prompt_length + start :], self._bytes(start), offsets[start:]
        ):
            within = slice(index_at.get(offset, 0), index_at.get(offset + len(text), 0))
            if text and b"".join(own_bytes[within]) == text:
                found.append((token, tuple(self.lexicon.ours.get(other, -1) for other in own[within])))
        return [(token, counterparts) for token, counterparts in found if -1 not in counterparts]

    def as_read(self, tokens: list[int]) -> list[int]:
        return [*self._text, *(self.lexicon.theirs[token] for token in tokens)]

    @property
    def common(self) -> Tensor:
        return self.lexicon.columns

    # --- rows in the lane's tokens ---

    def _read_tree(self, tree: TokenTree) -> StepsTo[tuple[Tensor, int]]:
        if tree is not self._lane_tree:
            self._lane_tree, self._own_tree = tree, TokenTree()
        for token, parent in list(zip(tree.tokens, tree.parents))[len(self._own_tree):]:
            self._own_tree.add(self.lexicon.theirs[token], parent)
        return (yield from super()._read_tree(self._own_tree))

    def _logits(self, answer: Tensor) -> Tensor:
        logits = self.lexicon.project(answer[:, :self.model.vocabulary], self.lane.vocabulary)
        return logits.to(self.lane.target_model.device)

    def _captured(self, answer: Tensor) -> dict[str | EarlyExit, Tensor]:
        return {}

    # --- when the text changes ---

    def follow(self) -> None:
        read = self._text[:self.store.length]
        self._retokenize()
        if read == self._text[:len(read)]:
            super().follow()
        else:
            self._discard_changed(read)

    def roll_back(self) -> None:
        read = self._text[:self.store.length]
        self._retokenize()
        self._discard_changed(read)

    def _discard_changed(self, read: list[int]) -> None:
        """Discard the slots after the common prefix of the tokens that were read and the current ones."""
        same = next(
            (i for i, (before, now) in enumerate(zip(read, self._text)) if before != now),
            min(len(read), len(self._text)),
        )
        self.store.roll_back(len(read) - same)
        self._root = None
        self._start_tree(TokenTree())
