"""The lane: one strategy's run over one text. Strategies know it as `lm`, and it is the only thing they touch.

    rows = yield lm.prefill()           the prompt goes through the target
    rows = yield lm.extend(tree)        rows for the end of the text and for every node of a guessed tree, in one
    forward
    choice = lm.pick(rows)              a token from a row: by chance where a sampler draws, the largest score otherwise
    yield lm.keep(choice)               commit; also lm.keep(verdict) for a tree that was judged
    other = lm.stream("draft")          another model that follows the same text: other.extend(tree)
    early = lm.exit(4)                  the target left after four layers: early.extend(tree)

    leaves = lm.fork(8)                 sequences that grow side by side from here, sharing the cache of what they share
    rows = yield lm.extend(leaves)      a row for the end of each, in one forward
    yield lm.keep([lm.pick(row) for row in rows])
    yield lm.keep(leaves[3])            that one becomes the text

The lane counts costs, keeps grammar, caches, policies and samplers in step with the text, and knows when it is
complete.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding import fitted_weights as fitted
from playground.decoding.async_forward import AsyncRequest
from playground.decoding.cache_manager import CacheManager, check_cuts
from playground.decoding.cross_tokenizer import CrossTokenizerStream
from playground.decoding.limits import Limits
from playground.decoding.recorder import Kept, Recorder
from playground.decoding.requests import Background, Immediate, Request, Together
from playground.decoding.rng import Draws
from playground.decoding.rows import Rows, TokenChoice
from playground.decoding.sampler_chain import Chain
from playground.decoding.sequence import Bounds, Sequence
from playground.decoding.shared_prefix import SharedPrefixes
from playground.decoding.stream import Exit, Stream, reading
from playground.decoding.visitor_memory import Memory
from playground.engine.model import Model
from playground.engine.tokens import Reader
from playground.errors import Refusal
from playground.events import Branches, Commit, Draft, Event, Reason, Rollback, Verdict

if TYPE_CHECKING:
    from playground.contract import Strategy
    from playground.contract.lane_config import Assembly

class Lane:
    def __init__(
        self,
        prompt: list[int],
        models: dict[str, Model],
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
        prompts: dict[str, list[int]] | None = None,
        memory: Memory | None = None,
    ):
        """`prompts` are other prompts by the name of the stream that reads them: for the target's model, or for one
        with tokens of its own in those.
        """
        self.prompt_length = len(prompt)
        self.limits, self.recorder, self.assembly = limits, recorder, assembly
        self.draws = Draws(limits.seed)
        self.target_model = models["target"]
        self.prompts = {"target": prompt, **(prompts or {})}
        # they read the same tokens
        alike = [model for name, model in models.items() if name == "target" or name not in self.prompts]
        self.vocabulary = min(model.vocabulary for model in alike)  # embeddings may be padded to different sizes
        longest = max(len(ids) for name, ids in self.prompts.items() if name == "target" or name not in models)
        self.context = min(model.context for model in alike) - longest + len(prompt)
        if len(prompt) >= self.context:
            raise Refusal(
                f"The prompt has {len(prompt)} tokens, but a model of this lane reads {self.context} at most: shorten it.",
                "prompt",
            )
        self.form: Callable[[str], list[int]] = self.encode  # what makes a prompt of a text
        self.passage = ""  # what the prompt gives as context, before it was put into the model's form
        self.prefixes = SharedPrefixes()  # prompts that it reads together with other lanes
        self.events: list[Event] = []  # not handed out yet
        self._models, self._streams, self._round = models, {}, -1
        self.inner = [
            exit
            for part in assembly.strategies()
            for exit in part.inner(self.target_model.depth, self.target_model.tied)
        ]
        # learnt weights by name, by strategy
        self.fitted = {part.name: fitted.find(part, models) for part in assembly.strategies() if part.trained}
        self._asked: Immediate | None = None  # the last request to change the text
        bounds = Bounds(min(len(prompt) + limits.max_new_tokens, self.context), self.target_model.end_ids, limits.stop)
        chain = Chain(assembly.samplers, self._matcher(assembly), self.target_model.end_ids, assembly.constraint,
                      not assembly.decoder.owns_constraint, lambda *flip: self.draws.coin(*flip))
        self.main = Sequence(0, prompt, bounds, chain, Reader(self.target_model.tokens))
        for sampler in assembly.samplers:
            # a bound method would be copied with its lane where sequences fork
            sampler.begin(len(prompt), lambda token: self.piece(token))
        # sequences that grow beside each other, by number; those dropped are not among them
        self.leaves: dict[int, Sequence] = {}
        self._born, self._branches = 0, TokenTree()
        self._visitor, self._recalled = Memory() if memory is None else memory, {}  # an empty one is false
        if assembly.cache_policy:  # now, so that what it cannot do with this model is refused before the run
            self.stream("target")

    def _matcher(self, assembly: Assembly):
        if assembly.constraint is None:
            return None
        assembly.constraint.begin(len(self.prompts["target"]), self.bytes)
        return self.target_model.grammars.compile(*assembly.constraint.grammar()).matcher()

    # --- what a strategy reads ---

    @property
    def target(self) -> Stream:
        return self.stream("target")

    @property
    def tokens(self) -> list[int]:
        """Everything committed, prompt included."""
        return self.main.tokens

    @property
    def text(self) -> str:
        """What was generated, as far as it is readable."""
        return self.main.text

    @property
    def reason(self) -> Reason | None:
        return self.main.reason

    @reason.setter
    def reason(self, reason: Reason) -> None:
        self.main.reason = reason

    @property
    def chain(self) -> Chain:
        return self.main.chain

    @property
    def generated(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.main.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.main.remaining

    @property
    def depth(self) -> int:
        """Decoder layers of the target."""
        return self.target_model.depth

    @property
    def keys(self) -> torch.Tensor | None:
        """Rows of the target's head, [V, width]: a score is the product of one with the state; None where the head is
        no plain matrix.
        """
        keys = self.target_model.keys
        return None if keys is None else keys[:self.vocabulary]

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        return self.target_model.end_ids

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self.end_ids

    def ask(self, text: str) -> list[int]:
        """Another question as token ids, in the form the lane's own prompt has."""
        return self.form(text)

    def special(self, token: int) -> bool:
        """Whether a token is none of the text, such as one that begins a turn."""
        return self.target_model.tokens.is_special(token)

    def piece(self, token: int) -> str:
        """What a screen shows for a token."""
        return self.target_model.tokens.piece(token)

    def bytes(self, token: int) -> bytes:
        """The bytes a token adds to a text that has begun; none for one that is no text."""
        return self.target_model.tokens.bytes(token)

    def encode(self, text: str) -> list[int]:
        """A text as the target's token ids, with whatever its tokenizer puts around it."""
        return self.target_model.tokens.encode(text)

    def spell(self, text: str) -> list[int]:
        """A text as the target's token ids inside a longer text, with nothing put around it."""
        return [token for token in self.encode(text) if not self.special(token)]

    def text_of(self, tokens: list[int]) -> str:
        """What these tokens say by themselves, as far as it is readable."""
        reader = Reader(self.target_model.tokens)
        return reader.push(tokens) + reader.flush()

    # --- what a strategy asks for ---

    def stream(self, name: str) -> Stream:
        """The stream of that name; it reads the text when it is first asked for rows."""
        if name not in self._streams:
            self._streams[name] = self._opened(name)
        return self._streams[name]

    def _opened(self, name: str) -> Stream:
        if name in self._models and name != "target" and name in self.prompts:
            return CrossTokenizerStream(name, self._models[name], self, self.prompts[name])
        if name in self._models:
            companions = [self.stream(other) for other in self.assembly.streams()] if name == "target" else []
            stream = Stream(name, self._models[name], self, self.prompts["target"], companions)
            if name == "target":
                stream.cache_manager = self._managed(stream)
            return stream
        if name in self.prompts:
            return Stream(name, self.target_model, self, self.prompts[name])
        raise Refusal(f"This strategy needs a {name} model next to the target: choose one.", name)

    def _managed(self, stream: Stream) -> CacheManager:
        policy, model = self.assembly.cache_policy, self.target_model
        if policy:
            check_cuts(policy, model)
        return CacheManager(policy, stream.store, self.prompt_length, self.recorder, model.turn_back)

    def readings(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """By stream, the model and the prompt it reads; without the target where a cache policy has a say in what is
        held of it.
        """
        names = [
            name for name in {**self._models, **self.prompts} if not (self.assembly.cache_policy and name == "target")
        ]
        ours = self.prompts["target"]
        return {
            name: (id(self._models.get(name, self.target_model)), tuple(self.prompts.get(name, ours))) for name in names
        }

    def captures(self, stream: str) -> frozenset[int]:
        """Layers of a stream before which its hidden states are taken out, the depth for those after the last."""
        last = [self._models.get(stream, self.target_model).depth] if self.shows_hidden(stream) else []
        return frozenset([*(exit.layer for exit in self.inner if exit.stream == stream), *last])

    def shows_hidden(self, stream: str) -> bool:
        return any(stream in part.reads_hidden for part in self.assembly.strategies())

    def exit(self, layer: int) -> Exit:
        """The target left after `layer` layers."""
        return self.target.exit(min(layer, self.depth))

    def prefill(self) -> Request:
        """The prompt through the target; answers with the row after it."""
        return self.target.prefill()

    def reading(self, ids: list[int], name: str = "target") -> list[Request]:
        """A text of its own through the model of a stream, from an empty cache of which nothing stays.

        One request for each piece, to be yielded in order; each answers with what was read, a `Piece`.
        """
        told = "reading" if name == "target" else f"{name} reading"
        return reading(Stream(told, self.stream(name).model, self, ids), ids, self.shows_hidden(name))

    def extend(self, what: TokenTree | list[Sequence] | None = None) -> Request:
        """Rows of the target in one forward: for the end of the text and every node of a tree, or one for the end of
        each sequence.
        """
        return self.target.grow(what) if isinstance(what, list) else self.target.extend(what)

    def together(self, *requests: Request) -> Request:
        """Several independent requests; answers with a tuple."""
        return Together(*requests)

    def aside(self, request: Request) -> Request:
        """Set a request out in a thread of its model's own; answers at once, with a request to yield where its answer
        is needed.

        Until then that stream may not be asked for anything else. Lane time is what is waited for.
        """
        return Immediate(lambda: AsyncRequest(request))

    def background(self, work: Callable[[], Any]) -> Request:
        """Run Python work in a thread while other lanes continue; answers with what it returns."""
        return Background(work)

    def keep(self, what: TokenChoice | Verdict | Sequence | list[TokenChoice]) -> Request:
        """Commit a chosen token, the accepted path of a verdict and the token after it, or what a sequence wrote.

        A list of choices is committed each by its own sequence, and none of them is the lane's text yet.
        """
        if isinstance(what, list):
            return self._due(Immediate(lambda: self._keep_each(what)))
        if isinstance(what, Sequence):
            return self._due(Immediate(lambda: self._adopt(what)))
        steps = (
            [Kept(what.token, what.origin, what.rows, what.node)]
            if isinstance(what, TokenChoice)
            else self._steps(what)
        )
        return self._due(Immediate(lambda: self._keep(steps)))

    def roll_back(self, count: int) -> Request:
        """Take back the last `count` generated tokens."""
        return self._due(Immediate(lambda: self._roll_back(count)))

    def _due(self, request: Immediate) -> Immediate:
        """These answer nothing, so a forgotten yield would go unnoticed, and the text would never grow."""
        if self._asked and not self._asked.served:
            raise RuntimeError(
                "the text was to change and did not: write `yield lm.keep(…)` and `yield lm.roll_back(…)`"
            )
        self._asked = request
        return request

    # --- chance ---

    def pick(self, rows: Rows, node: int = ROOT, purpose: str = "token") -> TokenChoice:
        """A token for the place after `node`: drawn from the row's distribution, or its best where nothing is left to
        chance.
        """
        if not rows.chain.draws:
            return TokenChoice(rows.best(node), rows, node)
        token = self.draws.pick(rows.chances(node), purpose, rows.position(node), rows.sequence.lineage)
        return TokenChoice(token, rows, node)

    def choose(self, rows: Rows, token: int, node: int = ROOT, leaf: Sequence | None = None) -> TokenChoice:
        """A token the strategy decided on, to be kept; by another sequence than the row's where both stand at the same
        place.
        """
        return TokenChoice(token, rows, node, by=leaf)

    def draw(self, p: torch.Tensor, position: int, purpose: str) -> int:
        """A token from any distribution p [V], at a position of the sequence."""
        return self.draws.pick(p, purpose, position)

    def flip(self, probability: float, position: int, purpose: str = "accept") -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""
        return self.draws.flip(probability, purpose, position)

    def uniform(self, position: int, purpose: str) -> float:
        """A number drawn evenly from [0, 1), where a strategy needs noise of its own making. Laws with it cannot be
        enumerated.
        """
        return self.draws.uniform(purpose, position)

    # --- memory ---

    def memory(self, name: str, make: Callable[[], Any], *about: object) -> Any:
        """What a strategy learned in earlier runs of the same visitor with this model, a copy of it; `make` makes it
        new.

        `about` is all else it depends on. A thing has `digest() -> str`, equal for equal contents.
        """
        model = self.target_model
        key = "|".join(map(str, (name, model.name, model.revision, model.quantization, model.dtype, *about)))
        if key not in self._recalled:
            self._recalled[key] = self._visitor.recall(key, make)
        return self._recalled[key]

    def remember(self) -> None:
        """At the end: give back what was learned, and say that the caches have done their work."""
        for key, thing in self._recalled.items():
            self._visitor.keep(key, thing)
        for stream in self._streams.values():
            stream.store.done = True

    # --- events ---

    def record(self, event: Event) -> None:
        """Note a fact, with the pieces and the round a strategy need not know."""
        if isinstance(event, Draft):
            self._round += 1
            event.round, event.pieces = self._round, self.target_model.tokens.pieces(event.tokens)
        if isinstance(event, Verdict):
            event.round, event.piece = self._round, self.piece(event.token) if event.token >= 0 else ""
        self.events.append(event)

    # --- several sequences ---

    def fork(self, count: int, leaf: Sequence | None = None) -> list[Sequence]:
        """New sequences at the end of the text, or of a sequence. The first of the lane draws what the lane itself
        would have drawn.
        """
        parent = leaf or self.main
        if parent is self.main:  # it stands where the trunk ends, whatever it grew on
            parent.node, parent.placed = ROOT, len(parent.tokens)
        twins = [parent.fork(self._born + i) for i in range(1, count + 1)]
        self._born += count
        self.leaves |= {twin.number: twin for twin in twins}
        self.record(Branches(born=[(twin.number, parent.number) for twin in twins]))
        return twins

    def drop(self, leaves: Iterable[Sequence]) -> None:
        """These sequences are given up, and their slots are free."""
        dropped = [leaf.number for leaf in leaves]
        if dropped:
            self.leaves = {number: leaf for number, leaf in self.leaves.items() if number not in dropped}
            self.record(Branches(dropped=dropped))
            self._prune()

    def plant(self, leaves: list[Sequence]) -> TokenTree:
        """The tree of all that living sequences wrote since they were forked; ready to be fed."""
        self._prune()
        fresh: dict[tuple[int, int], int] = {}  # those who write the same in the same place share it
        for leaf in leaves:
            for token in leaf.tokens[leaf.placed:]:
                place = (leaf.node, token)
                if place not in fresh:
                    fresh[place] = self._branches.add(token, leaf.node)
                leaf.node = fresh[place]
            leaf.placed = len(leaf.tokens)
        return self._branches

    def _prune(self) -> None:
        """Free what no sequence that still grows stands on."""
        growing = [leaf for leaf in self.leaves.values() if not leaf.reason]
        needed = sorted({node for leaf in growing for node in self._branches.path(leaf.node)})
        if len(needed) == len(self._branches):
            return
        before, self._branches = self._branches, self._branches.only(needed)
        renumbered = {old: new for new, old in enumerate(needed)} | {ROOT: ROOT}
        for leaf in growing:
            leaf.node = renumbered[leaf.node]
        for stream in self._streams.values():
            stream.prune(before, needed, self._branches)

    def _keep_each(self, choices: list[TokenChoice]) -> None:
        for choice in choices:
            self._commit([Kept(choice.token, choice.origin, choice.rows, choice.node)], choice.sequence)
        if ended := [choice.sequence.number for choice in choices if choice.sequence.reason]:
            self.record(Branches(ended=ended))
        self.settle("branch")

    def _adopt(self, leaf: Sequence) -> None:
        """What a sequence wrote becomes the lane's text."""
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

    # --- how the text grows ---

    def begin(self) -> None:
        """Before the first forward: what the grammar leaves no choice about is written at once."""
        if not self.limits.forced:
            self._commit(self._forced(self.main), self.main)

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
        if self.leaves:
            raise RuntimeError("sequences grow side by side: keep one of them before the text goes on")
        self._commit(steps, self.main)
        self._follow("keep")

    def _follow(self, moment: str) -> None:
        held = len(self.target.store.parents)
        for stream in self._streams.values():
            stream.follow()
        self.settle(moment, held)

    def _commit(self, steps: list[Kept], sequence: Sequence) -> None:
        """Lengthen a text token by token, until it is complete; tokens the grammar forces follow at once."""
        start, kept, text = sequence.generated, [], ""
        waiting = deque(steps)
        while waiting and not sequence.reason:
            kept.append(waiting.popleft())
            text += self._append(kept[-1], sequence)
            if not waiting and not sequence.reason:
                waiting.extend(self._forced(sequence))
        if sequence.reason:
            text += sequence.finish()
        if kept:
            self._tell(kept, start, text, sequence)

    def _append(self, kept: Kept, sequence: Sequence) -> str:
        matcher = sequence.chain.matcher
        if matcher and not matcher.advance(kept.token):
            raise Refusal(
                f"The grammar does not allow {self.piece(kept.token)!r} here, so the text cannot go on: loosen the grammar.",
                "constraint",
            )
        if kept.rows is not None:
            for event in kept.rows.kept(kept.node, kept.token, sequence):
                event.sequence = sequence.number
                self.events.append(event)
        return sequence.append(kept.token)

    def _tell(self, kept: list[Kept], start: int, text: str, sequence: Sequence) -> None:
        events = self.recorder.committed(kept, start, text)
        for event in events:
            event.sequence = sequence.number
        commit = events[-1]
        sequence.logprobs += commit.logprobs
        sequence.origins += commit.origins
        self.events += events

    def _forced(self, sequence: Sequence) -> list[Kept]:
        """Tokens the grammar leaves no alternative to; they need no forward of their own."""
        chain = sequence.chain
        return [Kept(token, "forced") for token in chain.matcher.forced()] if chain.matcher and chain.masking else []

    # --- caches ---

    @property
    def cache_manager(self) -> CacheManager:
        """What the cache policy does to the target's cache."""
        return self.target.cache_manager

    def settle(self, moment: str, drafted: int = 0) -> None:
        """After a commit: the policy acts on the target's cache, and the result is recorded.

        `drafted` is how many slots the draft tokens of the round took.
        """
        self.events += self.cache_manager.settle(moment, self._next(), drafted)

    def _next(self) -> int:
        """Position of the next row; of the hindmost where several sequences grow."""
        ends = [len(leaf.tokens) for leaf in self.leaves.values() if not leaf.reason] or [self.target.store.length + 1]
        return min(ends) - 1

    def _roll_back(self, count: int) -> None:
        if not 0 <= count <= self.generated:
            raise ValueError(f"cannot take back {count} of {self.generated} generated tokens")
        for part in self._past_going_back():
            raise Refusal(
                f"{part.name} cannot undo what it did at a later place of the text, so the text cannot go back: take it away.",
                part.name,
            )
        self.main.take_back(count)
        for stream in self._streams.values():
            stream.roll_back()
        self.record(Rollback(count, self.text))
        self.settle("keep")

    def _past_going_back(self) -> list[Strategy]:
        """Toggles that have freed slots an earlier place needs, or learned from tokens that would be taken back."""
        learners = [sampler for sampler in self.chain.samplers if not sampler.row_wise]
        return ([self.assembly.cache_policy] if self.assembly.cache_policy else []) + learners
