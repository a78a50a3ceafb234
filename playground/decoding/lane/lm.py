"""The lane: one strategy's run over one text. Strategies receive it as `lm` and use nothing else."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from playground.contract.assembly import Assembly
from playground.contract.token_tree import TokenTree
from playground.decoding.async_forward import AsyncRequest
from playground.decoding.forward_times import forward_times
from playground.decoding.lane.commits import Commits
from playground.decoding.lane.handed_back import all_handed_back, handed_back
from playground.decoding.lane.running_text import ModelsByStream
from playground.decoding.lane.streams import FittedWeights
from playground.decoding.limits import Limits
from playground.decoding.recorder import CommittedToken, Recorder
from playground.decoding.requests import Background, Immediate, Pause, Request, Together
from playground.decoding.rows import TokenChoice
from playground.decoding.sequence import Sequence
from playground.decoding.stream import Stream, reading
from playground.decoding.visitor_memory import Memory
from playground.engine.sequence_classifier import load_classifier
from playground.events import Verdict

if TYPE_CHECKING:
    from playground.contract.interfaces import ChoiceInterface, RequestInterface, SequenceInterface


class Lane(Commits):
    """One strategy's run over one text: what it may request. `contract.lane` describes the members."""

    def __init__(
        self,
        prompt: list[int],
        models: ModelsByStream,
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
        prompts: dict[str, list[int]] | None = None,
        memory: Memory | None = None,
        heads: FittedWeights | None = None,
    ):
        """As `ModelStreams`. Raises Refusal, too, if the constraint or the cache policy cannot work."""
        super().__init__(prompt, models, assembly, limits, recorder, prompts, memory, heads)
        self._last_change: Immediate | None = None  # the last request that changes the text
        self._start(prompt)
        # now, so that an unsupported combination raises Refusal before the run
        if assembly.cache_policy or assembly.compute_policy:
            self.stream("target")

    def prefill(self) -> Request:
        return self.target.prefill()

    def replace_prompt(self, inputs: list[int | torch.Tensor]) -> None:
        self.target.replace_prompt(inputs)

    def read_as(self, embedding: torch.Tensor) -> None:
        self.target.read_as(embedding)

    def reading(self, ids: list[int], name: str = "target") -> list[Request]:
        stream_name = "reading" if name == "target" else f"{name} reading"
        return reading(Stream(stream_name, self.stream(name).model, self, ids), ids, self.shows_hidden(name))

    def extend(self, what: TokenTree | Iterable[SequenceInterface] | None = None) -> Request:
        if what is None or isinstance(what, TokenTree):
            return self.target.extend(what)
        return self.target.grow(all_handed_back(what, Sequence))

    def keep(self, what: ChoiceInterface | Verdict | SequenceInterface | Iterable[ChoiceInterface]) -> Request:
        if isinstance(what, TokenChoice):
            return self._keep_tokens([CommittedToken(what.token, what.origin, what.rows, what.node)])
        if isinstance(what, Verdict):
            return self._keep_tokens(self._accepted(what))
        if isinstance(what, list | tuple):
            choices = all_handed_back(what, TokenChoice)
            return self._text_change(lambda: self._commit_each(choices))
        leaf = handed_back(what, Sequence)
        return self._text_change(lambda: self._adopt(leaf))

    def _keep_tokens(self, tokens: list[CommittedToken]) -> Request:
        return self._text_change(lambda: self._commit_main(self._up_to_stop(tokens)))

    def roll_back(self, count: int) -> Request:
        return self._text_change(lambda: self._roll_back(count))

    def _text_change(self, act: Callable[[], None]) -> Immediate:
        """A request without an answer. Raises RuntimeError if the previous one was never yielded."""
        if self._last_change and not self._last_change.served:
            raise RuntimeError(
                "a change of the text was not yielded: write `yield lm.keep(…)` and `yield lm.roll_back(…)`"
            )
        self._last_change = Immediate(act)
        return self._last_change

    def together(self, *requests: RequestInterface) -> Request:
        return Together(*all_handed_back(requests, Request))

    def aside(self, request: RequestInterface) -> Request:
        own = handed_back(request, Request)
        return Immediate(lambda: AsyncRequest(own))

    def pause(self) -> Request:
        return Pause()

    def background(self, work: Callable[[], Any]) -> Request:
        return Background(work)

    def forward_times(self, stream: str = "target") -> Request:
        model = self.stream(stream).model
        return Background(lambda: forward_times(model))

    def classifier(self, name: str) -> Request:
        return Background(lambda: load_classifier(name.strip(), str(self.target_model.device)))
