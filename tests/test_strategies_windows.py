"""A model that drafts for itself at several positions in parallel: Jacobi and lookahead decoding."""
from __future__ import annotations

from random import Random

import pytest
import torch
from drafting_runs import constant, recorded, recording_rejections
from tables import TableModel, distance, law, product_law, watch, write

from playground.contract import find, make
from playground.contract.lane_config import assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from support.commits import ids
from support.laws import AT_ONE, EXACT, WRONG
from support.speculation import GREEDY, collapses, speculative_lane

COLLAPSES = {
    "jacobi": collapses("jacobi", window=0),
    "lookahead": collapses("lookahead", window=0, guesses=0),
}


# --- Jacobi ---

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


# --- lookahead ---

lookahead = __import__(find("lookahead").__module__, fromlist=["Pool"])


def test_a_pool_holds_the_latest_ngrams_of_each_token_the_latest_first():
    pool = lookahead.NGramPool(2)
    for following in [(1, 2), (3, 4), (1, 2), (5, 6)]:
        pool.add(7, following)
    assert pool.after(7) == [[5, 6], [1, 2]] and pool.after(8) == [] and len(pool) == 2
    pool.read([1, 2, 3, 4], 2)
    assert pool.after(1) == [[2, 3]] and pool.after(2) == [[3, 4]] and pool.after(3) == []


STEP = [3, 0, 4, 7, 8, 2, 1, 5, 6]  # which letter follows each


def stepping() -> TableModel:
    """Its next letter depends on the last alone."""
    return TableModel("abcdefghi", rule=lambda context: torch.eye(9, dtype=torch.float64)[STEP[context[-1]]] * 50)


class Askew(find("lookahead")):
    """Moves its window without dropping what has moved to the end of the text."""

    def _moved(self, said):
        return [self._rows[1][:-1], *self._rows[2:], said]


def pooled(drafter, model: TableModel, length: int = 60) -> dict:
    """All n-grams that were in the pool while a text was written."""
    assembly, found = assemble(speculative_lane("lookahead", "greedy_match")), {}
    assembly.decoder.drafter = drafter
    for lane in watch(assembly, {"target": model}, [0, 5, 2, 2, 8], Limits(0, length), Draws(0)):
        pool = getattr(lane.assembly.decoder.drafter, "_pool", None)
        found |= {(token, *following): None for token, row in (pool.known if pool else {}).items() for following in row}
    return found


@pytest.mark.oracle("lookahead")
@pytest.mark.parametrize("n, window", [(3, 2), (4, 5), (5, 7)])
def test_every_n_gram_is_a_continuation_by_the_model(n, window):
    found = pooled(find("lookahead")(n, window, 7, prompt=False), stepping())
    assert found and all(len(gram) == n and all(STEP[a] == b for a, b in zip(gram, gram[1:])) for gram in found)


@pytest.mark.refuses("lookahead")
def test_a_wrongly_shifted_window_is_detected():
    found = pooled(Askew(4, 5, 7, prompt=False), stepping())
    assert not all(STEP[a] == b for gram in found for a, b in zip(gram, gram[1:]))


def n_grams_by_scanning(text: list[int], n: int, most: int) -> list[tuple[int, ...]]:
    """The continuations of the last token wherever it occurred with n - 1 tokens after it: distinct, the latest first.
    """
    followed = [tuple(text[place + 1:place + n]) for place in range(len(text) - n + 1) if text[place] == text[-1]]
    return list(dict.fromkeys(reversed(followed)))[:most]


def check_lookahead(drafter: type) -> None:
    """The first tree holds the n-grams of the prompt after its last token, without repeated prefixes."""
    branches = 0
    for seed in range(25):
        chance, seen = Random(seed), []
        prompt, n, most = [chance.randrange(3) for _ in range(18)], chance.randrange(3, 6), chance.randrange(1, 5)
        assembly = assemble(speculative_lane("lookahead", "greedy_match"))
        assembly.decoder.drafter, assembly.decoder.verifier = drafter(n, 0, most), recording_rejections(seen)
        write(assembly, {"target": TableModel("abc")}, prompt, Limits(0, 9), Draws(0))
        tree = seen[0][0]
        paths = [gram[:end] for gram in n_grams_by_scanning(prompt, n, most) for end in range(1, n)]
        assert [tuple(tree.prefix(node)) for node in range(len(tree))] == list(dict.fromkeys(paths))
        branches += tree.parents.count(ROOT) > 1
    assert branches > 5


class TheOldestFirst(find("lookahead")):
    def _begin(self, lm):
        super()._begin(lm)
        self._pool.after = lambda token: [list(following) for following in self._pool.known.get(token, {})]


class ForgetsTheLatest(find("lookahead")):
    """A full pool takes no more n-grams."""

    def _begin(self, lm):
        super()._begin(lm)
        text, self._pool.known = lm.tokens[:lm.prompt_length], {}
        for place in range(len(text) - self.n + 1):
            row = self._pool.known.setdefault(text[place], {})
            if len(row) < self.guesses:
                row[tuple(text[place + 1:place + self.n])] = None


class OneTokenShort(find("lookahead")):
    def _begin(self, lm):
        super()._begin(lm)
        self._pool.known = {}
        self._pool.read(lm.tokens[:lm.prompt_length], self.n - 2)


@pytest.mark.oracle("lookahead")
def test_drafts_equal_the_n_grams_of_a_scan_of_the_prompt():
    check_lookahead(find("lookahead"))


@pytest.mark.refuses("lookahead")
@pytest.mark.parametrize("wrong", [TheOldestFirst, ForgetsTheLatest, OneTokenShort], ids=lambda cls: cls.__name__)
def test_a_wrong_n_gram_pool_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_lookahead(wrong)


def test_once_the_pool_is_filled_a_forward_commits_a_whole_n_gram():
    assembly, found = assemble(speculative_lane("lookahead", "greedy_match", n=5)), []
    assembly.decoder.verifier = recording_rejections(found)
    write(assembly, {"target": stepping()}, [0], Limits(0, 80), Draws(0))
    lengths = [len(verdict.kept) + 1 for _, verdict in found]
    assert max(lengths[:3]) < 5 <= min(lengths[-9:-1])


def test_a_window_takes_one_node_per_position_and_columns_continue_the_first_row():
    drafter = find("lookahead")(4, 3, 0)
    drafter._rows, drafter._nodes = [[1, 2], [3, 4, 5], [6, 7, 8]], {}
    tree = TokenTree()
    columns = [drafter._column(tree, column) for column in range(3)]
    assert [tuple(tree.prefix(column[-1])) for column in columns] == [(3, 6), (1, 4, 7), (1, 2, 5, 8)]
    assert [[tree.tokens[node] for node in column if node != ROOT] for column in columns] == [
        [3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]
    assert len(tree) == 2 + 3 + 3, "the text's own end is in no tree"


def test_more_draft_tokens_than_a_tree_may_have_are_refused_in_one_sentence():
    with pytest.raises(Refusal, match=r"^A round would have 420 draft tokens.*\.$"):
        make("lookahead", n=8, window=30, guesses=30)
