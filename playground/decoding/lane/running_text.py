"""The text of a lane, its tokens, and the events that tell of it."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from playground.contract.assembly import Assembly
from playground.contract.lane import LaneText
from playground.decoding.checked_text import CheckedText
from playground.decoding.lane.random_numbers import RandomNumbers
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.sampler_chain import Chain
from playground.decoding.sequence import Bounds, Sequence
from playground.engine.model import Model
from playground.engine.text.token_bytes import Reader
from playground.errors import Refusal
from playground.events import Draft, Event, Note, Reason, Verdict
from playground.grammar.matcher import Matcher

ModelsByStream = dict[str, Model]
"""By stream: "target" and, if there is one, "draft"."""


class RunningText(RandomNumbers, LaneText):
    """One text with its limits, samplers and grammar, and the events that are not delivered yet."""

    main: Sequence  # the lane's own text; `_start` makes it

    def __init__(
        self,
        prompts: dict[str, list[int]],
        models: ModelsByStream,
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
    ):
        """`prompts` are those of the target and of streams that read another one. Raises Refusal if one is too long."""
        super().__init__(limits.seed)
        self.limits, self.recorder, self.assembly = limits, recorder, assembly
        self.target_model, self._models = models["target"], models
        self.loaded_model = self.target_model  # the same with its loaded weights, if the lane has others
        self.end_ids, self.stop_strings = self.target_model.end_ids, limits.stop
        self.prompts, self.prompt_length = prompts, len(prompts["target"])
        self._set_sizes()
        self.form: Callable[[str], list[int]] = self.encode  # formats and encodes a question as the prompt was
        self.question = self.passage = ""
        self.events: list[Event] = []  # not yet delivered
        self._round = -1
        self._noted: set[str] = set()

    def _start(self, prompt: list[int]) -> None:
        """Begin the text and what follows it. Raises Refusal for a grammar that cannot be used with this model."""
        self.main = self._new_sequence(prompt)
        for sampler in self.assembly.samplers:
            # a lambda, because deepcopy of a bound method would copy the lane when sequences fork
            sampler.begin(len(prompt), lambda token: self.piece(token), self.end_ids)

    def _set_sizes(self) -> None:
        """Set vocabulary and context length. Raises Refusal if the prompt is too long."""
        prompts, models = self.prompts, self._models
        same_tokens = [model for name, model in models.items() if name == "target" or name not in prompts]
        self.vocabulary = min(model.vocabulary for model in same_tokens)  # embeddings may be padded to different sizes
        longest = max(len(ids) for name, ids in prompts.items() if name == "target" or name not in models)
        beside = f", and the longest prompt of this lane has {longest:,}" if longest > self.prompt_length else ""
        most, self._limiting = min(_context_limits(models, self.assembly, beside), key=lambda limit: limit[0])
        self.context = most - longest + self.prompt_length
        if self.prompt_length >= self.context:
            raise Refusal(f"The prompt has {longest:,} tokens, but {self._limiting}: shorten it.", "prompt")

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
        return constraint.matcher(self.target_model.grammars.compile(*constraint.grammar()))

    # --- what was committed ---

    @property
    def tokens(self) -> list[int]:
        return self.main.tokens

    @property
    def text(self) -> str:
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
        return len(self.main.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        return self.main.remaining

    @property
    def limit(self) -> str:
        """What ended the text at a length below the one that was asked for; empty if nothing did."""
        if self.reason != "length" or self.generated >= self.limits.max_new_tokens:
            return ""
        return f"The text ends at {len(self.tokens):,} tokens, prompt included: {self._limiting}."

    # --- texts as tokens of the target ---

    @property
    def padding(self) -> int:
        own = self.target_model.tokens.padding
        return own if own is not None else min(self.end_ids, default=0)

    def ends(self, token: int) -> bool:
        return token in self.end_ids

    def special(self, token: int) -> bool:
        return self.target_model.tokens.is_special(token)

    def piece(self, token: int) -> str:
        return self.target_model.tokens.piece(token)

    def bytes(self, token: int) -> bytes:
        return self.target_model.tokens.bytes(token)

    def ask(self, text: str) -> list[int]:
        return self.form(text)

    def encode(self, text: str) -> list[int]:
        return self.target_model.tokens.encode(text)

    def spell(self, text: str) -> list[int]:
        return self.target_model.tokens.spell(text)

    def can_spell(self, text: str) -> bool:
        return self.target_model.tokens.can_spell(text)

    def text_of(self, tokens: list[int], after: list[int] | None = None) -> str:
        reader = Reader(self.target_model.tokens, self.tokens[:self.prompt_length] if after is None else after)
        return reader.push(tokens) + reader.flush()

    # --- events ---

    def record(self, event: Event) -> None:
        if isinstance(event, Draft):
            self._round += 1
            event.round, event.pieces = self._round, self.target_model.tokens.pieces(event.tokens)
        if isinstance(event, Verdict):
            event.round, event.piece = self._round, self.piece(event.token) if event.token >= 0 else ""
        self.events.append(event)

    def note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.record(Note(text))


def _context_limits(models: ModelsByStream, assembly: Assembly, beside: str) -> Iterator[tuple[int, str]]:
    """Tokens that each model which the lane cannot do without can read, and the model and the number in words.

    `beside` follows the target's.
    """
    target, draft = models["target"], models.get("draft")
    stated = "" if getattr(target, "context_stated", True) else " here, since its config names no context"
    yield target.context, f"{target.name} reads at most {target.context:,}{stated}{beside}"
    needing = [part for part in assembly.strategies() if "draft" in part.needs and not part.drafts_at_will]
    if draft and needing:
        needs = f"the draft model {draft.name}, which {needing[0].title} needs for every token"
        yield draft.context, f"{needs}, reads at most {draft.context:,}"
