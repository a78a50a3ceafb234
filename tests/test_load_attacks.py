"""The measurement of the load beside attackers: what it calls held, and how it goes on after an interruption."""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import load_attacks
from load_attacks import MOST_FIRST, MOST_GAP, Seen

HELD = Seen("uploads", 30, attacks=9, attacked=True, ended=2, firsts=[0.2, MOST_FIRST], gaps=[0.1, MOST_GAP])


@pytest.mark.parametrize("changes", [
    {"firsts": [0.2, MOST_FIRST + 0.1]}, {"gaps": [0.1, MOST_GAP + 0.1]}, {"firsts": [], "gaps": []},
    {"lost": ["HTTP 503"]}, {"alive": False}, {"tracebacks": 1}, {"attacked": False},
], ids=["a late first token", "a long gap", "no run", "a lost run", "the server ended", "a traceback", "no attack"])
def test_an_attacker_is_held_only_if_nobody_waits_and_it_attacks_to_the_end(changes):
    assert HELD.holds and HELD.row().endswith("| yes | yes | yes |")
    broken = replace(HELD, **changes)
    assert not broken.holds and broken.row().endswith("| NO |")


def test_an_interrupted_measurement_goes_on_with_the_attackers_that_are_missing(tmp_path, monkeypatch, capsys):
    asked = []

    def beside(name: str, given) -> Seen:
        asked.append(name)
        if asked == ["nobody", "open streams"]:
            raise KeyboardInterrupt
        return replace(HELD, attacker=name)

    monkeypatch.setattr(load_attacks, "beside", beside)
    out = tmp_path / "load.json"
    command = ["--visitors", "3", "--out", str(out), "--only", "nobody", "open streams", "half-sent heads"]
    with pytest.raises(KeyboardInterrupt):
        load_attacks.main(command)
    assert [one["attacker"] for one in json.loads(out.read_text())["attackers"]] == ["nobody"]
    assert load_attacks.main(command) == 0
    assert asked == ["nobody", "open streams", "open streams", "half-sent heads"]
    table = capsys.readouterr().out
    assert table.count("| nobody | 9 |") == 2 and f"longer than {MOST_FIRST:.0f} s for its first token" in table


def test_figures_of_other_settings_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr(load_attacks, "beside", lambda name, given: replace(HELD, attacker=name))
    command = ["--out", str(tmp_path / "load.json"), "--only", "nobody"]
    assert load_attacks.main([*command, "--seconds", "20"]) == 0
    with pytest.raises(SystemExit, match="give the same settings"):
        load_attacks.main([*command, "--seconds", "30"])


def test_an_attacker_that_breaks_off_is_noticed(monkeypatch):
    seen = replace(HELD, attacker="nothing of this name")
    with load_attacks.attacking(seen, 9, 60) as attacker:
        attacker.join(30)
    assert not seen.attacked and not seen.holds
