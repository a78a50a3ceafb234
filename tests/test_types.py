"""A type checker passes on the packages that pyproject.toml names."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_the_checker_passes(tmp_path):
    done = checked("--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_checker_reports_the_wrong_field_of_an_event(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from playground.events import Commit\n\n\ndef entropy(commit: Commit) -> float:\n    return commit.entropy\n"
    )
    done = checked("--cache-dir", str(tmp_path), str(wrong))
    assert done.returncode == 1 and 'has no attribute "entropy"' in done.stdout
