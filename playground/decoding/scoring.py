"""Scores a given text: the model's distribution before each of its tokens.

The text is read in a few forwards and every token is committed as a forced one, so that events, traces and charts are
those of any lane. The first token serves as the prompt. With a draft model of the same vocabulary both models score it.

    for stamped in score(models, Prompt("The red fox listens.")): ...
"""
from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from playground.contract import Decoder, make
from playground.contract.assembly import Assembly
from playground.contract.lane import Lane as LaneInterface
from playground.contract.lane_config import add_toggle
from playground.contract.token_tree import chain
from playground.decoding.canvas import check_fit
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Refused, Runner
from playground.decoding.limits import Limits
from playground.decoding.models import AnyModel, Models, continuing
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.requests import Request
from playground.decoding.rows import Rows
from playground.decoding.sequence import Bounds
from playground.decoding.session import Session, header_of
from playground.decoding.stream import chunk_of
from playground.errors import Refusal
from playground.events import Header

SCORE = "score"  # `strategy` in the header
PIECE = 128  # tokens per forward, whose logits over the whole vocabulary are in memory at once


class AsWritten(Decoder):
    """Commits the tokens of a given text."""

    text: tuple[int, ...] = ()

    def decode(self, lm: LaneInterface) -> Generator[Request, Rows, None]:
        if not isinstance(lm, Lane):
            raise TypeError("given tokens are committed by a lane of the playground")
        yield lm.prefill()
        piece = min(PIECE, chunk_of(lm.target.model))
        for start in range(0, len(self.text), piece):
            rows = yield lm.extend(chain(list(self.text[start:start + piece]), SCORE))
            lm.commit_forced(rows)


def score(models: Models, prompt: Prompt, recorder: type[Recorder] = Recorder) -> Session:
    """A session with one lane for each model, first the target, then the draft. Raises Refusal for a single token."""
    ids = prompt.encode(models.target)
    if len(ids) < 2:
        raise Refusal("This text is a single token without a context to score it in: write at least two.", "prompt")
    scorers = [models.target, *([models.draft] if models.draft and not models.differences else [])]
    headers = [_header(lane, model, prompt, ids) for lane, model in enumerate(scorers)]
    return Session(headers, [_runner(model, ids, recorder) for model in scorers])


def _header(lane: int, model: AnyModel, prompt: Prompt, ids: list[int]) -> Header:
    blank = header_of(Models(model), prompt, ids[:1], Limits(max_new_tokens=len(ids) - 1))
    return replace(
        blank, lane=lane, remarks=prompt.remarks(model, ids), strategy=SCORE,
        title=f"As {model.name.rpartition('/')[2]} reads it", forced=ids[1:]
    )


def _runner(model: AnyModel, ids: list[int], recorder: type[Recorder]) -> Runner | Refused:
    """The lane of one model. End tokens in the text do not end it, since a chat has several.

    Temperature 1 makes the recorded final probabilities those of sampling.
    """
    decoder = AsWritten(text=tuple(ids[1:]))
    try:
        check_fit(decoder, model)
        if len(ids) > model.context:
            raise Refusal(
                f"The text has {len(ids)} tokens, but {model.name} reads at most {model.context}: shorten it.", "prompt"
            )
        assembly = Assembly(decoder)
        add_toggle(assembly, make("temperature", t=1.0))
        lane = Lane(ids[:1], {"target": continuing(model)}, assembly, Limits(), recorder(model.tokens))
    except Refusal as refusal:
        return Refused(str(refusal))
    lane.main.bounds = Bounds(len(ids), frozenset())
    return Runner(lane, lane.assembly)
