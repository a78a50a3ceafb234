"""What a lane wrote, where several sequences grow and one becomes the text."""
from __future__ import annotations

from playground.events import Branches, Commit, Rollback, Stamped, Step
from playground.trace.transcript import sequences


def stamp(*events):
    return [Stamped(0, seq, 0.0, event) for seq, event in enumerate(events)]


def commit(position: int, ids: list[int], **where) -> Commit:
    return Commit(
        position,
        ids,
        [f" {i}" for i in ids],
        "".join(f" {i}" for i in ids),
        [-0.5] * len(ids),
        ["sampled"] * len(ids),
        **where,
    )


TWO = (
    Branches([(1, 0), (2, 0)]),
    Step(0, 1.0, sequence=1),
    commit(0, [10], sequence=1),
    Step(0, 2.0, sequence=2),
    commit(0, [20], sequence=2),
    Step(1, 3.0, sequence=2),
    commit(1, [21], sequence=2),
)


def test_a_text_that_grew_on_a_sequence_has_its_steps():
    text = sequences(stamp(*TWO, commit(0, [20, 21], grown_on=2)))[0]
    assert [token.id for token in text.tokens] == [20, 21] and text.text == " 20 21"
    assert {position: step.entropy for position, step in text.steps.items()} == {0: 2.0, 1: 3.0}


def test_its_tokens_keep_the_commits_that_first_wrote_them():
    text = sequences(stamp(*TWO, commit(0, [20, 21], grown_on=2)))[0]
    assert [token.seq for token in text.tokens] == [4, 6]
    elsewhere = sequences(stamp(*TWO, commit(0, [20, 99], grown_on=2)))[0]
    assert [token.seq for token in elsewhere.tokens] == [4, 7]  # 99 was never in sequence 2


def test_only_the_committed_positions_are_taken_over():
    text = sequences(stamp(*TWO, commit(0, [20], grown_on=2)))[0]
    assert list(text.steps) == [0]


def test_a_commit_that_names_no_sequence_takes_over_nothing():
    assert sequences(stamp(*TWO, commit(0, [20, 21])))[0].steps == {}
    assert sequences(stamp(*TWO, commit(0, [20, 21], grown_on=9)))[0].steps == {}


def test_a_later_part_of_the_text_may_grow_on_a_sequence_of_its_own():
    born = (commit(0, [5]), Branches([(1, 0)]), Step(1, 4.0, sequence=1), commit(1, [6], sequence=1))
    text = sequences(stamp(*born, commit(1, [6], grown_on=1)))[0]
    assert [token.id for token in text.tokens] == [5, 6] and text.steps[1].entropy == 4.0
    assert not sequences(stamp(*born, commit(1, [6], grown_on=1), Rollback(1, " 5")))[0].steps


def test_a_place_before_the_text_takes_over_nothing_and_breaks_nothing():
    empty = Commit(-1, [], [], "", [], [], sequence=1, grown_on=1)
    assert sequences(stamp(empty))[1].tokens == []
    assert [token.id for token in sequences(stamp(*TWO, commit(-3, [20], grown_on=2)))[0].tokens] == [20]
