"""A type checker passes on the packages that pyproject.toml names."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """What the first check has read, for the second."""
    return tmp_path_factory.mktemp("types")


def checked(cache: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    options = "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache)
    command = [sys.executable, "-m", "mypy", *options, *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_the_checker_passes(cache):
    done = checked(cache)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_checker_reports_the_wrong_field_of_an_event(cache, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from playground.events import Commit\n\n\ndef entropy(commit: Commit) -> float:\n    return commit.entropy\n"
    )
    done = checked(cache, wrong)
    assert done.returncode == 1 and 'has no attribute "entropy"' in done.stdout
