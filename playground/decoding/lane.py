"""The lane: one strategy's run over one text. Strategies receive it as `lm` and use nothing else.

    rows = yield lm.prefill()           forward over the prompt
    rows = yield lm.extend(tree)        one forward: rows for the end of the text and for every node of a draft tree
    choice = lm.pick(rows)              choose a token from a row: sampled if a sampler draws, argmax otherwise
    yield lm.keep(choice)               commit it; lm.keep(verdict) commits what a verifier accepted
    other = lm.stream("draft")          another model that follows the same text: other.extend(tree)
    early = lm.exit(4)                  early exit of the target after four layers: early.extend(tree)

    leaves = lm.fork(8)                 parallel sequences that start here and share the KV cache of their prefixes
    rows = yield lm.extend(leaves)      one forward: a row for the end of each
    yield lm.keep([lm.pick(row) for row in rows])
    yield lm.keep(leaves[3])            this sequence becomes the text

The lane records costs, keeps grammar, caches, policies and samplers in step with the text, and detects its end.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from playground.contract import ReadsParts, ReadsProbes
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding import fitted_weights as fitted
from playground.decoding.async_forward import AsyncRequest
from playground.decoding.cache_manager import CacheManager, check_exits, check_policy
from playground.decoding.checked_text import CheckedText
from playground.decoding.compute_manager import ComputeManager
from playground.decoding.cross_tokenizer import CrossTokenizerStream
from playground.decoding.limits import Limits
from playground.decoding.recorder import CommittedToken, Recorder
from playground.decoding.requests import Background, Immediate, Pause, Request, Together
from playground.decoding.rng import Draws, Remaining
from playground.decoding.routed_streams import read_routings
from playground.decoding.rows import Rows, TokenChoice
from playground.decoding.sampler_chain import Chain
from playground.decoding.sequence import Bounds, Sequence
from playground.decoding.shared_prefix import SharedPrefixes
from playground.decoding.stream import Exit, Stream, reading
from playground.decoding.visitor_memory import Memory
from playground.engine.expert_routing import ExpertRouting
from playground.engine.model import Model
from playground.engine.sequence_classifier import load_classifier
from playground.engine.text.tokens import Reader
from playground.errors import Refusal
from playground.events import Branches, Commit, Draft, Event, Note, Reason, Rollback, Verdict

if TYPE_CHECKING:
    from playground.contract import Drafter, Strategy
    from playground.contract.lane_config import Assembly
    from playground.grammar.matcher import Matcher


class Lane:
    """One strategy's run over one text: its models, streams, sequences, KV caches and events."""

    def __init__(
        self,
        prompt: list[int],
        models: dict[str, Model],
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
        prompts: dict[str, list[int]] | None = None,
        memory: Memory | None = None,
        heads: Mapping[str, dict[str, torch.Tensor]] | None = None,
    ):
        """`prompts` maps streams to other prompts, for the target's model or for a draft with another vocabulary.
        `heads` are weights of draft heads that were given, by strategy.

        Raises Refusal if the prompt is too long, fitted weights are missing, or the cache policy cannot work.
        """
        self.prompt_length = len(prompt)
        self.limits, self.recorder, self.assembly = limits, recorder, assembly
        self.draws = Draws(limits.seed)
        self.target_model, self._models = models["target"], models
        self.end_ids = self.target_model.end_ids  # tokens that end the text
        check_exits(assembly.strategies(), self.target_model)
        self.routings = read_routings(assembly.samplers, self.target_model)
        self.prompts = {"target": prompt, **dict.fromkeys(self.routings, prompt), **(prompts or {})}
        self._set_sizes()
        self.form: Callable[[str], list[int]] = self.encode  # formats and encodes a question as the prompt was
        self.question = ""  # the prompt as plain text, without template, context and earlier turns
        self.passage = ""  # the context of the prompt as plain text
        self.prefixes = SharedPrefixes()  # prompts shared with other lanes
        self.events: list[Event] = []  # not yet delivered
        self._streams, self._round = {}, -1
        self._noted: set[str] = set()
        self.inner = [
            exit
            for part in assembly.strategies()
            for exit in part.inner(self.target_model.depth, self.target_model.tied)
        ]
        # fitted weights by name, by strategy
        others = [part for part in assembly.strategies() if part is not assembly.compute_policy]
        self.fitted = fitted.find_all(others, models, heads or {})
        for part in assembly.strategies():
            part.check_target(self.target_model)
        self._last_change: Immediate | None = None  # the last request that changes the text
        self.main = self._new_sequence(prompt)
        for sampler in assembly.samplers:
            # a lambda, because deepcopy of a bound method would copy the lane when sequences fork
            sampler.begin(len(prompt), lambda token: self.piece(token), self.end_ids)
        self.leaves: dict[int, Sequence] = {}  # parallel sequences by number, without dropped ones
        self._forked, self._branches = 0, TokenTree()
        self._memory, self._recalled = Memory() if memory is None else memory, {}  # an empty Memory is falsy
        # now, so that an unsupported combination raises Refusal before the run
        if assembly.cache_policy or assembly.compute_policy:
            self.stream("target")

    def _set_sizes(self) -> None:
        """Set vocabulary and context length. Raises Refusal if the prompt is too long."""
        prompts, models = self.prompts, self._models
        same_tokens = [model for name, model in models.items() if name == "target" or name not in prompts]
        self.vocabulary = min(model.vocabulary for model in same_tokens)  # embeddings may be padded to different sizes
        longest = max(len(ids) for name, ids in prompts.items() if name == "target" or name not in models)
        most, self._limiting = min(self._limits(longest), key=lambda limit: limit[0])
        self.context = most - longest + self.prompt_length
        if self.prompt_length >= self.context:
            raise Refusal(f"The prompt has {longest:,} tokens, but {self._limiting}: shorten it.", "prompt")

    def _limits(self, longest: int) -> Iterator[tuple[int, str]]:
        """Tokens that each model which the lane cannot do without can read, and the model and the number in words."""
        target, draft = self.target_model, self._models.get("draft")
        beside = f", and the longest prompt of this lane has {longest:,}" if longest > self.prompt_length else ""
        stated = "" if getattr(target, "context_stated", True) else " here, since its config names no context"
        yield target.context, f"{target.name} reads at most {target.context:,}{stated}{beside}"
        needing = [part for part in self.assembly.strategies() if "draft" in part.needs and not part.drafts_at_will]
        if draft and needing:
            needs = f"the draft model {draft.name}, which {needing[0].title} needs for every token"
            yield draft.context, f"{needs}, reads at most {draft.context:,}"

    @property
    def limit(self) -> str:
        """What ended the text at a length below the one that was asked for; empty if nothing did."""
        if self.reason != "length" or self.generated >= self.limits.max_new_tokens:
            return ""
        return f"The text ends at {len(self.tokens):,} tokens, prompt included: {self._limiting}."

    def _new_sequence(self, prompt: list[int]) -> Sequence:
        """The sequence of the lane's own text."""
        limits, model, assembly = self.limits, self.target_model, self.assembly
        bounds = Bounds.of(min(len(prompt) + limits.max_new_tokens, self.context), model, limits.stop)
        chain = Chain(
            assembly.samplers,
            self._new_matcher(),
            model.end_ids,
            assembly.constraint,
            masking=not assembly.decoder.owns_constraint,
            forcing=not (assembly.decoder.owns_constraint or assembly.decoder.counts_forced),
            computes_masks=not assembly.decoder.checks_tokens,
            coin=lambda *flip: self.draws.coin(*flip),
        )
        return Sequence(0, prompt, bounds, chain, Reader(model.tokens, prompt))

    def _new_matcher(self) -> Matcher | CheckedText | None:
        constraint = self.assembly.constraint
        if constraint is None:
            return None
        self.target_model.tokens.check_constrainable(self.prompts["target"])
        constraint.begin(self.prompt_length, self.bytes)
        if checker := constraint.checker():
            return CheckedText(checker, self.bytes, self.target_model.vocabulary, self.end_ids)
        return self.target_model.grammars.compile(*constraint.grammar()).matcher()

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
        """The generated text, without an incomplete last character."""
        return self.main.text

    @property
    def reason(self) -> Reason | None:
        """Why the text is complete; None while it grows."""
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
    def candidates(self) -> int:
        """Most probable tokens of each row that are recorded."""
        return self.recorder.top

    @property
    def depth(self) -> int:
        """Decoder layers of the target."""
        return self.target_model.depth

    @property
    def lm_head_weight(self) -> torch.Tensor | None:
        """Weights of the target's lm_head, [V, hidden_size]; None if the head is not a plain matrix."""
        weight = self.target_model.lm_head_weights
        return None if weight is None else weight[:self.vocabulary]

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """The target's input embeddings of tokens, [n, hidden_size]."""
        return self.target_model.embed(tokens)

    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of inputs of the target's lm_head, [n, hidden_size]."""
        return self.target_model.read_out(hidden, norm=False)[:, :self.vocabulary]

    def own_rows(self, logits: torch.Tensor, tree: TokenTree, first: int = ROOT) -> Rows:
        """Rows of logits [n, V] that a drafter computed itself, for the nodes of a tree from `first` on.

        The masks and samplers of the lane apply to them as to those of a draft model.
        """
        return Rows("draft", logits, self.main, tree, first, candidates=self.candidates)

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self.end_ids

    @property
    def padding(self) -> int:
        """A token without content of its own: the tokenizer's padding token, else an end token, else the first one."""
        own = self.target_model.tokens.padding
        return own if own is not None else min(self.end_ids, default=0)

    def ask(self, text: str) -> list[int]:
        """Another question as token ids, formatted like the lane's own prompt."""
        return self.form(text)

    def special(self, token: int) -> bool:
        """Whether a token is a special token, such as one that starts a chat turn."""
        return self.target_model.tokens.is_special(token)

    def piece(self, token: int) -> str:
        """The text that is displayed for a token."""
        return self.target_model.tokens.piece(token)

    def bytes(self, token: int) -> bytes:
        """The bytes a token adds to a text after its start; none for a special token."""
        return self.target_model.tokens.bytes(token)

    def encode(self, text: str) -> list[int]:
        """A text as the target's token ids, with the special tokens that its tokenizer adds."""
        return self.target_model.tokens.encode(text)

    def spell(self, text: str) -> list[int]:
        """A text as the target's token ids; names of special tokens become those tokens."""
        return self.target_model.tokens.spell(text)

    def can_spell(self, text: str) -> bool:
        """Whether the target has tokens for all of a text."""
        return self.target_model.tokens.can_spell(text)

    def text_of(self, tokens: list[int], after: list[int] | None = None) -> str:
        """The text that tokens add to that of the tokens before them, which are the prompt unless given."""
        reader = Reader(self.target_model.tokens, self.tokens[:self.prompt_length] if after is None else after)
        return reader.push(tokens) + reader.flush()

    # --- requests ---

    def stream(self, name: str) -> Stream:
        """The stream of that name. It reads the text at its first request. Raises Refusal for a missing model."""
        if name not in self._streams:
            self._streams[name] = self._open_stream(name)
        return self._streams[name]

    def cache_bytes(self) -> int:
        """Memory of the KV caches of all streams."""
        return sum(stream.store.bytes() for stream in self._streams.values())

    def draft_budget(self, drafter: Drafter) -> int | None:
        """Tokens that a drafter may propose in a row; None if its draft model can read no more, which is noted."""
        most = self.remaining - 1
        if "draft" not in drafter.needs:
            return most
        if self._is_draft_full():
            self.note_once("The context of the draft model is full: the text goes on without drafts, token by token.")
            return None
        # one with another vocabulary counts its own tokens
        return most if "draft" in self.prompts else min(most, self._models["draft"].context - len(self.main.tokens))

    def _is_draft_full(self) -> bool:
        """Whether the draft model can read nothing after the text."""
        if "draft" in self.prompts and "draft" in self._streams:
            return self._streams["draft"].full
        return len(self.prompts.get("draft", self.main.tokens)) >= self._models["draft"].context

    def note_once(self, text: str) -> None:
        """Record a note, the first time it is given."""
        if text not in self._noted:
            self._noted.add(text)
            self.record(Note(text))

    def _open_stream(self, name: str) -> Stream:
        if name in self._models and name != "target" and name in self.prompts:
            return CrossTokenizerStream(name, self._models[name], self, self.prompts[name])
        if name in self._models:
            companions = [self.stream(other) for other in self.assembly.streams()] if name == "target" else []
            stream = Stream(name, self._models[name], self, self.prompts["target"], companions)
            if name == "target":
                stream.cache_manager = self._new_cache_manager(stream)
                stream.computing = self._new_compute_manager()
            return stream
        if name in self.prompts:
            return Stream(name, self.target_model, self, self.prompts[name])
        raise Refusal(f"This strategy needs a {name} model in addition to the target: choose one.", name)

    def _new_cache_manager(self, stream: Stream) -> CacheManager:
        policy, model = self.assembly.cache_policy, self.target_model
        if policy:
            check_policy(policy, stream.store, model)
            if isinstance(policy, ReadsProbes):
                policy.spell = lambda text: self.spell(text)
            if isinstance(policy, ReadsParts):
                policy.begin(model.parts)
        return CacheManager(policy, stream.store, self.prompt_length, self.recorder, model.rotate_back)

    def _new_compute_manager(self) -> ComputeManager | None:
        policy = self.assembly.compute_policy
        if policy is None:
            return None
        weights = fitted.find_all([policy], {"target": self.target_model})  # whatever the draft model is
        return ComputeManager(policy, self.target_model, self.prompt_length, weights.get(policy.name, {}))

    def routing(self, stream: str) -> ExpertRouting | None:
        """Which experts run in a forward of a stream, and which did; None for a model without experts.

        Without a sampler that chooses experts, only those of the target itself are noted.
        """
        model = self._models.get(stream, self.target_model)
        if model is not self.target_model or not model.experts or not (self.routings or stream == "target"):
            return None
        return ExpertRouting(self.routings.get(stream, ()))

    def readings(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """By stream, the model (by id) and the prompt it reads.

        The target is excluded if there is a cache or compute policy, which needs a cache of its own, and if the decoder
        replaces the prompt.
        """
        assembly = self.assembly
        alone = assembly.cache_policy or assembly.compute_policy or assembly.decoder.replaces_prompt
        own = {"target"} if alone else set()
        names = [name for name in {**self._models, **self.prompts} if name not in own | set(self.routings)]
        default = self.prompts["target"]
        return {
            name: (id(self._models.get(name, self.target_model)), tuple(self.prompts.get(name, default)))
            for name in names
        }

    def captures(self, stream: str) -> frozenset[int]:
        """Layers of a stream before which hidden states are captured; the depth means after the last layer."""
        last = [self._models.get(stream, self.target_model).depth] if self.shows_hidden(stream) else []
        return frozenset([*(exit.layer for exit in self.inner if exit.stream == stream), *last])

    def state_layers(self, stream: str) -> tuple[int, ...]:
        """Layers of a stream whose inputs `stream.states` keeps for every committed token; the target's only."""
        depth, parts = self.target_model.depth, self.assembly.strategies() if stream == "target" else []
        return tuple(sorted({layer for part in parts for layer in part.state_layers(depth)}))

    def shows_hidden(self, stream: str) -> bool:
        """Whether the rows of a stream carry the input of its lm_head."""
        return any(stream in part.reads_hidden for part in self.assembly.strategies())

    def exit(self, layer: int) -> Exit:
        """The early exit of the target after `layer` layers."""
        return self.target.exit(min(layer, self.depth))

    def replace_prompt(self, inputs: list[int | torch.Tensor]) -> None:
        """Before the first forward: what the target reads in place of the prompt, at consecutive positions.

        Each is a token id or an input embedding [hidden_size]. The text, which samplers and grammars read, keeps the
        prompt. The decoder has to set `replaces_prompt`, and to refuse cache policies, which refer to the positions of
        the text. Raises RuntimeError if the target has read something.
        """
        self.target.replace_prompt(inputs)

    def prefill(self) -> Request:
        """Request the forward over the prompt; answers with the row after it."""
        return self.target.prefill()

    def reading(self, ids: list[int], name: str = "target") -> list[Request]:
        """Requests that read another text with the model of a stream, from an empty cache that is discarded.

        There is one request for each piece of the text, to be yielded in order; each answers with a `Piece`.
        """
        stream_name = "reading" if name == "target" else f"{name} reading"
        return reading(Stream(stream_name, self.stream(name).model, self, ids), ids, self.shows_hidden(name))

    def extend(self, what: TokenTree | list[Sequence] | None = None) -> Request:
        """Request one forward of the target.

        It answers with Rows for the end of the text and every node of a tree, or for a list of sequences with one Rows
        for the end of each.
        """
        return self.target.grow(what) if isinstance(what, list) else self.target.extend(what)

    def together(self, *requests: Request) -> Request:
        """Serve several independent requests at the same time; answers with a tuple."""
        return Together(*requests)

    def aside(self, request: Request) -> Request:
        """Submit a request to its model's worker thread; answers at once with a request to yield for the result.

        Until then the stream accepts no other request. Only the time spent waiting counts on the lane's clock.
        """
        return Immediate(lambda: AsyncRequest(request))

    def pause(self) -> Request:
        """Let other lanes go first, between two parts of a long computation."""
        return Pause()

    def background(self, work: Callable[[], Any]) -> Request:
        """Run Python work in a thread while other lanes continue; answers with what it returns."""
        return Background(work)

    def classifier(self, name: str) -> Request:
        """Load a sequence-classification model by folder or hub id; answers with a `SequenceClassifier`."""
        return Background(lambda: load_classifier(name.strip(), str(self.target_model.device)))

    def keep(self, what: TokenChoice | Verdict | Sequence | list[TokenChoice]) -> Request:
        """Commit a chosen token, the accepted path of a verdict and the token after it, or the text of a sequence.

        In a list of choices each is committed to its own sequence; the lane's text does not change yet.
        """
        if isinstance(what, list):
            return self._text_change(lambda: self._commit_each(what))
        if isinstance(what, Sequence):
            return self._text_change(lambda: self._adopt(what))
        tokens = (
            [CommittedToken(what.token, what.origin, what.rows, what.node)]
            if isinstance(what, TokenChoice)
            else self._accepted(what)
        )
        return self._text_change(lambda: self._commit_main(self._up_to_stop(tokens)))

    def roll_back(self, count: int) -> Request:
        """Remove the last `count` generated tokens."""
        return self._text_change(lambda: self._roll_back(count))

    def _text_change(self, act: Callable[[], None]) -> Immediate:
        """A request without an answer. Raises RuntimeError if the previous one was never yielded."""
        if self._last_change and not self._last_change.served:
            raise RuntimeError(
                "a change of the text was not yielded: write `yield lm.keep(…)` and `yield lm.roll_back(…)`"
            )
        self._last_change = Immediate(act)
        return self._last_change

    # --- random numbers ---

    def pick(self, rows: Rows, node: int = ROOT, purpose: str = "token") -> TokenChoice:
        """Choose a token after `node`: sampled if a sampler draws, argmax otherwise."""
        if not rows.chain.draws:
            return TokenChoice(rows.best(node), rows, node)
        token = self.draws.pick(rows.distribution(node), purpose, rows.position(node), rows.sequence.lineage)
        return TokenChoice(token, rows, node)

    def choose(self, rows: Rows, token: int, node: int = ROOT, leaf: Sequence | None = None) -> TokenChoice:
        """A token that the strategy chose itself; `leaf` commits it instead of the sequence of the rows."""
        return TokenChoice(token, rows, node, by=leaf)

    def draw(self, p: torch.Tensor, position: int, purpose: str) -> int:
        """Sample a token from a distribution p [V] for a position of the sequence."""
        return self.draws.pick(p, purpose, position)

    def draw_each(
        self, p: torch.Tensor, keys: list[list[tuple[str, int]]]
    ) -> list[list[tuple[int, float | None]]]:
        """Sample tokens [n, k] from distributions p [n, V], for keys (purpose, position).

        A GPU is waited for once, and also says the probability of each token.
        """
        if p.is_cpu:
            return [[(self.draw(row, at, purpose), None) for purpose, at in own] for row, own in zip(p, keys)]
        return self.draws.pick_each(p, keys)

    def draw_remaining(self, remaining: Remaining, position: int, purpose: str) -> int:
        """The same without replacement: a token that was not taken from `remaining` before."""
        return self.draws.take(remaining, purpose, position)

    def flip(self, probability: float, position: int, purpose: str = "accept") -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""
        return self.draws.flip(probability, purpose, position)

    def uniform(self, position: int, purpose: str) -> float:
        """A uniform number in [0, 1), for noise of a strategy. Tests cannot enumerate what depends on it."""
        return self.draws.uniform(purpose, position)

    # --- memory ---

    def memory(self, name: str, make: Callable[[], Any], *about: object) -> Any:
        """A copy of what a strategy learned in earlier runs of the same visitor with this model, or `make()`.

        `about` is everything else it depends on. The object has a method `digest() -> str`, equal for equal contents.
        """
        model = self.target_model
        key = "|".join(map(str, (name, model.name, model.revision, model.quantization, model.dtype, *about)))
        if key not in self._recalled:
            self._recalled[key] = self._memory.recall(key, make)
        return self._recalled[key]

    def remember(self) -> None:
        """At the end of the run: store what was learned, and mark the caches as no longer needed."""
        for key, thing in self._recalled.items():
            self._memory.keep(key, thing)
        for stream in self._streams.values():
            stream.store.done = True

    # --- events ---

    def record(self, event: Event) -> None:
        """Record an event. Pieces and rounds of drafts and verdicts are filled in."""
        if isinstance(event, Draft):
            self._round += 1
            event.round, event.pieces = self._round, self.target_model.tokens.pieces(event.tokens)
        if isinstance(event, Verdict):
            event.round, event.piece = self._round, self.piece(event.token) if event.token >= 0 else ""
        self.events.append(event)

    # --- several sequences ---

    def fork(self, count: int, leaf: Sequence | None = None) -> list[Sequence]:
        """Start `count` sequences at the end of the text, or of a sequence.

        The first sequence of the lane uses the same random numbers as the lane itself.
        """
        parent = leaf or self.main
        if parent is self.main:  # its tokens are committed, whichever sequence generated them
            parent.node, parent.placed = ROOT, len(parent.tokens)
        children = [parent.fork(self._forked + i) for i in range(1, count + 1)]
        self._forked += count
        self.leaves |= {child.number: child for child in children}
        self.record(Branches(born=[(child.number, parent.number) for child in children]))
        return children

    def drop(self, leaves: Iterable[Sequence]) -> None:
        """Discard sequences and free their KV slots."""
        dropped = [leaf.number for leaf in leaves]
        if dropped:
            self.leaves = {number: leaf for number, leaf in self.leaves.items() if number not in dropped}
            self.record(Branches(dropped=dropped))
            self._prune()

    def branch_tree(self, leaves: list[Sequence]) -> TokenTree:
        """The tree of all tokens that live sequences generated since they were forked, with those of `leaves` added."""
        self._prune()
        added: dict[tuple[int, int], int] = {}  # by parent and token: equal new tokens share a node
        for leaf in leaves:
            for token in leaf.tokens[leaf.placed:]:
                edge = (leaf.node, token)
                if edge not in added:
                    added[edge] = self._branches.add(token, leaf.node)
                leaf.node = added[edge]
            leaf.placed = len(leaf.tokens)
        return self._branches

    def _prune(self) -> None:
        """Free the nodes on no path of a sequence that is still growing."""
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

    # --- how the text grows ---

    def begin(self) -> None:
        """Before the first forward: say what is to know about the lane, and commit the tokens that a grammar forces."""
        self.events += map(Note, self.assembly.remarks())
        if self.assembly.constraint:
            self.events += map(Note, self.assembly.constraint.remarks())
        if not self.limits.forced:
            self._commit(self._forced(self.main), self.main)

    def commit_forced(self, rows: Rows) -> None:
        """Commit the tokens of the tree of `rows`, a chain of given tokens."""
        self._commit_main(
            [CommittedToken(token, "forced", rows, node) for node, token in enumerate(rows.tree.tokens, ROOT)]
        )

    def _accepted(self, verdict: Verdict) -> list[CommittedToken]:
        """The accepted path of a verdict and the token after it."""
        rows = self.target.seen
        path = [rows.tree.tokens[node] for node in verdict.kept]
        parents = [ROOT, *verdict.kept]
        drafted = [CommittedToken(token, "draft", rows, parent) for token, parent in zip(path, parents)]
        return drafted + [CommittedToken(verdict.token, verdict.origin, rows, parents[-1])] * (verdict.token >= 0)

    def _commit_main(self, tokens: list[CommittedToken]) -> None:
        if self.leaves:
            raise RuntimeError("parallel sequences are growing: keep one of them before the text continues")
        self._commit(tokens, self.main)
        self._follow("keep")

    def _follow(self, moment: str) -> None:
        drafted = len(self.target.store.parents)
        for stream in self._streams.values():
            stream.follow()
        self.settle(moment, drafted)

    def _up_to_stop(self, tokens: list[CommittedToken]) -> list[CommittedToken]:
        """The tokens up to the first row after which the compute policy ends the text, with the end in its place."""
        policy = self.assembly.compute_policy
        if policy is None or not policy.may_stop:
            return tokens
        for place, (_, _, rows, node) in enumerate(tokens):
            if self._stops(rows, node):
                return [*tokens[:place], CommittedToken(min(self.end_ids), "forced", rows, node)]
        return tokens

    def _stops(self, rows: Rows | None, node: int) -> bool:
        """Whether the compute policy ends the text after a node; never where the model or the grammar has no end."""
        if not self.end_ids or rows is None or rows.stream != "target":
            return False
        if not rows.may_follow(min(self.end_ids), node):
            return False
        return self.target.computing.stops([*rows.committed, *rows.tree.prefix(node)])

    def _commit(self, tokens: list[CommittedToken], sequence: Sequence) -> None:
        """Append tokens to a text until it is complete, then the tokens that the grammar forces after them."""
        start, committed, text = sequence.generated, [], ""
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
        events = [*committed[0].rows.observe_commit(path, sequence)] if path else []
        events += self.recorder.committed(committed, start, text)
        for event in events:
            event.sequence = sequence.number
        commit = events[-1]
        sequence.logprobs += commit.logprobs
        sequence.origins += commit.origins
        self.events += events

    def _forced(self, sequence: Sequence) -> list[CommittedToken]:
        """Tokens without an alternative under the grammar; they need no forward, unless their probability counts."""
        chain = sequence.chain
        forced = chain.matcher.forced() if chain.matcher and chain.forcing else []
        if forced and chain.constraint.narrows_forced:
            forced = self._permitted(forced, sequence)
        return [CommittedToken(token, "forced") for token in forced]

    def _permitted(self, forced: list[int], sequence: Sequence) -> list[int]:
        """Forced tokens up to the first one that the constraint forbids: the next row is then empty, and refused."""
        permits, vocabulary = sequence.chain.constraint.permits, self.target_model.vocabulary
        for place, token in enumerate(forced):
            if not permits(sequence.tokens + forced[:place], token, vocabulary):
                return forced[:place]
        return forced

    # --- caches ---

    @property
    def cache_manager(self) -> CacheManager:
        """Applies the cache policy to the target's cache."""
        return self.target.cache_manager

    def settle(self, moment: str, drafted: int = 0) -> None:
        """After a commit: apply the cache policy to the target's cache and record the result.

        `drafted` is how many slots the draft tokens of the round took.
        """
        self.events += self.cache_manager.settle(moment, self._next_position(), drafted)
        if self.target.computing:
            self.events += self.target.computing.report(self.main, self.piece)

    def _next_position(self) -> int:
        """Position of the next row; the smallest one if several sequences are growing."""
        ends = [len(leaf.tokens) for leaf in self.leaves.values() if not leaf.reason] or [self.target.store.length + 1]
        return min(ends) - 1

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
        learners = [sampler for sampler in self.chain.samplers if not sampler.row_wise]
        return ([self.assembly.cache_policy] if self.assembly.cache_policy else []) + learners
