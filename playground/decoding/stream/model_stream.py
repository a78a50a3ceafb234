"""A stream: one model that follows a lane's text with its own KV cache, and the requests for its rows.

The target is a stream, and so are a draft model and the target's model over another prompt. Each catches up with the
committed text at its next request. Strategies yield requests: each consists of steps that wait for one forward, and its
answer is the value of the yield. The session may batch forwards of one model.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree, chain
from playground.decoding.requests import Feed, Request, Steps, StepsTo, side_by_side
from playground.decoding.rows import Rows
from playground.decoding.sampler_chain import HIDDEN_STATES
from playground.decoding.stream.exits import Exit
from playground.decoding.stream.forwards import EarlyRows, answer_of, consulted, in_chain
from playground.decoding.stream.prompt_chunks import PromptReading
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.decoding.lane.lane_state import LaneState
    from playground.decoding.sequence import Sequence

    Others = dict[str | EarlyExit, Tensor]
    """What samplers read in addition to rows, by stream or early exit."""


class Stream(PromptReading):
    """One model in step with one lane."""

    def __init__(self, name: str, model: Model, lane: LaneState, prompt: list[int], companions: Iterable[Stream] = ()):
        super().__init__(name, model, lane, prompt)
        self.companions = list(companions)  # streams whose rows samplers read in addition
        # rows of `seen`, [n, V + captured], and the node of the first
        self._answer: tuple[Tensor, int] = torch.empty(0, 0), ROOT

    # --- requests ---

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Request rows for the root and for every node of `tree` that this stream has not read yet."""
        return Request(self._extend(tree if tree is not None else TokenTree()))

    def prefill(self) -> Request:
        """Request the row after the prompt."""
        return Request(self._prefill())

    def grow(self, leaves: list[Sequence]) -> Request:
        """Request the row after the end of each sequence, in one forward."""
        return Request(self._grow(leaves))

    def resume(self, layer: int, states: Tensor) -> Request:
        """Request logits [n, V] of rows that enter at a layer with these states [n, hidden_size].

        They run through it and all later layers as if they followed the text that was read, each after the one before,
        and are dropped from the KV cache.
        """
        return Request(self._resume(layer, states))

    def exit(self, layer: int) -> Exit:
        """The early exit of this model after `layer` layers."""
        return Exit(self, layer)

    def spellings(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        """Generated tokens from `start` on, each with the tokens that this stream's model reads for it.

        Tokens that no token boundary of this model matches are omitted.
        """
        return [(token, (token,)) for token in self.lane.tokens[self.lane.prompt_length + start:]]

    def as_read(self, tokens: list[int]) -> list[int]:
        """The text and draft tokens after it, as tokens of this stream's model."""
        return [*self.prompt, *self.lane.tokens[self.lane.prompt_length:], *tokens]

    @property
    def common(self) -> Tensor:
        """Ids of the tokens that the lane and this stream's model have in common: the lane's and its own, [2, n]."""
        return torch.arange(self.lane.vocabulary, device=self.model.device).expand(2, -1)

    # --- steps of the requests ---

    def _prefill(self) -> Steps:
        """Read the prompt. The tokens that a fork begins with go along as a draft that is always accepted."""
        given, manager = chain(list(self.lane.limits.forced), "fork"), self.cache_manager
        if len(given) and not (manager and manager.policy):
            return (yield from self._read_given(given))
        rows = yield from self._extend(TokenTree())
        if manager:  # only the target has one; a decoder may begin with the draft model
            yield from self._settle_prefill(manager)
            if (logits := manager.logits_after_prompt()) is not None:
                rows = self._replace_root(rows, logits)
        return (yield from self._read_given(given)) if len(given) else rows

    def _read_given(self, given: TokenTree) -> Steps:
        """Commit the tokens that a fork begins with, and read on after them."""
        rows = yield from self._extend(given)
        self.lane.commit_forced(rows)
        return rows if self.lane.reason else (yield from self._extend(TokenTree()))

    def _replace_root(self, rows: Rows, logits: Tensor) -> Rows:
        """The row after the prompt with logits [V] of the cache policy."""
        answer, first = self._answer
        answer = answer.clone()
        answer[-1, :self.model.vocabulary] = logits.to(answer)
        self._answer, self._root = (answer, first), answer[-1:]
        self.seen = replace(rows, raw=self._logits(answer))
        return self.seen

    def _grow(self, leaves: list[Sequence]) -> Steps:
        raw, first, others = yield from self._compute_rows(self.lane.branch_tree(leaves))
        grown = [self._row_of(leaf, raw, first, others) for leaf in leaves]
        for rows in grown:
            yield from consulted(rows)
        return grown

    def _resume(self, layer: int, states: Tensor) -> Steps:
        count = len(states)
        self._start_tree(TokenTree())
        work = ForwardInput(self.store, [0] * count, in_chain(count))  # the tokens are placeholders
        feed = Feed(self, work, LayerPlan(resume=(layer, states), routing=self._routing()), name="resumed")
        yield [feed]
        self.store.crop_scratch()
        return feed.result()[:, :self.lane.vocabulary]

    def _row_of(self, leaf: Sequence, raw: Tensor, first: int, others: Others) -> Rows:
        row = leaf.node - first
        if not 0 <= row < len(raw):
            raise RuntimeError(f"sequence {leaf.number} has no new token to extend: keep one first")
        return Rows(
            self.name,
            raw[row : row + 1],
            leaf,
            TokenTree(),
            others={name: other[row : row + 1] for name, other in others.items()},
            candidates=self.candidates,
            numbers=self._numbers,
        )

    def _extend(self, tree: TokenTree) -> Steps:
        raw, first, others = yield from self._compute_rows(tree)
        self.seen = Rows(
            self.name, raw, self.lane.main, tree, first, others, probes=self._probed, candidates=self.candidates,
            numbers=self._numbers, go_on=partial(self.model.go_on, self.store) if self.model.replay else None,
        )
        if self.seen.chain.consulting:
            yield from consulted(self.seen)
        return self.seen

    def _compute_rows(
        self, tree: TokenTree
    ) -> StepsTo[tuple[Tensor, int, Others]]:
        """Logits [n, V], the node of the first row, and what samplers read in addition for the same nodes.

        The latter are logits [n, V] of companions and early exits, and hidden states [n, hidden_size].
        """
        if self.companions:
            self._answer, *companion_answers = yield from side_by_side(
                Request(stream._read_tree(tree)) for stream in (self, *self.companions)
            )
        else:
            self._answer, companion_answers = (yield from self._read_tree(tree)), []
        answer, first = self._answer
        others = self._captured(answer)
        for stream, (companion_answer, _) in zip(self.companions, companion_answers):
            others |= {stream.name: stream._logits(companion_answer), **stream._captured(companion_answer)}
        return self._logits(answer), first, others

    def _logits(self, answer: Tensor) -> Tensor:
        """Logits [n, V] over the lane's vocabulary, on the target's device, of rows [n, V + captured]."""
        return answer[:, :self.lane.vocabulary].to(self.lane.target_model.device)

    def _captured(self, answer: Tensor) -> dict[str | EarlyExit, Tensor]:
        """Logits of early exits [n, V] and hidden states [n, hidden_size], from rows [n, V + captured]."""
        if not self.captures:
            return {}
        model = self.model
        states = dict(zip(sorted(self.captures), answer[:, model.vocabulary:].to(model.dtype).split(model.width, 1)))
        exits = {
            exit: self._logits(model.read_out(states[exit.layer], exit.norm))
            for exit in self.lane.inner
            if exit.stream == self.name
        }
        hidden = {HIDDEN_STATES: model.normed(states[model.depth])} if self.lane.shows_hidden(self.name) else {}
        return exits | hidden

    def _read_tree(self, tree: TokenTree) -> StepsTo[tuple[Tensor, int]]:
        """Read unread text and the new nodes of `tree`.

        Returns rows [n, V + captured] and the node of the first: the root, or the first new node if the tree grew.
        """
        self._probed = None
        missing = self.unread()
        if not self.store.length or len(missing) > 1:  # no decode step
            yield from self._read_shared_prefix()
            yield from self._catch_up()
            missing = self.unread()
        if tree is not self._tree:
            self._start_tree(tree)
        if self._left_early:
            return (yield from self._complete(tree))
        fed = len(self.store.parents)
        if not missing and self._root is None:
            self.store.roll_back(1)
            missing = self.unread()
        return (yield from self._feed_new(missing, tree, fed)), fed or ROOT

    # --- early exits ---

    def _complete(self, tree: TokenTree) -> StepsTo[tuple[Tensor, int]]:
        """Run the rows that exited early through the remaining layers, in one forward."""
        early = self._left_early
        yield from self.exit(early.layer).feed_new(tree)
        work = ForwardInput(self.store, early.tokens, [], again=True)
        feed = Feed(
            self,
            self._watched(work),
            LayerPlan(
                resume=(early.layer, early.entering(early.layer)),
                capture=self._captured_layers,
                routing=self._routing(),
            ),
        )
        yield [feed]
        feed.captured |= {layer: early.entering(layer) for layer in self._captured_layers if layer < early.layer}
        self.states.read(feed.captured, self.store.length, early.missing)
        self._commit(early.missing - 1)
        rows, self._left_early = answer_of(feed, self.captures)[early.missing - 1:], EarlyRows()
        self._root = rows[:1]
        return rows, ROOT

    # --- when the text changes ---

    def follow(self) -> None:
        """Keep the nodes of the tree that the lane has committed, and discard all others."""
        node = ROOT if self._left_early else self._tree.follow(self.unread(), len(self.store.parents))
        if self.states.layers:
            self.states.commit(self.store.path(node))
            self._pass_states()
        self._commit(node)
        behind = self.behind()
        if node != ROOT or behind:
            known = self.seen and self.seen.tree is self._tree and not behind
            self._root = self._row_after(node) if known else None
        self._start_tree(TokenTree())

    def _row_after(self, node: int) -> Tensor | None:
        """The row after a node from the last answer, [1, V + captured]; None if that forward did not include it."""
        rows, first = self._answer
        return rows[node - first:node - first + 1] if node >= first else None

    def roll_back(self) -> None:
        """Follow a rollback of the lane."""
        self.store.roll_back(max(0, -self.behind()))
        self._own_inputs = {place: given for place, given in self._own_inputs.items() if place < self.store.length}
        if self.states.layers:
            self.states.crop(self.store.length)
        self._root = None
        self._start_tree(TokenTree())

    def prune(self, tree: TokenTree, nodes: list[int], pruned: TokenTree) -> None:
        """Remove all but these nodes from the lane's tree of branches, which becomes `pruned`."""
        if self._tree is tree:
            fed = len(self.store.parents)
            self.store.prune([node for node in nodes if node < fed])
            self.states.prune([node for node in nodes if node < fed])
            self._tree = pruned
