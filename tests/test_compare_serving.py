"""The comparison of the page with an earlier commit: what counts as slower."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import compare_serving
from compare_serving import FIRST, PAGES, RATE, main, row


@pytest.mark.parametrize("name, before, now, kept", [
    (FIRST, 100.0, 109.0, True), (FIRST, 100.0, 112.0, False), (FIRST, 100.0, 50.0, True),
    (RATE, 100.0, 95.0, True), (RATE, 100.0, 88.0, False), (RATE, 100.0, 200.0, True),
])
def test_longer_waits_and_fewer_tokens_a_second_are_worse(name, before, now, kept):
    text, no_worse = row(name, [before] * 3, [now] * 3, 0.1)
    assert no_worse == kept and text.endswith("| yes |" if kept else "| NO |")


def test_both_pages_are_measured_in_turn_and_a_slower_one_fails(monkeypatch, tmp_path, capsys):
    turns = []

    def measure(root, given, found) -> None:
        turns.append(root)
        for name in (*PAGES.values(), FIRST, RATE):
            found[name].append(2.0 if root == compare_serving.ROOT and name == FIRST else 1.0)

    monkeypatch.setattr(compare_serving, "measure", measure)
    monkeypatch.setattr(compare_serving, "unpacked", lambda commit, folder: tmp_path)
    assert main(["abc", "--rounds", "2"]) == 1
    assert turns == [tmp_path, compare_serving.ROOT] * 2 and capsys.readouterr().out.count("NO") == 1
