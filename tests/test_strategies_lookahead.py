"""Lookahead decoding: its windows by hand, its text, and wrong variants against the same check."""
from __future__ import annotations

from random import Random

import pytest
import torch
from drafting_runs import recording_rejections
from tables import TableModel, watch, write

from playground.contract import find, make
from playground.contract.lane_config import assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from support.speculation import collapses, speculative_lane

COLLAPSES = {"lookahead": collapses("lookahead", window=0, guesses=0)}
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
