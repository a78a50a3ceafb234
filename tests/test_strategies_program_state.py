"""The program-state probe: against Python, a regression of numpy and the states of the library."""
from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from pairs import network, pair

from playground.algorithms.overlays.linear_probe import PENALTY, LinearProbe, accuracy
from playground.algorithms.programs import interpreter, program_states
from playground.algorithms.programs.program_states import EXAMPLES, program_in
from playground.contract import find
from playground.errors import Refusal
from playground.questions.world.show import items
from playground.training.calibration import CalibrationTexts
from support.overlay_runs import named, read_by, shades

ProgramState = find("program_state")
CLASSES = [3, 18, 4, 6, 2]
CODE = (
    "def one(x):\n    return x if x > 9 else 0\n\n"
    "def work(items):\n"
    "    if not items:\n        return 0\n"
    "    items = [one(x) for x in items]\n"
    "    total, sums = 0, []\n"
    "    for x in items:\n        total += x\n        sums.append(total)\n"
    "    items = sums\n"
    "    for i, x in enumerate(items):\n        if x < 20:\n            items[i] = 2 * x\n"
    "    return sum(items)\n"
)
STATES = [[12, 0, 30, 0, 0, 18], [12, 12, 42, 42, 42, 60], [24, 24, 42, 42, 42, 60]]
SHORT = "def f(items):\n    items = items[1:]\n    items = [x + 1 for x in items]\n    items = items[::-1]\n"
SHORT_STATES = [[5, 30, 7, 7, 18], [6, 31, 8, 8, 19], [19, 8, 8, 31, 6]]


def by_python(code: str, ends: list[int], argument: str) -> list:
    """What Python says the argument is where the program is cut after each step."""
    found = []
    for end in ends:
        names: dict = {}
        exec(f"{code[:end]}\n    return {argument}", names)
        function = [value for name, value in names.items() if not name.startswith("__")][-1]
        found.append(function(EXAMPLES[argument][:]))
    return found


def values_of_many(program) -> list | None:
    return program.values()


def one_step_early(program) -> list | None:
    """Wrong: the values before each step."""
    return [EXAMPLES[program.argument], *program.values()[:-1]]


def under_the_changed_meaning(program) -> list | None:
    """Wrong: another meaning of the symbols."""
    return program.changed_values()


def check_values(values) -> None:
    read = 0
    for item in items("programs", 150, seed=3):
        program = program_in(item.answer)
        if program and program.steps:
            ends = [end for _, end in program.steps]
            assert values(program) == by_python(item.answer, ends, program.argument), item.answer
            read += 1
    assert read > 100


@pytest.mark.oracle("program_state")
def test_values_after_each_step_are_those_of_python():
    check_values(values_of_many)
    program = program_in(CODE)
    assert program.values() == STATES and by_python(CODE, [end for _, end in program.steps], "items") == STATES


@pytest.mark.refuses("program_state")
@pytest.mark.parametrize("wrong", [one_step_early, under_the_changed_meaning])
def test_the_state_before_a_step_and_another_meaning_fail(wrong):
    with pytest.raises(AssertionError):
        check_values(wrong)


@pytest.mark.strategy("program_state")
@pytest.mark.parametrize("step, changed", [
    ("items = [x for x in items if x > 10]", [5, 7, 7]),
    ("items = [x + 1 for x in items]", [11, 4, 29, 6, 6, 17]),
    ("items = items[:2]", [30, 7, 7, 18]),
    ("items = [min(x, 10) for x in items]", [12, 10, 30, 10, 10, 18]),
    ("items = items + [3]", [12, 5, 30, 7, 7, 18, 3]),
])
def test_a_changed_meaning_is_that_of_the_documented_symbols(step, changed):
    program = program_in(f"def work(items):\n    {step}\n    return items\n")
    assert program.changed_values() == [changed]


@pytest.mark.strategy("program_state")
@pytest.mark.parametrize("step", [
    "items = items.__class__", "items = open('x')", "items = [10 ** 9 ** 9]", "items = ['a' * 10 ** 9]",
    "items = [[[items]]]", "items = [items, items]", "items.append(items)\n    items = items",
    "while 1 < 2:\n        items = items", "items = [one(one(x)) for x in items]", "import os\n    items = [1]",
    "items = ''.join(['ab'] * 3)", "items = 'aaaa'.replace('a', items)", "items = None", "items = items[99]",
    "items = [x for x in range(10 ** 9)]", "items = [str(x) for x in [list(range(9999)) for y in range(9999)]]",
])
def test_what_is_not_interpreted_is_unknown_at_once(step):
    program = program_in(f"def work(items):\n    {step}\n    return items\n")
    assert program.values() is None


@pytest.mark.strategy("program_state")
def test_recursion_and_deep_nesting_end():
    helper = "def one(x):\n    return one(x)\n\ndef work(items):\n    items = [one(x) for x in items]\n"
    deep = f"def work(items):\n    items = [{'(' * 80}1{')' * 80}]\n    items = [{'-' * 500}1]\n    return items\n"
    assert program_in(helper).values() is None and program_in(deep).values() is None
    assert interpreter.WORK <= 200_000 and program_states.LINES <= 100


@pytest.mark.strategy("program_state")
@pytest.mark.parametrize("text", ["no program", "def work(numbers):\n    return numbers\n", "def work(items):\n  (\n"])
def test_a_text_without_such_a_program_has_none(text):
    assert program_in(text) is None


@pytest.mark.strategy("program_state")
def test_a_program_that_is_cut_off_has_the_steps_that_are_complete():
    whole = program_in(CODE)
    cut = program_in(CODE[:whole.steps[1][1]] + "\n    items = [x for")
    assert cut.steps == whole.steps[:2] and cut.values() == STATES[:2]


# --- the regression ---

def sampled(count: int = 400, width: int = 20, noise: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    """States that are a random linear map of one-hot labels, with noise; and the labels."""
    chance = torch.Generator().manual_seed(1)
    labels = torch.stack([torch.randint(size, (count,), generator=chance) for size in (3, 4)], 1)
    hot = torch.cat([torch.nn.functional.one_hot(column, size) for column, size in zip(labels.T, (3, 4))], 1).float()
    states = hot @ torch.randn(7, width, generator=chance)
    return states + noise * torch.randn(count, width, generator=chance), labels


@pytest.mark.oracle("program_state")
def test_the_probe_is_the_least_squares_solution_of_the_penalised_system():
    states, labels = sampled(noise=1.0)
    probe = LinearProbe.fit(states, labels, [3, 4])
    rows = states.double().numpy()
    rows = (rows - rows.mean(0)) / rows.std(0)
    hot = np.concatenate([np.eye(3)[labels[:, 0]], np.eye(4)[labels[:, 1]]], 1)
    padded = np.concatenate([rows, np.sqrt(PENALTY * len(rows)) * np.eye(rows.shape[1])])
    wanted = np.concatenate([hot - hot.mean(0), np.zeros((rows.shape[1], 7))])
    expected = np.linalg.lstsq(padded, wanted, rcond=None)[0]
    assert np.allclose(probe.weight.numpy(), expected, atol=1e-9)
    scores = rows @ expected + hot.mean(0)
    assert probe.read(states, [3, 4])[:, 1].tolist() == scores[:, 3:].argmax(1).tolist()


@pytest.mark.strategy("program_state")
def test_planted_labels_are_found_and_shuffled_ones_are_not():
    states, labels = sampled()
    found = LinearProbe.fit(states[:300], labels[:300], [3, 4]).read(states[300:], [3, 4])
    assert accuracy(found, labels[300:]).min() > 0.99
    chance, shares = torch.Generator().manual_seed(0), []
    for _ in range(60):
        mixed = labels[torch.randperm(300, generator=chance)]
        shares.append(accuracy(LinearProbe.fit(states[:300], mixed, [3, 4]).read(states[300:], [3, 4]), labels[300:]))
    # twelve clusters of states share their fate, so one shuffle has a standard deviation of about 0.25
    assert torch.stack(shares).mean(0).tolist() == pytest.approx([1 / 3, 1 / 4], abs=0.13)


# --- the overlay ---

@cache
def read_text() -> tuple[list[int], int, torch.Tensor]:
    """Token ids of a prompt with a program, the prompt's length, and the library's mean states [n, d]."""
    tokens = pair().target.tokens
    prompt, ids = tokens.encode("Go:"), tokens.encode_continuation(SHORT)
    library, seen = network("llama"), []
    for module in (*library.model.layers, library.model.norm):
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    with torch.no_grad():
        library(input_ids=torch.tensor([prompt + ids]), use_cache=False)
    return prompt + ids, len(prompt), torch.stack(seen).mean(0)


def weights() -> dict[str, torch.Tensor]:
    made = ProgramState.untrained(pair().target.width, seed=4)
    return {**made, "accuracy": torch.linspace(0, 1, made["accuracy"].numel()).view_as(made["accuracy"])}


def true_labels(value: list[int]) -> list[int]:
    """Kind, length, order, largest and repeats of a list of numbers, written down a second time."""
    order = "fall" if value == sorted(value)[::-1] else "rise" if value == sorted(value) else "none"
    largest = next(at for at, bound in enumerate((0, 10, 30, 100, 10 ** 9)) if max(value) < bound) + 1
    return [1, len(value), {"rise": 0, "fall": 1, "none": 2}[order], largest, int(len(set(value)) != len(value))]


def check(cls, ahead: int = 0) -> None:
    ids, start, states = read_text()
    overlay, stored = cls(ahead=ahead), weights()
    overlay.begin_fitted(stored)
    events = read_by(overlay, pair().target, ids, start)
    lengths = [len("".join(map(pair().target.tokens.piece, ids[start:end]))) for end in range(start, len(ids) + 1)]
    steps = [(SHORT.index(line), SHORT.index(line) + len(line)) for line in SHORT.splitlines()[1:]]
    shares = []
    mean, scale, weight, bias = (stored[name][ahead].double().numpy() for name in ("mean", "scale", "weight", "bias"))
    for step, (begin, end) in enumerate(steps[:len(steps) - ahead]):
        first = next(at for at, length in enumerate(lengths) if length > begin + 4) - 1  # after four spaces
        last = next(at for at, length in enumerate(lengths) if length >= end) - 1
        scores = (states[start + last].double().numpy() - mean) * scale @ weight + bias
        found = [int(part.argmax()) for part in np.split(scores, np.cumsum(CLASSES)[:-1])]
        share = sum(a == b for a, b in zip(found, true_labels(SHORT_STATES[step + ahead]))) / 5
        shares += [round(share, 4)] * (last + 1 - first)
    assert shades(events) == shares and len(set(shares)) > 1
    bars = named(events, "read right on held-out programs")
    assert bars["values"] == pytest.approx(stored["accuracy"][ahead].mean(1).tolist(), abs=1e-4)


class OfTheRowBefore(ProgramState):
    """Wrong: the state that has not read the end of the step."""

    def read_states(self, first, states):
        super().read_states(first, {layer: rows.roll(1, 0) for layer, rows in states.items()})


class OfTheLastLayer(ProgramState):
    """Wrong: one layer in place of the mean."""

    def layers(self, depth):
        return (depth,)


class OfTheStepAfter(ProgramState):
    """Wrong: the truth of another step."""

    def _truth(self, program):
        return [*super()._truth(program)[1:], None]


@pytest.mark.oracle("program_state")
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_has_the_share_that_numpy_reads_right_off_the_librarys_states(ahead):
    check(ProgramState, ahead)


@pytest.mark.refuses("program_state")
@pytest.mark.parametrize("wrong", [OfTheRowBefore, OfTheLastLayer, OfTheStepAfter])
def test_another_row_layer_or_step_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.strategy("program_state")
def test_a_token_that_ends_the_text_is_no_part_of_the_programs_last_step():
    target, drawn = pair().target, []
    prompt = target.tokens.encode("Go:")
    ids = prompt + target.tokens.encode_continuation(SHORT.rstrip())
    for end in ([], [min(target.end_ids)]):
        overlay = ProgramState()
        overlay.begin_fitted(weights())
        drawn.append(named(read_by(overlay, target, ids + end, len(prompt)), "what is read right, by step"))
    assert drawn[0] == drawn[1]


def test_texts_without_programs_are_refused_in_a_fit():
    texts = CalibrationTexts(pair().target, [[70, 71, 72]])
    with pytest.raises(Refusal, match="no programs whose steps"):
        list(ProgramState.calibrate(texts, 0))


@pytest.mark.strategy("program_state")
@pytest.mark.bench
def test_a_fit_measures_every_control_on_programs_it_was_not_fitted_to():
    model = pair().target
    programs = [
        f"def f(items):\n    items = [x + {k} for x in items]\n    items = items[{k % 7}:]\n" for k in range(60)
    ]
    texts = CalibrationTexts(model, [model.tokens.encode(code) for code in programs])
    fitting = ProgramState.calibrate(texts, 0)
    notes = []
    with pytest.raises(StopIteration) as done:
        while True:
            notes.append(next(fitting).text)
    stored = done.value.value
    assert stored["accuracy"].shape == (2, 6, 5) and stored["weight"].shape == (2, model.width, sum(CLASSES))
    assert ((stored["accuracy"] >= 0) & (stored["accuracy"] <= 1)).all() and len(notes) == 2
    assert "held-out" in notes[0] and "changed meaning" in notes[0]
