"""How the text of a lane grows: what is committed, and what follows it."""
from __future__ import annotations

from typing import TYPE_CHECKING

from playground.contract import Strategy
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.commit_observers import observe_commit
from playground.decoding.lane.branches import Branching
from playground.decoding.recorder import CommittedToken
from playground.decoding.rows import Rows, TokenChoice
from playground.decoding.sequence import Sequence
from playground.errors import Refusal
from playground.events import Branches, Commit, Note, OfSequence, Rollback, Verdict

if TYPE_CHECKING:
    from playground.contract import Constraint
    from playground.decoding.compute_manager import ComputeManager


class Commits(Branching):
    """Commits tokens, with those that the grammar forces, and lets streams, caches and samplers follow."""

    def begin(self) -> None:
        """Before the first forward: say what is to know about the lane, and commit the tokens that a grammar forces."""
        self.events += map(Note, self.assembly.remarks())
        if self.assembly.constraint:
            self.events += map(Note, self.assembly.constraint.remarks())
        if not self.limits.forced:
            self._commit(self._forced(self.main), self.main)

    def commit_forced(self, rows: Rows) -> None:
        self._commit_main(
            [CommittedToken(token, "forced", rows, node) for node, token in enumerate(rows.tree.tokens, ROOT)]
        )

    def _accepted(self, verdict: Verdict) -> list[CommittedToken]:
        """The accepted path of a verdict and the token after it."""
        rows = self.target.seen
        if rows is None:
            raise RuntimeError("a verdict is about rows of the target: request them first")
        path = [rows.tree.tokens[node] for node in verdict.kept]
        parents = [ROOT, *verdict.kept]
        drafted = [CommittedToken(token, "draft", rows, parent) for token, parent in zip(path, parents)]
        return drafted + [CommittedToken(verdict.token, verdict.origin, rows, parents[-1])] * (verdict.token >= 0)

    def _commit_main(self, tokens: list[CommittedToken]) -> None:
        if self.leaves:
            raise RuntimeError("parallel sequences are growing: keep one of them before the text continues")
        self._commit(tokens, self.main)
        self._follow("keep")

    def _commit_each(self, choices: list[TokenChoice]) -> None:
        for choice in choices:
            self._commit([CommittedToken(choice.token, choice.origin, choice.rows, choice.node)], choice.sequence)
        if ended := [choice.sequence.number for choice in choices if choice.sequence.reason]:
            self.record(Branches(ended=ended))
        self.settle("branch")

    def _adopt(self, leaf: Sequence) -> None:
        """Make the text of a sequence the lane's text."""
        start, main = self.generated, self.main
        ids = leaf.tokens[len(main.tokens):]
        text = leaf.text[len(main.text):]
        logprobs, origins = leaf.logprobs[start:], leaf.origins[start:]
        self.main = leaf
        leaf.number, number = 0, leaf.number
        self.events.append(Commit(start, ids, [self.piece(i) for i in ids], text, logprobs, origins, grown_on=number))
        self.leaves = {}
        self._follow("keep")
        self._branches = TokenTree()

    def _follow(self, moment: str) -> None:
        drafted = len(self.target.store.parents)
        for stream in self._streams.values():
            stream.follow()
        self.settle(moment, drafted)

    # --- the end of a text, by the compute policy ---

    def _up_to_stop(self, tokens: list[CommittedToken]) -> list[CommittedToken]:
        """The tokens up to the first row after which the compute policy ends the text, with the end in its place."""
        policy = self.assembly.compute_policy
        if policy is None or not policy.may_stop or (computing := self.target.computing) is None:
            return tokens
        for place, (_, _, rows, node) in enumerate(tokens):
            if self._stops(computing, rows, node):
                return [*tokens[:place], CommittedToken(min(self.end_ids), "forced", rows, node)]
        return tokens

    def _stops(self, computing: ComputeManager, rows: Rows | None, node: int) -> bool:
        """Whether the compute policy ends the text after a node; never where the model or the grammar has no end."""
        if not self.end_ids or rows is None or rows.stream != "target":
            return False
        if not rows.may_follow(min(self.end_ids), node):
            return False
        return computing.stops([*rows.committed, *rows.tree.prefix(node)])

    # --- one sequence ---

    def _commit(self, tokens: list[CommittedToken], sequence: Sequence) -> None:
        """Append tokens to a text until it is complete, then the tokens that the grammar forces after them."""
        committed: list[CommittedToken] = []
        start, text = sequence.generated, ""
        while tokens and not sequence.reason:
            count, piece = sequence.extend([item.token for item in tokens])
            committed, text = committed + tokens[:count], text + piece
            tokens = [] if sequence.reason else self._forced(sequence)
        if sequence.reason:
            text += sequence.finish()
        if committed:
            self._record_commit(committed, start, text, sequence)

    def _record_commit(self, committed: list[CommittedToken], start: int, text: str, sequence: Sequence) -> None:
        path = [(item.node, item.token) for item in committed if item.rows is not None]
        rows = committed[0].rows  # of all that have some: forced tokens come after them
        said = [*observe_commit(rows, path, sequence)] if rows is not None else []
        steps, commit = self.recorder.committed(committed, start, text)
        for event in (events := [*said, *steps, commit]):
            if isinstance(event, OfSequence):
                event.sequence = sequence.number
        sequence.logprobs += commit.logprobs
        sequence.origins += commit.origins
        self.events += events

    def _forced(self, sequence: Sequence) -> list[CommittedToken]:
        """Tokens without an alternative under the grammar; they need no forward, unless their probability counts."""
        chain = sequence.chain
        forced = chain.matcher.forced() if chain.matcher and chain.forcing else []
        if forced and chain.constraint and chain.constraint.narrows_forced:
            forced = self._permitted(chain.constraint, forced, sequence)
        return [CommittedToken(token, "forced") for token in forced]

    def _permitted(self, constraint: Constraint, forced: list[int], sequence: Sequence) -> list[int]:
        """Forced tokens up to the first one that the constraint forbids: the next row is then empty, and refused."""
        vocabulary = self.target_model.vocabulary
        for place, token in enumerate(forced):
            if not constraint.permits(sequence.tokens + forced[:place], token, vocabulary):
                return forced[:place]
        return forced

    # --- caches ---

    def settle(self, moment: str, drafted: int = 0) -> None:
        """After a commit: apply the cache policy to the target's cache and record the result.

        `drafted` is how many slots the draft tokens of the round took.
        """
        target = self.target
        if target.cache_manager:
            self.events += target.cache_manager.settle(moment, self._next_position(target.store.length), drafted)
        if target.computing:
            self.events += target.computing.report(self.main, self.piece)

    def _next_position(self, read: int) -> int:
        """Position of the next row after `read` tokens; the smallest one if several sequences are growing."""
        ends = [len(leaf.tokens) for leaf in self.leaves.values() if not leaf.reason] or [read + 1]
        return min(ends) - 1

    # --- back ---

    def _roll_back(self, count: int) -> None:
        if not 0 <= count <= self.generated:
            raise ValueError(f"cannot roll back {count} of {self.generated} generated tokens")
        for part in self._irreversible():
            raise Refusal(
                f"{part.title} cannot undo its effect on later positions, so tokens cannot be rolled back: remove it.",
                part.name,
            )
        self.main.take_back(count)
        for stream in self._streams.values():
            stream.roll_back()
        self.record(Rollback(count, self.text))
        self.settle("keep")

    def _irreversible(self) -> list[Strategy]:
        """Toggles that may have evicted slots needed again, or learned from the tokens that would be removed."""
        policy = self.assembly.cache_policy
        return [*([policy] if policy else []), *(sampler for sampler in self.chain.samplers if not sampler.row_wise)]
