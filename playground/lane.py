"""The lane: one strategy's run over one text. Strategies know it as `lm`, and it is the only thing they touch.

    rows = yield lm.prefill()           the prompt goes through the target
    rows = yield lm.extend(tree)        rows for the end of the text and for every node of a guessed tree, in one forward
    choice = lm.pick(rows)              a token from a row: by chance where a sampler draws, the largest score otherwise
    yield lm.keep(choice)               commit; also lm.keep(verdict) for a tree that was judged
    other = lm.stream("draft")          another model that follows the same text: other.extend(tree)

The lane counts costs, keeps grammar, caches and policies in step with the text, and knows when the text is complete.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from playground.draws import Draws
from playground.engine.model import Model
from playground.engine.store import Window
from playground.engine.tokens import Reader
from playground.errors import Refusal
from playground.events import Draft, Event, Reason, Rollback, Verdict
from playground.parts.tree import ROOT, TokenTree
from playground.recorder import Kept, Recorder
from playground.rows import Chain, Choice, Rows
from playground.stream import Immediate, Request, Stream, Together

if TYPE_CHECKING:
    from playground.recipe import Assembly


@dataclass
class Limits:
    """What ends a text besides the model's own end token."""

    seed: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()  # tokens the text begins with after the prompt


class Lane:
    def __init__(self, prompt: list[int], models: dict[str, Model], assembly: Assembly, limits: Limits, recorder: Recorder):
        self.tokens = list(prompt)  # everything committed, prompt included
        self.prompt_length = len(prompt)
        self.limits, self.recorder = limits, recorder
        self.draws = Draws(limits.seed)
        self.target_model = models["target"]
        self.vocabulary = min(model.vocabulary for model in models.values())  # embeddings may be padded to different sizes
        self.context = min(model.context for model in models.values())
        if len(prompt) >= self.context:
            raise Refusal(f"The prompt has {len(prompt)} tokens, but a model of this lane reads {self.context} at most: shorten it.", "prompt")
        self.reason: Reason | None = None
        self.text = ""
        self.events: list[Event] = []  # not handed out yet
        self._models, self._streams, self._round = models, {}, -1
        self._asked: Immediate | None = None  # the last request to change the text
        self._policy = assembly.cache_policy
        self._reader = Reader(self.target_model.tokens)
        self.chain = Chain(assembly.samplers, self._matcher(assembly), self.target_model.end_ids)
        if self._policy:
            self.target.store.window = Window(self._policy.visible, self.prompt_length)

    def _matcher(self, assembly: Assembly):
        if assembly.constraint is None:
            return None
        return self.target_model.grammars.compile(*assembly.constraint.grammar()).matcher()

    # --- what a strategy reads ---

    @property
    def target(self) -> Stream:
        return self.stream("target")

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return min(self.limits.max_new_tokens - self.generated, self.context - len(self.tokens))

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self.target_model.end_ids

    def piece(self, token: int) -> str:
        """What a screen shows for a token."""
        return self.target_model.tokens.piece(token)

    # --- what a strategy asks for ---

    def stream(self, name: str) -> Stream:
        """The stream of that name; it reads the text when it is first asked for rows."""
        if name not in self._streams:
            if name not in self._models:
                raise Refusal(f"This strategy needs a {name} model next to the target: choose one.", name)
            self._streams[name] = Stream(name, self._models[name], self)
        return self._streams[name]

    def prefill(self) -> Request:
        """The prompt through the target; answers with the row after it."""
        return self.target.prefill()

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Rows of the target for the end of the text and for every node of `tree`, in one forward."""
        return self.target.extend(tree)

    def together(self, *requests: Request) -> Request:
        """Several independent requests; answers with a tuple."""
        return Together(*requests)

    def keep(self, what: Choice | Verdict) -> Request:
        """Commit a chosen token, or the accepted path of a verdict and the token after it."""
        steps = [Kept(what.token, what.origin, what.rows, what.node)] if isinstance(what, Choice) else self._steps(what)
        return self._due(Immediate(lambda: self._keep(steps)))

    def roll_back(self, count: int) -> Request:
        """Take back the last `count` generated tokens."""
        return self._due(Immediate(lambda: self._roll_back(count)))

    def _due(self, request: Immediate) -> Immediate:
        """These answer nothing, so a forgotten yield would go unnoticed, and the text would never grow."""
        if self._asked and not self._asked.served:
            raise RuntimeError("the text was to change and did not: write `yield lm.keep(…)` and `yield lm.roll_back(…)`")
        self._asked = request
        return request

    # --- chance ---

    def pick(self, rows: Rows, node: int = ROOT, purpose: str = "token") -> Choice:
        """A token for the place after `node`: drawn from the row's distribution, or its best where nothing is left to chance."""
        if not rows.chain.draws:
            return Choice(rows.best(node), rows, node)
        return Choice(self.draw(rows.p[rows.row(node)], rows.position(node), purpose), rows, node)

    def draw(self, p: torch.Tensor, position: int, purpose: str) -> int:
        """A token from any distribution p [V], at a position of the sequence."""
        return self.draws.pick(p, purpose, position)

    def flip(self, probability: float, position: int, purpose: str = "accept") -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""
        return self.draws.flip(probability, purpose, position)

    # --- events ---

    def record(self, event: Event) -> None:
        """Note a fact, with the pieces and the round a strategy need not know."""
        if isinstance(event, Draft):
            self._round += 1
            event.round, event.pieces = self._round, [self.piece(token) for token in event.tokens]
        if isinstance(event, Verdict):
            event.round, event.piece = self._round, self.piece(event.token) if event.token >= 0 else ""
        self.events.append(event)

    # --- how the text grows ---

    def begin(self) -> None:
        """Before the first forward: what the grammar leaves no choice about is written at once."""
        if not self.limits.forced:
            self._commit(self._forced())

    def keep_given(self, rows: Rows) -> None:
        """Commit the tokens a fork begins with; `rows` is what the model thought before and after each of them."""
        self._keep([Kept(token, "forced", rows, node) for node, token in enumerate(rows.tree.tokens, ROOT)])

    def _steps(self, verdict: Verdict) -> list[Kept]:
        rows = self.target.seen
        path = [rows.tree.tokens[node] for node in verdict.kept]
        befores = [ROOT, *verdict.kept]
        drafted = [Kept(token, "draft", rows, before) for token, before in zip(path, befores)]
        return drafted + [Kept(verdict.token, verdict.origin, rows, befores[-1])] * (verdict.token >= 0)

    def _keep(self, steps: list[Kept]) -> None:
        self._commit(steps)
        held = len(self.target.store.parents)
        for stream in self._streams.values():
            stream.follow()
        self.settle(held)

    def _commit(self, steps: list[Kept]) -> None:
        """Lengthen the text token by token, until it is complete; tokens the grammar forces follow at once."""
        start, kept, text = self.generated, [], ""
        waiting = deque(steps)
        while waiting and not self.reason:
            kept.append(waiting.popleft())
            text += self._append(kept[-1].token)
            if not waiting and not self.reason:
                waiting.extend(self._forced())
        if self.reason:
            text += self._finish_text()
        if kept:
            self.events += self.recorder.committed(kept, start, text)

    def _append(self, token: int) -> str:
        if self.chain.matcher and not self.chain.matcher.advance(token):
            raise Refusal(f"The grammar does not allow {self.piece(token)!r} here, so the text cannot go on: loosen the grammar.", "constraint")
        self.tokens.append(token)
        piece = self._reader.push([token])
        self.text += piece
        self.reason = self._complete(token)
        return piece

    def _complete(self, token: int) -> Reason | None:
        if self.ends(token):
            return "end"
        if any(stop in self.text for stop in self.limits.stop if stop):
            return "stop_string"
        if self.chain.matcher and self.chain.matcher.stopped:
            return "grammar"
        return "length" if self.remaining <= 0 else None

    def _forced(self) -> list[Kept]:
        """Tokens the grammar leaves no alternative to; they need no forward of their own."""
        return [Kept(token, "forced") for token in self.chain.matcher.forced()] if self.chain.matcher else []

    def _finish_text(self) -> str:
        rest = self._reader.flush()
        self.text += rest
        return rest

    def settle(self, guesses: int = 0) -> None:
        """After a keep: the policy frees slots of the target's cache. What is left is noted, and how many places guesses had taken."""
        store, freed = self.target.store, 0
        if self._policy:
            next_row = torch.tensor([[store.length]], device=store.device)
            freed = store.evict([self._policy.visible(next_row, slots.positions) for slots in store.slots])
        self.events += self.recorder.cache(store, guesses, freed)

    def _roll_back(self, count: int) -> None:
        if not 0 <= count <= self.generated:
            raise ValueError(f"cannot take back {count} of {self.generated} generated tokens")
        if self._policy:
            raise Refusal(f"{self._policy.name} has freed slots that an earlier place of the text needs, so the text cannot go back: take it away.", "cache_policy")
        del self.tokens[len(self.tokens) - count:]
        for stream in self._streams.values():
            stream.roll_back()
        if self.chain.matcher:
            self.chain.matcher.rollback(count)
        self.text = self._reader.rebuild(self.tokens[self.prompt_length:])
        self.reason = None
        self.record(Rollback(count, self.text))
        self.settle()
