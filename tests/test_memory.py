"""Memory of strategies between a visitor's runs: by name, for that visitor alone, as a copy."""
from __future__ import annotations

from collections import deque

import pytest
import torch
from tables import TableModel

from playground.contract import Decoder
from playground.contract.assembly import Assembly
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal


class Words:
    """A minimal memory entry."""

    def __init__(self, *words: str):
        self.words = list(words)

    def digest(self) -> str:
        return " ".join(self.words)


def holding(**things: Words) -> Memory:
    memory = Memory()
    for name, thing in things.items():
        memory.keep(name, thing)
    return memory


# --- the memory itself ---

def test_missing_entries_are_created():
    assert Memory().recall("a", lambda: Words("fresh")).words == ["fresh"]


def test_entries_are_found_under_their_name_only():
    memory = holding(a=Words("kept"))
    assert memory.recall("a", Words).words == ["kept"] and memory.recall("b", Words).words == []


def test_entries_are_returned_as_copies():
    memory = holding(a=Words("kept"))
    memory.recall("a", Words).words.append("changed")
    assert memory.recall("a", Words).words == ["kept"]


def test_changes_to_a_copy_are_not_stored():
    memory = Memory()
    memory.recall("a", Words)
    assert len(memory) == 0


def test_an_empty_memory_has_no_digest_and_a_cleared_one_is_empty():
    memory = holding(a=Words("kept"))
    assert Memory().digest() == "" != memory.digest()
    memory.clear()
    assert (memory.digest(), len(memory), memory.recall("a", Words).words) == ("", 0, [])


def test_the_digest_depends_on_contents_and_names_but_not_on_their_order():
    memory = holding(a=Words("x"), b=Words("y"))
    assert memory.digest() == holding(b=Words("y"), a=Words("x")).digest()
    others = [
        holding(a=Words("x")),
        holding(a=Words("x"), c=Words("y")),
        holding(a=Words("y"), b=Words("x")),
        holding(a=Words("x"), b=Words("y", "z")),
    ]
    assert memory.digest() not in [other.digest() for other in others]


# --- in a lane ---

class Learns(Decoder):
    """Writes two tokens and records each with its earlier memory."""

    remembers = True

    def __init__(self, *about: object, fails: bool = False):
        self.about, self.fails = about, fails

    def decode(self, lm):
        rows = yield lm.prefill()
        known = lm.memory("learns", Words, *self.about)
        assert lm.memory("learns", Words, *self.about) is known
        while True:
            choice = lm.pick(rows)
            known.words.append(lm.piece(choice.token))
            if self.fails:
                raise Refusal("This is where it fails.")
            yield lm.keep(choice)
            rows = yield lm.extend()


def runner(decoder: Decoder, memory: Memory | None, model: TableModel | None = None) -> Runner:
    model, assembly = model or TableModel(), Assembly(decoder)
    return Runner(
        Lane([0, 1], {"target": model}, assembly, Limits(max_new_tokens=2), Silent(model.tokens), memory=memory),
        assembly,
    )


def finish(*runners: Runner) -> None:
    """In turns, like lanes side by side."""
    waiting = deque(runners)
    while waiting:
        one = waiting.popleft()
        one.advance()
        waiting.extend([] if one.finished else [one])


def learned(memory: Memory) -> list[int]:
    """The number of words of each memory entry."""
    return sorted(len(thing.words) for thing in memory._things.values())


def test_an_empty_memory_is_filled_and_a_filled_one_is_continued():
    memory = Memory()
    finish(runner(Learns(), memory))
    assert learned(memory) == [2]
    finish(runner(Learns(), memory))
    assert learned(memory) == [4]


def test_without_a_visitor_every_run_is_the_first():
    for _ in range(2):
        one = runner(Learns(), None)
        finish(one)
        assert [len(thing.words) for thing in one.lane._recalled.values()] == [2]


def test_the_memory_is_untouched_until_the_lane_ends():
    memory = holding()
    one = runner(Learns(), memory)
    one.advance()
    one.advance()
    assert not one.finished and len(memory) == 0
    one.stop()
    assert learned(memory) == [1]


def test_what_was_learned_before_a_failure_is_kept():
    memory = Memory()
    finish(runner(Learns(fails=True), memory))
    assert learned(memory) == [1]


def test_lanes_side_by_side_do_not_see_each_other_learn():
    memory = Memory()
    finish(*[runner(Learns(), memory) for _ in range(3)])
    assert learned(memory) == [2]


@pytest.mark.parametrize(
    "other", [{"name": "another"}, {"revision": "2"}, {"quantization": "int8"}, {"dtype": torch.float32}], ids=str
)
def test_entries_are_not_shared_between_models(other):
    memory, model = Memory(), TableModel()
    for name, value in other.items():
        setattr(model, name, value)
    finish(runner(Learns(), memory))
    finish(runner(Learns(), memory, model))
    assert learned(memory) == [2, 2]


def test_entries_are_distinguished_by_their_subject():
    memory = Memory()
    for about in (["a"], ["b"], ["a", "b"], []):
        finish(runner(Learns(*about), memory))
    assert learned(memory) == [2] * 4
