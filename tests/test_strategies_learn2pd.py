"""Learn2PD fills what a trained filter takes for final: against the loop by hand, at its ends, and its training."""
from __future__ import annotations

import math

import pytest
import torch

from playground.algorithms.diffusion.position_filter import (
    FilterTraining,
    PositionFilter,
    Round,
    learn_filter,
    oracle_rounds,
)
from playground.contract import make
from playground.decoding import fitted_weights as fitted
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.errors import Refusal
from playground.events import Note
from playground.training import canvas_fitting
from playground.training.canvas_fitting import OwnAnswers, fit_canvas, one_by_one
from playground.training.fitting import Fitting
from strategies.diffusion import learn2pd
from strategies.diffusion.learn2pd import Learn2PD
from support.canvases import LENGTH, MASK, PROMPT, computed, denoiser, difference, fills, forwards, run

EXACT = 1e-9
BLOCK = 8
WHOLE = len(PROMPT) + LENGTH


def random_filter(seed: int = 1) -> dict[str, torch.Tensor]:
    """Weights of a filter for blocks of 8 whose outputs are well spread."""
    chance = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=chance)  # noqa: E731
    layers = {"first.weight": draw(BLOCK, BLOCK), "first.bias": draw(BLOCK), "second.weight": 2 * draw(BLOCK, BLOCK),
              "second.bias": draw(BLOCK)}
    return {f"{BLOCK}.{name}": tensor for name, tensor in layers.items()}


@pytest.fixture(autouse=True)
def weights(monkeypatch):
    found = random_filter()
    monkeypatch.setattr(fitted, "find_all", lambda parts, models, given=None: {"learn2pd": found})
    return found


def lane(model, strategy: Learn2PD | None = None, **knobs):
    given = dict(block_length=BLOCK, end_prediction=False) | knobs
    return run(model, "learn2pd", strategy or Learn2PD(**given))


def ending(seed: int, position: int):
    """A denoiser whose end token is what it proposes first at a position."""
    model = denoiser(seed=seed)
    model.end_ids = frozenset([int(model.denoise([*PROMPT, *[None] * LENGTH])[len(PROMPT) + position].argmax())])
    return model


# --- the loop by hand ---

def by_hand(model, weights, accept: float, end_prediction: bool, shift: int = 0) -> list[tuple]:
    """Fills of the loop as the sheet has it, over a canvas that is really cut."""
    canvas, course = [None] * LENGTH, []
    end = next(iter(model.end_ids), None)
    for start in range(0, LENGTH, BLOCK):
        while any(token is None for token in canvas[start:start + BLOCK]):
            logits = model.denoise([*PROMPT, *canvas])[len(PROMPT):]
            p, best = logits.softmax(-1).max(-1)
            c = [*p.tolist(), *[1.0] * BLOCK][start + shift:start + shift + BLOCK]
            c = [value if start + i < len(canvas) else 1.0 for i, value in enumerate(c)]
            hidden = (torch.tensor(c) @ weights["8.first.weight"].T + weights["8.first.bias"]).clamp(min=0)
            a = 1 / (1 + (-(hidden @ weights["8.second.weight"].T + weights["8.second.bias"])).exp())
            masked = [i for i in range(start, min(start + BLOCK, len(canvas))) if canvas[i] is None]
            accepted = [i for i in masked if float(a[i - start]) > accept]
            chosen = sorted({*accepted, max(masked, key=lambda i: float(p[i]))})
            for i in chosen:
                canvas[i] = int(best[i])
            course.append((chosen, [int(best[i]) for i in chosen]))
            if end_prediction:
                ends = [i for i in accepted if canvas[i] == end]
                open_ends = [i for i, token in enumerate(canvas) if token is None and int(best[i]) == end]
                cut = ends[0] if ends else max(open_ends, key=lambda i: float(p[i]), default=len(canvas))
                keep = max([cut, *(i for i, token in enumerate(canvas) if token not in (None, end))])
                canvas = [end if token is None and i > cut else token for i, token in enumerate(canvas[:keep + 1])]
        if end in canvas[start:start + BLOCK]:
            break
    return course


def written(events, model) -> list[tuple]:
    """What the forwards filled; fills without a forward are left out."""
    found, end = [], set(model.end_ids)
    for fill in fills(events):
        if not (set(fill.ids) <= end and fill.confidences == [1.0] * len(fill.ids)):
            found.append((fill.positions, fill.ids))
    return found


@pytest.mark.oracle("learn2pd")
@pytest.mark.parametrize("accept", [0.3, 0.9])
def test_it_fills_what_the_filter_accepts_and_the_most_confident_position(accept, weights):
    model = denoiser()
    assert written(lane(model, accept=accept), model) == by_hand(model, weights, accept, False)


@pytest.mark.oracle("learn2pd")
@pytest.mark.parametrize("seed, position", [(0, 6), (0, 9), (1, 11), (2, 9)])
def test_a_predicted_end_cuts_the_canvas(seed, position, weights):
    model = ending(seed, position)
    events = lane(model, accept=0.9, end_prediction=True)
    assert written(events, model) == by_hand(model, weights, 0.9, True)
    assert min(computed(events)) < WHOLE and len(forwards(events)) < LENGTH


@pytest.mark.refuses("learn2pd")
def test_confidences_of_shifted_positions_accept_others(weights):
    model = denoiser()
    assert written(lane(model, accept=0.9), model) != by_hand(model, weights, 0.9, False, shift=1)


class MaskedOnly(Learn2PD):
    """Wrong: filled positions count as certain."""

    def _confidences(self, rows, block):
        return dict.fromkeys(block, 1.0)


@pytest.mark.refuses("learn2pd")
def test_without_the_confidences_of_filled_positions_the_filter_accepts_others(weights):
    model, wrong = denoiser(), MaskedOnly(block_length=BLOCK, accept=0.9, end_prediction=False)
    assert written(lane(model, wrong), model) != by_hand(model, weights, 0.9, False)


# --- its ends ---

@pytest.mark.oracle("learn2pd")
def test_accepting_nothing_is_one_position_per_forward_and_accepting_all_one_forward_per_block():
    model = denoiser()
    plain = run(model, "masked_diffusion", block_length=BLOCK)
    assert difference(lane(model, accept=1.0), plain) < EXACT
    assert [len(fill.positions) for fill in fills(lane(model, accept=0.0))] == [8, 6]
    assert [len(fill.positions) for fill in fills(lane(model, accept=1.0, count=3))] == [3, 3, 2, 3, 3]


def test_a_block_length_without_a_filter_and_a_model_without_weights_are_refused(monkeypatch):
    with pytest.raises(Refusal, match="filters for blocks of 8, 16, 24, 32"):
        make("learn2pd", block_length=12)
    monkeypatch.undo()
    with pytest.raises(Refusal, match="has not been fitted to random denoiser yet: run .* or choose fast_dllm"):
        run(denoiser(), "learn2pd")


# --- rounds of one who knows the answer ---

def test_rounds_end_once_all_is_right_or_nothing_changes():
    script = [[1, 2, 9, 9], [1, 2, 3, 9], [1, 2, 3, 9]]
    seen = []

    def read(filled):
        seen.append(dict(filled))
        return script[len(seen) - 1], [0.5] * 4

    rounds = oracle_rounds(read, range(10, 14), [1, 2, 3, 4])  # the last token is never proposed
    assert [one.final for one in rounds] == [[True, True, False, False]] + [[True, True, True, False]] * 2
    assert seen == [{}, {10: 1, 11: 2}, {10: 1, 11: 2, 12: 3}]


@pytest.mark.oracle("learn2pd")
def test_a_filter_that_knows_the_answer_needs_as_many_forwards_as_the_rounds(tmp_path):
    model = denoiser(seed=2, spread=0.2)
    answer = one_by_one(model, PROMPT, LENGTH, BLOCK)
    assert answer == [token for _, token in sorted(zip(*_joined(run(model, "masked_diffusion", block_length=BLOCK))))]

    class Knows(Learn2PD):
        def fill_block(self, lm, reader, block):
            self.right = lambda proposals: [i for i, token in proposals.tokens.items() if token == answer[i]]
            while masked := [position for position in lm.masked if position in block]:
                proposals = learn2pd.propose(lm, (yield lm.read()), masked)
                yield learn2pd.fill(lm, proposals, self.right(proposals))

    events = lane(model, Knows(block_length=BLOCK, end_prediction=False))
    rounds = [one for start in (0, BLOCK) for one in _rounds(model, answer, range(start, min(start + BLOCK, LENGTH)))]
    assert len(forwards(events)) == len(rounds) < LENGTH


def _joined(events) -> tuple[list[int], list[int]]:
    filled = fills(events)
    return [i for fill in filled for i in fill.positions], [token for fill in filled for token in fill.ids]


def _rounds(model, answer: list[int], block: range) -> list[Round]:
    canvas = [*answer[:block.start], *[None] * (LENGTH - block.start)]
    own = OwnAnswers(model, [], None)
    return oracle_rounds(lambda filled: own._read(PROMPT, canvas, block, filled), block, answer[block.start:block.stop])


# --- training ---

def lessons(count: int = 400, seed: int = 0) -> list[Round]:
    """A proposal is final above a confidence that depends on its place: one half at the first, 0.9 at the others."""
    c = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    needed = torch.tensor([0.5, 0.9, 0.5, 0.9])
    return [Round(i // 4, i % 4, row.tolist(), (row > needed).tolist()) for i, row in enumerate(c)]


def trained(rounds: list[Round]) -> tuple[PositionFilter, str]:
    events = learn_filter(rounds, FilterTraining(iterations=300, rate=0.03), 0)
    said = ""
    while True:
        try:
            event = next(events)
            said = event.text if isinstance(event, Note) else said
        except StopIteration as end:
            return PositionFilter.of(end.value), said


@pytest.mark.oracle("learn2pd")
def test_training_finds_what_a_single_threshold_cannot():
    filter, said = trained(lessons())
    fresh = lessons(seed=1)
    right = sum(p > 0.5 for p in filter.chances([0.7] * 4)), [p > 0.5 for p in filter.chances([0.7] * 4)]
    accuracy = sum((p > 0.5) == final for one in fresh for p, final in zip(filter.chances(one.confidence), one.final))
    single = max(sum((c > t / 20) == final for one in fresh for c, final in zip(one.confidence, one.final))
                 for t in range(20))
    assert right == (2, [True, False, True, False]) and accuracy / 1600 > 0.9 > single / 1600
    assert "held-out forwards" in said


@pytest.mark.refuses("learn2pd")
def test_a_filter_trained_on_shuffled_bits_is_no_better_than_chance():
    rounds = lessons()
    shuffled = [one._replace(final=other.final) for one, other in zip(rounds, rounds[7:] + rounds[:7])]
    filter, _ = trained(shuffled)
    fresh = lessons(seed=1)
    accuracy = sum((p > 0.5) == final for one in fresh for p, final in zip(filter.chances(one.confidence), one.final))
    assert accuracy / 1600 < 0.85


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(canvas_fitting, "ROOM", 4)
    monkeypatch.setattr(canvas_fitting, "world_prompts", lambda model, seed, each: [[i, 9, 11] for i in range(1, 11)])
    monkeypatch.setattr(learn2pd, "LENGTHS", (2, 4))
    monkeypatch.setattr(learn2pd, "FilterTraining", lambda: FilterTraining(iterations=20))


@pytest.mark.slow
def test_training_gives_small_weights_and_resumes_where_it_stopped(small, tmp_path, monkeypatch):
    model, place, notes = denoiser(), tmp_path / "learn2pd.training", []
    asked = []
    monkeypatch.setattr(canvas_fitting, "one_by_one", lambda *given: asked.append(given) or one_by_one(*given))
    stop = iter(range(14))

    def progress(share, text):
        if next(stop, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_canvas(Learn2PD, Fitting(model, place, watch=notes.append, progress=progress))
    weights = fit_canvas(Learn2PD, Fitting(model, place, watch=notes.append))
    assert len(asked) == 20 and not place.exists()  # ten prompts, two block lengths: no answer is written twice
    assert {name: tuple(tensor.shape) for name, tensor in weights.items() if name.startswith("4")} == {
        "4.first.weight": (4, 4), "4.first.bias": (4,), "4.second.weight": (4, 4), "4.second.bias": (4,)}
    assert all(tensor.dtype == torch.float16 for tensor in weights.values())


def test_training_refuses_a_table_and_too_few_prompts(small, tmp_path, monkeypatch):
    with pytest.raises(Refusal, match="oracle is not a network"):
        fit_canvas(Learn2PD, Fitting(OracleDenoiser.bundled(), tmp_path / "x"))
    monkeypatch.setattr(canvas_fitting, "world_prompts", lambda model, seed, each: [[1, 2]])
    with pytest.raises(Refusal, match="1 prompts are too few"):
        fit_canvas(Learn2PD, Fitting(denoiser(), tmp_path / "x"))


def test_the_mask_is_never_proposed():
    model = denoiser()
    assert MASK not in one_by_one(model, PROMPT, LENGTH, BLOCK)
    assert math.isclose(sum(canvas_fitting.proposed(model, [*PROMPT, None], [5]).values.tolist()), 1, abs_tol=1)
