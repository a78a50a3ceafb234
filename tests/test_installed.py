"""`pip install .` gives a package that works from any folder: every file of `assets` is in it and found there."""
from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from playground.cli.space.space_folder import FILES, README, write

ROOT = Path(__file__).parents[1]
SOURCES = ("playground", "strategies", "assets", "pyproject.toml", "setup.py", *FILES, README)
PIP = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
OWN = '''
from playground.contract import Sampler, knob
from playground.engine import sampling


class MyTopP(Sampler):
    """Sample from the smallest set of tokens whose probabilities reach p. arXiv 1904.09751."""

    name, title, paper, sheet = "my_top_p", "My top-p", "1904.09751", "sampling/sampling-baselines"
    guarantee = ("collapses",)

    p: float = knob(0.9, 0.0, 1.0, help="probability that is kept; 1 keeps all")

    def apply(self, scores, histories):
        return sampling.top_p(scores, self.p)
'''

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the packages are installed into, from a copy: building writes beside the sources."""
    copy, packages = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("site-packages")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    before = {*copy.rglob("*")}
    done = subprocess.run([*PIP, "--target", str(packages), str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {*copy.rglob("*")} == before, "installing leaves nothing beside the sources"
    return packages


def run_there(installed: Path, folder: Path, *words: str, **more: str) -> str:
    """Output of python with the installed packages, in a folder that is no clone."""
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder),
                   **more}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


def test_every_module_and_every_bundled_file_is_installed(installed):
    assets = {f"assets/{name}" for name in files(ROOT / "assets")}
    besides = {f"space_files/{name}" for name in (*FILES, README)}
    assert files(installed / "playground") == files(ROOT / "playground") | assets | besides
    assert files(installed / "strategies") == files(ROOT / "strategies")


def test_the_installed_command_line_lists_the_strategies_from_another_folder(installed, tmp_path):
    assert "speculative" in run_there(installed, tmp_path, "-m", "playground", "list")


def test_the_installed_package_writes_the_same_space_as_a_clone(installed, tmp_path):
    (there := tmp_path / "there").mkdir()
    run_there(installed, there, "-m", "playground", "space", "../installed")
    write(tmp_path / "clone")
    assert files(tmp_path / "installed") == files(tmp_path / "clone")
    for name in ("README.md", "requirements.txt", "playground/cli/serve.py", "assets/models/pocket/config.json"):
        assert (tmp_path / "installed" / name).read_bytes() == (tmp_path / "clone" / name).read_bytes()


def test_the_command_says_its_version_and_runs_strategies_of_ones_own(installed, tmp_path, monkeypatch):
    script, = (installed / "bin").glob("playground")
    assert run_there(installed, tmp_path, str(script), "--version").startswith("playground 0.")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/late.py").write_text(OWN)
    run = [str(script), "run", "greedy", "--prompt", "The fox", "--with", "my_top_p:p=0.5", "--max-new-tokens", "2"]
    assert "greedy" in run_there(installed, tmp_path, *run, PLAYGROUND_STRATEGIES=str(tmp_path / "own"))


def test_the_installed_package_runs_its_bundled_model_and_makes_a_page_of_it(installed, tmp_path):
    example = (
        "import playground; print(playground.__file__); models = playground.load('pocket', draft='none');"
        "result = playground.run('greedy', 'The fox', models=models, max_new_tokens=2); result.to_html('fox.html');"
        "print(len(result.token_ids))"
    )
    where, tokens = run_there(installed, tmp_path, "-c", example).splitlines()
    assert where.startswith(str(installed)) and tokens == "2"
    assert "<script" in (tmp_path / "fox.html").read_text(encoding="utf-8")
