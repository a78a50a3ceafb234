"""A text nobody is asked to write: what a model thinks before each of its tokens.

The text goes through in a few forwards and every token is committed as a forced one, so that events, trace and pictures
are those of any lane. Nothing stands before the first token; it takes the place of the prompt. With a draft model both
read, if their tokens are the same.

    for stamped in score(models, Prompt("The red fox listens.")): ...
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from playground.contract import Decoder, make
from playground.contract.lane_config import Assembly
from playground.contract.token_tree import chain
from playground.decoding.canvas import check_fit
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.sequence import Bounds
from playground.decoding.session import Models, Prompt, Refused, Runner, Session, header_of
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Header

SCORE = "score"  # stands in the header where other lanes name their strategy
PIECE = 128  # tokens whose rows over the whole vocabulary are held at once


class AsWritten(Decoder):
    """Commits the tokens of a given text."""

    text: tuple[int, ...] = ()

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        for start in range(0, len(self.text), PIECE):
            rows = yield lm.extend(chain(list(self.text[start:start + PIECE]), SCORE))
            lm.keep_given(rows)


def score(models: Models, prompt: Prompt, recorder: type[Recorder] = Recorder) -> Session:
    """A session whose lanes read the prompt, first the target, then the draft. Raises Refusal for a text of less than
    two tokens.
    """
    ids = prompt.encode(models.target)
    if len(ids) < 2:
        raise Refusal(
            "This text is a single token, and nothing stands before it to judge it by: write at least two.", "prompt"
        )
    readers = [models.target, *([models.draft] if models.draft and not models.differences else [])]
    headers = [_header(lane, model, prompt, ids) for lane, model in enumerate(readers)]
    return Session(headers, [_runner(model, ids, recorder) for model in readers])


def _header(lane: int, model: Model, prompt: Prompt, ids: list[int]) -> Header:
    blank = header_of(Models(model), prompt, ids[:1], Limits(max_new_tokens=len(ids) - 1))
    return replace(
        blank, lane=lane, strategy=SCORE, title=f"As {model.name.rpartition('/')[2]} reads it", forced=ids[1:]
    )


def _runner(model: Model, ids: list[int], recorder: type[Recorder]) -> Runner | Refused:
    """The text's own end tokens do not end it: a chat has several. Temperature 1 tells what sampling would draw with.
    """
    decoder = AsWritten(text=tuple(ids[1:]))
    try:
        check_fit(decoder, model)
        if len(ids) > model.context:
            raise Refusal(
                f"The text has {len(ids)} tokens, but {model.name} reads {model.context} at most: shorten it.", "prompt"
            )
        lane = Lane(
            ids[:1],
            {"target": model},
            Assembly(decoder, [make("temperature", t=1.0)]),
            Limits(),
            recorder(model.tokens),
        )
    except Refusal as refusal:
        return Refused(str(refusal))
    lane.main.bounds = Bounds(len(ids), frozenset())
    return Runner(lane, lane.assembly)
