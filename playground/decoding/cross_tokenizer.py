"""A stream whose model has tokens of its own: it reads the lane's text in its own spelling and answers in the lane's
tokens.
"""
from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Generator
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import TokenTree
from playground.decoding.requests import Feed
from playground.decoding.stream import Stream
from playground.engine.sampling import REMOVED
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.decoding.lane_state import LaneState
    from playground.engine.model import Model

ANCHOR = "\n"  # stands before a text while it is cut into tokens: some tokenizers put a space before what comes first


class Lexicon:
    """Tokens of two vocabularies that spell the same bytes, one for one; an end of the text stands for an end."""

    def __init__(self, ours: Model, theirs: Model):
        known, others = _by_bytes(ours), _by_bytes(theirs)
        pairs = {others[spelled]: token for spelled, token in known.items() if spelled in others} | dict(
            _ends(ours, theirs)
        )
        if not pairs:
            raise Refusal(f"{ours.name} and {theirs.name} have no token in common: choose another draft.", "draft")
        self.ours, self.theirs = pairs, {token: other for other, token in pairs.items()}  # by the other one's id
        self._places = torch.tensor([list(self.theirs), list(self.theirs.values())], device=theirs.device)

    def project(self, rows: Tensor, size: int) -> Tensor:
        """Logits [n, V of theirs] as logits [n, size] of ours: what has no partner is removed."""
        ours, theirs = self._places
        return rows.new_full((len(rows), size), REMOVED).index_copy_(1, ours, rows[:, theirs])


def _by_bytes(model: Model) -> dict[bytes, int]:
    """The tokens of a model by what they spell; of those that spell the same the one it would write itself."""
    found: dict[bytes, list[int]] = {}
    for token in range(model.vocabulary):
        if spelled := model.tokens.bytes(token):
            found.setdefault(spelled, []).append(token)
    return {
        spelled: tokens[0] if len(tokens) == 1 else _usual(model, spelled, tokens) for spelled, tokens in found.items()
    }


def _usual(model: Model, spelled: bytes, tokens: list[int]) -> int:
    """Some tokenizers have every byte as a token beside the letters, for what they know no letter for."""
    cut = model.tokens.encode(ANCHOR + spelled.decode("utf-8", "replace"))
    return next((token for token in tokens if token in cut), tokens[0])


def _ends(ours: Model, theirs: Model) -> list[tuple[int, int]]:
    """Ends of the other's texts with the end of ours each stands for: those of one name, or else the first of both."""
    both = [(other, own) for own in sorted(ours.end_ids) for other in sorted(theirs.end_ids)]
    named = [(other, own) for other, own in both if ours.tokens.piece(own) == theirs.tokens.piece(other)]
    return named or both[:1]


class CrossTokenizerStream(Stream):
    """A model in step with a text whose tokens it does not share.

    Whenever the text has grown it is spelled again, all of it in context; of the cache stays what was read of the same
    tokens. Trees it is asked about may hold only tokens that have a partner.
    """

    def __init__(self, name: str, model: Model, lane: LaneState, prompt: list[int]):
        super().__init__(name, model, lane, prompt)
        self.lexicon = Lexicon(lane.target_model, model)
        self._given = self._mirror = TokenTree()  # the tree that was asked about, and the same in this model's tokens
        self._spell_again()

    # --- the text in its own tokens ---

    def _spell_again(self) -> None:
        """`_text` is prompt and text; `_amid` says that the text breaks off within a letter, so that this model cannot
        read its end.
        """
        decoder = getincrementaldecoder("utf-8")("replace")
        self._text = [*self.prompt, *self._spelled(decoder.decode(b"".join(self._bytes(0))))]
        self._amid = bool(decoder.getstate()[0])

    def _bytes(self, start: int) -> list[bytes]:
        """Of each generated token from `start` on."""
        return list(map(self.lane.target_model.tokens.bytes, self.lane.tokens[self.lane.prompt_length + start:]))

    def _spelled(self, text: str) -> list[int]:
        """A text as it is cut into tokens in the midst of another."""
        anchor, both = self._cut(ANCHOR), self._cut(ANCHOR + text)
        return both[len(anchor):] if both[:len(anchor)] == anchor else self._cut(text)

    def _cut(self, text: str) -> list[int]:
        tokens = self.model.tokens
        return [token for token in tokens.encode(text) if not tokens.is_special(token)]

    @property
    def room(self) -> int:
        return 0 if self._amid else self.model.context - len(self._text)

    def behind(self) -> int:
        return len(self._text) - self.store.length

    def unread(self) -> list[int]:
        return self._text[self.store.length:]

    def spellings(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        """Those generated tokens from `start` on that begin and end where tokens of this model do, as partners of
        these.
        """
        own = self._text[len(self.prompt):]
        spelled = [self.model.tokens.bytes(token) for token in own]
        places = {edge: place for place, edge in enumerate(accumulate(map(len, spelled), initial=0))}
        edges = list(accumulate(map(len, self._bytes(0)), initial=0))
        found = []
        for token, said, edge in zip(
            self.lane.tokens[self.lane.prompt_length + start :], self._bytes(start), edges[start:]
        ):
            within = slice(places.get(edge, 0), places.get(edge + len(said), 0))
            if said and b"".join(spelled[within]) == said:
                found.append((token, tuple(self.lexicon.ours.get(other, -1) for other in own[within])))
        return [(token, partners) for token, partners in found if -1 not in partners]

    # --- rows in the lane's tokens ---

    def _walk(self, tree: TokenTree) -> Generator[list[Feed], None, tuple[Tensor, int]]:
        if tree is not self._given:
            self._given, self._mirror = tree, TokenTree()
        for token, parent in list(zip(tree.tokens, tree.parents))[len(self._mirror):]:
            self._mirror.add(self.lexicon.theirs[token], parent)
        return (yield from super()._walk(self._mirror))

    def _logits(self, rows: Tensor) -> Tensor:
        return self.lexicon.project(rows[:, : self.model.vocabulary], self.lane.vocabulary).to(
            self.lane.target_model.device
        )

    def _inside(self, rows: Tensor) -> dict[str | EarlyExit, Tensor]:
        return {}

    # --- when the text changes ---

    def follow(self) -> None:
        held = self._text[:self.store.length]
        self._spell_again()
        if held == self._text[:len(held)]:
            super().follow()
        else:
            self._read_again(held)

    def roll_back(self) -> None:
        held = self._text[:self.store.length]
        self._spell_again()
        self._read_again(held)

    def _read_again(self, held: list[int]) -> None:
        """Forget from where on the text is spelled in another way than it was read."""
        same = next(
            (i for i, (before, now) in enumerate(zip(held, self._text)) if before != now),
            min(len(held), len(self._text)),
        )
        self.store.roll_back(len(held) - same)
        self._root = None
        self._begin(TokenTree())
