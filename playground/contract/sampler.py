"""Samplers and logits processors: which token, given the logits?"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from playground.contract.base import Strategy

if TYPE_CHECKING:
    import torch

    from playground.contract.early_exit import EarlyExit
    from playground.contract.lane import Lane
    from playground.events import Event

STAGES = ("mix", "penalty", "temperature", "truncation")


def no_chance(probability: float, history: Sequence[int], purpose: str) -> bool:
    """What `Sampler.flip` calls outside a lane."""
    raise RuntimeError("a sampler flips within a lane; a test of it alone sets `sampler.chance` to a function")


class Consultation(NamedTuple):
    """Work in the background, and what ends it early if the lane is stopped."""

    work: Callable[[], None]
    cancel: Callable[[], None]


class Sampler(Strategy):
    """Reshapes the scores a token is chosen from. The samplers of a lane act in the order of STAGES, then of `rank`.

    Samplers of the stage "mix" implement `mix`, all others `apply`. One that learns from committed tokens, or shows
    something, implements `observe`: its state changes only there, so rejected draft tokens leave no trace. What is to
    be shown about the history goes into `explain`.
    """

    kind = "sampler"
    stage: ClassVar[str] = "truncation"
    rank: ClassVar[int] = 50  # order within the stage; below 50: samplers whose order the transformers library fixes
    draws: ClassVar[bool] = True  # False if it only reshapes scores and leaves the choice to argmax
    reads_text: ClassVar[bool] = True  # False if `apply` never reads the tokens before a row
    row_wise: ClassVar[bool] = True  # False if scores depend on how earlier tokens were chosen
    streams: ClassVar[tuple[str, ...]] = ()  # others it reads: "without_context", of `instructions` or `unprompted`
    if TYPE_CHECKING:  # set by the lane, or a test; without annotations at run time, which would make them knobs
        start: int = field(init=False)  # length of the prompt in tokens, once the lane has begun
        piece: Callable[[int], str] = field(init=False)  # the text of a token
        end_ids: frozenset[int] = field(init=False)  # tokens that end the text
        chance: Callable[[float, Sequence[int], str], bool] = field(init=False)
    else:
        start, piece, end_ids, chance = 0, str, frozenset(), staticmethod(no_chance)

    def begin(self, start: int, piece: Callable[[int], str], end_ids: frozenset[int] = frozenset()) -> None:
        """Receive, before the first row, the prompt length in tokens, a function from token id to text, and the tokens
        that end the text.
        """
        self.start, self.piece, self.end_ids = start, piece, end_ids

    def take_back(self, prompt: list[int], model: Any) -> int:
        """How many tokens at the end of a prompt without chat template the lane does not read, because the sampler has
        their text written again. Called before the run, with the target, an `engine.model.Model`.
        """
        return 0

    def flip(self, probability: float, history: Sequence[int], purpose: str = "") -> bool:
        """True with this probability: the sampler's own chance for the row after `history`, prompt included.

        The result is the same for one history and purpose: in draft and target rows, in every forward, with the same
        seed. A sampler that flips several times for a row gives each flip a purpose. Tests enumerate both results.
        """
        return self.chance(probability, history, purpose)

    def instructions(self) -> dict[str, str]:
        """Extra streams of the target over the same prompt with an instruction prepended, by name of the stream."""
        return {}

    def routings(self) -> dict[str, tuple[int, ...]]:
        """Ranks of the experts that run in a mixture of experts, 1 for the best of each layer, by stream.

        A stream named here reads the same prompt; "target" may be among them.
        """
        return {}

    @property
    def unprompted(self) -> tuple[str, ...]:
        """Streams among `streams` that read the last token of the prompt alone, as if there were no prompt."""
        return ()

    def prepare(self, lm: Lane) -> Iterator:
        """Yield events and requests before the prompt is read, such as those of `lm.reading`."""
        yield from ()

    def consult(self, histories: Sequence[list[int]]) -> Consultation | None:
        """What has to be found out before `apply` for rows after these texts; None if nothing has.

        It runs in a thread of its own, so it changes nothing but what it finds; the lane waits and others go on. Rows
        that a drafter computes itself (`lm.own_rows`) are not announced.
        """
        return None

    def apply(self, scores: torch.Tensor, histories: Sequence[list[int]]) -> torch.Tensor:
        """New scores [n, V]; -inf removes a token. `histories[i]` are the tokens before row i, prompt included."""
        raise NotImplementedError

    def mix(self, rows: dict[str | EarlyExit, torch.Tensor]) -> torch.Tensor:
        """Scores [n, V] from the logits [n, V] of "target", of each of `streams` and of each early exit in `inner`.

        If it needs hidden states, rows["hidden"] is the input of the target's lm_head, [n, hidden_size].
        """
        raise NotImplementedError

    def observe(self, rows: dict[str | EarlyExit, torch.Tensor], token: int, position: int) -> Iterator[Event]:
        """Learn that `token` was committed at `position`, 0 for the first generated one, and yield what to show.

        `rows` are the scores [V] this sampler received there, by stream; a mixing sampler gets all of its streams.
        """
        yield from ()

    def explain(self, scores: torch.Tensor, history: list[int], token: int) -> Iterator[Event]:
        """Yield what to show about a committed token; `scores` [V] are what this sampler received there.

        `history` are the tokens before it, prompt included.
        """
        yield from ()

    @property
    def consults(self) -> bool:
        """Whether `consult` is implemented."""
        return type(self).consult is not Sampler.consult

    @property
    def observes(self) -> bool:
        """Whether `observe` is implemented."""
        return type(self).observe is not Sampler.observe

    @property
    def explains(self) -> bool:
        """Whether `explain` is implemented."""
        return type(self).explain is not Sampler.explain
