"""Jacobi decoding: its windows by hand, its text, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from drafting_runs import constant, recorded, recording_rejections
from tables import TableModel, distance, law, product_law, write

from playground.contract import find
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.commits import ids
from support.laws import AT_ONE, EXACT, WRONG
from support.speculation import GREEDY, collapses, speculative_lane

COLLAPSES = {"jacobi": collapses("jacobi", window=0)}


def test_a_window_that_is_correct_from_the_start_is_accepted_entirely():
    same = TableModel("abc", rule=lambda context: torch.eye(3, dtype=torch.float64)[context[-1]] * 50)
    write(
        assemble(speculative_lane("jacobi", "greedy_match", window=4, init="repeat")),
        {"target": same},
        [1],
        Limits(0, 20),
        Draws(0),
    )
    assert same.forwards == 1 + 20 / 5


@pytest.mark.parametrize("init", ["random", "uniform", "repeat"])
def test_if_the_model_ignores_its_text_every_fresh_draft_token_is_accepted(init):
    """Then p equals the q it was sampled from. Draft tokens of a first window and of new positions may be rejected."""
    anew = []
    for seed in range(5):
        kept, expected = [], 0
        assembly = assemble(speculative_lane("jacobi", "rejection", AT_ONE, window=6, init=init))
        verdicts: list = []
        assembly.decoder.verifier = recording_rejections(verdicts)
        write(assembly, {"target": constant()}, [0], Limits(seed, 40), Draws(seed))
        for tree, verdict in verdicts:
            kept = len(verdict.kept)
            assert kept >= min(expected, len(tree))
            expected = max(0, len(tree) - kept - 1)
            anew.append(expected)
    assert sum(anew) > 20


@pytest.mark.oracle("jacobi")
@pytest.mark.parametrize("init", ["random", "uniform", "repeat"])
def test_sampled_windows_keep_the_targets_distribution_over_several_rounds(init):
    models = {"target": TableModel("ab", seed=4)}
    found = law(speculative_lane("jacobi", "rejection", AT_ONE, window=2, init=init), models, [0, 1], 4)
    assert distance(found, product_law(models["target"], [0, 1], 4)) < EXACT


class KeepsTheOldGuess(find("jacobi")):
    """An untested draft token stays, and counts as sampled from its new row."""

    def _resampled(self, lm, node, place):
        old = self._rows.tree.tokens[node + 1:]
        token, q = super()._resampled(lm, node, place)
        return (old[0] if old else token), q


class OffByOne(find("jacobi")):
    """Returns the row of the position before."""

    def _resampled(self, lm, node, place):
        token, _ = super()._resampled(lm, node, place)
        return token, self._rows.distribution(node - 1)


@pytest.mark.refuses("jacobi")
@pytest.mark.parametrize("wrong", [KeepsTheOldGuess, OffByOne])
def test_a_window_that_is_not_resampled_from_its_rows_is_detected(wrong):
    assembly = assemble(speculative_lane("jacobi", "rejection", AT_ONE))
    assembly.decoder.drafter = wrong(3, "uniform")
    models = {"target": TableModel("ab", seed=4)}
    assert distance(law(assembly, models, [0, 1], 4), product_law(models["target"], [0, 1], 4)) > WRONG


def test_greedy_and_deterministic_sampling_give_the_same_iteration():
    forwards = []
    for samplers in ([], [("top_k", {"k": 1})]):
        model = TableModel("abcde", seed=1, spread=4)
        write(
            assemble(speculative_lane("jacobi", "rejection", *samplers, window=5, init="repeat")),
            {"target": model},
            [0, 1],
            Limits(0, 30),
            Draws(0),
        )
        forwards.append(model.forwards)
    assert forwards[0] == forwards[1] <= 31


def windows_by_hand(model: TableModel, text: list[int], window: list[int], accepted: int, size: int) -> list[int]:
    """The next greedy window: the model's token after each old one; the last one fills new positions."""
    said = [argmax(model, text + window[:end]) for end in range(len(window) + 1)]
    coming = said[accepted + 1:]
    while len(coming) < size:
        coming.append((coming or said[accepted:accepted + 1])[-1])
    return coming[:size]


def argmax(model: TableModel, context: list[int]) -> int:
    scores = model.scores(tuple(context)).tolist()
    return scores.index(max(scores))


def check_greedy_windows(drafter: type) -> None:
    """Every window is one step of the fixed-point iteration from the one before it."""
    moved = 0
    for seed in range(4):
        seen, assembly = [], assemble(speculative_lane("jacobi", "greedy_match"))
        assembly.decoder.drafter, assembly.decoder.verifier = drafter(4, "repeat"), recording_rejections(seen)
        model, text, last = TableModel("abc", seed=seed), [0, 1], None
        write(assembly, {"target": model}, text, Limits(0, 24), Draws(0))
        for tree, verdict in seen:
            expected = windows_by_hand(model, *last, 4) if last else [text[-1]] * 4
            assert tree.tokens == expected[:len(tree)]
            moved += last is not None and len(set(tree.tokens)) > 1
            last = (text, tree.tokens, len(verdict.kept))
            text = [*text, *(tree.tokens[node] for node in verdict.kept), verdict.token]
    assert moved > 10


class KeepsTheOldWindow(find("jacobi")):
    """Tokens that were not accepted stay unchanged."""

    def _resampled(self, lm, node, place):
        token, q = super()._resampled(lm, node, place)
        old = self._rows.tree.tokens[node + 1:]
        return (old[0] if old else token), q


class MovesAPlaceTooFar(find("jacobi")):
    def _remaining(self):
        return super()._remaining()[1:]


@pytest.mark.oracle("jacobi")
def test_greedily_every_window_is_a_step_of_the_fixed_point_iteration():
    check_greedy_windows(find("jacobi"))


@pytest.mark.refuses("jacobi")
@pytest.mark.parametrize("wrong", [KeepsTheOldWindow, MovesAPlaceTooFar], ids=lambda cls: cls.__name__)
def test_a_wrong_iteration_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_greedy_windows(wrong)


def test_the_initial_window_changes_the_forwards_but_not_the_text():
    texts = [
        ids(recorded(speculative_lane("jacobi", "greedy_match", init=init))[1])
        for init in ("random", "uniform", "repeat")
    ]
    assert texts == [ids(recorded(GREEDY)[1])] * 3
