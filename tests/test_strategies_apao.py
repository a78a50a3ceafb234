"""Where beam search dropped the right prefix, against a beam search in plain Python, and APAO's weights by hand."""
from __future__ import annotations

from collections import deque

import pytest
from tables import TableModel

from playground.contract import find, overlay
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding import session as sessions
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.errors import Refusal
from playground.events import Figure, Note
from support.overlay_runs import named

Apao = find("apao")
LETTERS, PROMPT, LENGTH, BEAMS = "abcd", "abca", 5, 2


def model(seed: int) -> TableModel:
    return TableModel(LETTERS, seed=seed)


def logp(table: TableModel, text: tuple[int, ...]):
    return table.scores(text).log_softmax(0).tolist()


def beams_by_hand(table: TableModel, prompt: tuple[int, ...]) -> list[list[tuple[float, tuple[int, ...]]]]:
    """The beams after each step, best first: every continuation of every beam, the best two survive."""
    steps, live = [], [(0.0, ())]
    for _ in range(LENGTH):
        grown = [(total + p, (*text, token)) for total, text in live for token, p in enumerate(
            logp(table, prompt + text))]
        live = sorted(grown, reverse=True)[:BEAMS]
        steps.append(live)
    return steps


def drawn(cls: type[Apao], seed: int, answer: str) -> list:
    """What the overlay draws in a lane of beam search over a table."""
    config = LaneConfig("beam_search", {"beams": BEAMS}, [("apao", {"answer": answer})])
    found = sessions.prepare(Models(model(seed), model(seed)), [config], Prompt(PROMPT), Limits(0, LENGTH))
    made = cls(answer=answer)
    runner = found._runners[0]
    runner.lane.assembly.overlays[:] = [made]  # in place of the registered one
    runner._watching = [made]
    deque(found, maxlen=0)
    return [stamped.event for stamped in found.trace.events]


def check(cls: type[Apao]) -> None:
    prompt, verdicts = tuple(map(LETTERS.index, PROMPT)), set()
    for seed in range(8):
        table, answer = model(seed), "badcb"
        right, steps = tuple(map(LETTERS.index, answer)), beams_by_hand(model(seed), prompt)
        losses = [-logp(table, prompt + right[:place])[token] for place, token in enumerate(right)]
        gone = next((depth for depth in range(1, LENGTH + 1)
                     if right[:depth] not in [text for _, text in steps[depth - 1]]), 0)
        events = drawn(cls, seed, answer)
        spans = next(event.data["spans"] for event in events if isinstance(event, Figure) and event.data.get("shades"))
        assert [value == 1 for *_, value in spans] == [bool(gone) and depth >= gone for depth in range(1, LENGTH + 1)]
        assert named(events, "loss of each token")["values"] == pytest.approx(losses, abs=1e-4)
        if gone:
            below = min(total for total, _ in steps[gone - 1]) + sum(losses[:gone])
            assert spans[gone - 1][2].endswith(f"{below:.2f} nats below the last of the beams")
        best = max(total for total, _ in steps[-1])
        kind = "search error" if -sum(losses) > best else "model error"
        kind = "it is the text" if steps[-1][0][1] == right else kind
        (note,) = [event.text for event in events if isinstance(event, Note) and event.text.startswith("Beam search")]
        assert kind in note
        verdicts.add((kind, gone))
    assert len({gone for _, gone in verdicts}) > 2, "the answer is dropped at the same place everywhere"


class OneTokenLate(Apao):
    """Wrong: the right prefix begins with the last token of the prompt."""

    def begin(self, text, model):
        super().begin(text, model)
        self._right = text.tokens[text.start - 1:-1]


class AmongAllThatWereEver(Apao):
    """Wrong: a prefix counts as alive if it ever was."""

    def watch(self, event):
        super().watch(event)
        if len(self._steps) > 1 and event.kind == "branches":
            self._steps[-1] = self._steps[-1]._replace(texts=[*self._steps[-1].texts, *(
                [*text, token] for text in self._steps[-2].texts for token in range(len(LETTERS)))])


@pytest.mark.oracle("apao")
def test_it_finds_where_a_plain_beam_search_drops_the_answer():
    check(Apao)


@pytest.mark.refuses("apao")
@pytest.mark.parametrize("wrong", [OneTokenLate, AmongAllThatWereEver])
def test_a_shifted_prefix_and_dropped_beams_fail(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.strategy("apao")
def test_the_weights_are_the_releases_at_eta_0():
    from strategies.overlays.apao import prefix_weights
    assert prefix_weights([1.0, 5.0]) == pytest.approx([0.25, 0.75])  # mean losses of 1 and 3
    assert prefix_weights([2.0] * 4) == pytest.approx([0.25] * 4) and prefix_weights([0.0, 0.0]) == [0.5, 0.5]


@pytest.mark.strategy("apao")
def test_another_decoder_and_no_answer_are_refused():
    assert issubclass(Apao, overlay.WatchesBeams)
    with pytest.raises(Refusal, match="watches Beam search, and this lane's decoder is Greedy"):
        assemble(LaneConfig("greedy", {}, [("apao", {})]))
    with pytest.raises(Refusal, match="no right answer"):
        assemble(LaneConfig("beam_search", {}, [("apao", {"answer": ""})]))
