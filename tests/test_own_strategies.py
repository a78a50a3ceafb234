"""Strategies of one's own, from the folders that PLAYGROUND_STRATEGIES names, and the script that runs the tests."""
from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from playground.contract import base, discover, find
from playground.contract.registry import import_own
from playground.errors import Refusal

ROOT = Path(__file__).parents[1]
OWN = '''
from playground.contract import Sampler, knob


class Own(Sampler):
    """Divide scores by two. It stands for a strategy of one's own."""

    name, title, paper, sheet = "own_half", "Own half", "1904.09751", "sampling/sampling-baselines"
    by: float = knob(2.0, 1.0, 4.0, help="divisor")

    def apply(self, scores, histories):
        return scores / self.by
'''


@pytest.fixture
def registry(monkeypatch):
    """A registry whose additions are forgotten after the test."""
    monkeypatch.setattr(base, "REGISTERED", dict(discover()))


def test_a_strategy_in_a_folder_is_found_like_any_other(tmp_path, registry):
    (tmp_path / "half.py").write_text(OWN)
    import_own(tmp_path)
    assert base.REGISTERED["own_half"].family() == "own" and base.REGISTERED["own_half"]().by == 2.0


@pytest.mark.parametrize(("content", "says"), [
    ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("class", "SyntaxError"),
    (OWN.replace("own_half", "top_p"), "top_p"),
])
def test_a_file_that_cannot_be_imported_is_named_with_the_reason(tmp_path, registry, content, says):
    (tmp_path / "wrong.py").write_text(content)
    with pytest.raises(Refusal, match="wrong.py cannot be imported") as refusal:
        import_own(tmp_path)
    assert says in str(refusal.value)


def test_a_folder_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(Refusal, match="is no folder"):
        import_own(tmp_path / "missing")


def test_without_the_variable_there_are_the_strategies_of_the_project_alone():
    assert {cls.__module__.split(".")[0] for cls in discover().values()} == {"strategies"} and find("greedy")


def test_one_that_is_asked_for_by_name_is_found_without_the_others():
    program = ("import sys; from playground.contract import find; print(find('top_p').title, *sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [name for name in done.stdout.split() if name.startswith("strategies.")]
    assert done.stdout.startswith("Top-p") and found == ["strategies.sampling", "strategies.sampling.top_p"]


def test_one_of_ones_own_is_found_by_name_and_a_missing_folder_is_refused(tmp_path):
    (tmp_path / "half.py").write_text(OWN)
    program = "from playground.contract import find; print(find('own_half').title)"
    asked = {"args": [sys.executable, "-c", program], "cwd": ROOT, "capture_output": True, "text": True}
    own = subprocess.run(**asked, env=os.environ | {"PLAYGROUND_STRATEGIES": str(tmp_path)})
    assert own.stdout == "Own half\n", own.stderr
    missing = subprocess.run(**asked, env=os.environ | {"PLAYGROUND_STRATEGIES": str(tmp_path / "missing")})
    assert "which is no folder" in missing.stderr


# --- tests/run ---

@pytest.fixture
def stubs(tmp_path) -> dict[str, str]:
    """An environment for tests/run in which nothing is installed: programs that write what they were asked for."""
    for name, lines in {"id": "echo 1000", "sudo": f'echo "sudo $*" >> {tmp_path}/asked',
                        "python": f'echo "python $*" >> {tmp_path}/asked'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "nproc", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    return {"PATH": str(tmp_path), "asked": str(tmp_path / "asked")}


def answered(stubs: dict[str, str], answer: str) -> tuple[int, str]:
    """Exit code and output of tests/run on a terminal where somebody answers."""
    ours, its = pty.openpty()
    started = subprocess.Popen([ROOT / "tests/run"], env=stubs, stdin=its, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    os.write(ours, f"{answer}\n".encode())
    said = started.communicate(timeout=60)[0]
    os.close(its)
    os.close(ours)
    return started.returncode, said


def test_the_script_asks_before_it_uses_sudo(stubs):
    code, said = answered(stubs, "n")
    assert code == 2 and "installs requirements.txt and tests/requirements.txt into" in said and "--quick" in said
    assert "sudo" not in Path(stubs["asked"]).read_text()
    code, said = answered(stubs, "y")
    asked = Path(stubs["asked"]).read_text()
    assert code == 0 and "sudo apt-get install" in asked and "--tier default" in asked


def test_where_nobody_can_answer_sudo_may_not_ask_for_a_password(stubs):
    done = subprocess.run([ROOT / "tests/run"], env=stubs, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0 and "sudo -n apt-get install" in Path(stubs["asked"]).read_text()


def test_without_a_browser_nothing_is_asked(stubs):
    subprocess.run([ROOT / "tests/run", "--quick"], env=stubs, stdin=subprocess.DEVNULL, check=True)
    assert "sudo" not in Path(stubs["asked"]).read_text()
