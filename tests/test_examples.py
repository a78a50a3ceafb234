"""The examples run to their end, and every notebook equals its script."""
from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import playground

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))
from notebooks import INSTALL, SCRIPTS, cells, notebook  # noqa: E402

SMALL = {"TOKENS": "6", "DEPTHS": "[2]", "PROMPTS": '["Put down 17."]'}
PRINTED = {
    "compare_strategies": "speculative wrote the same text as greedy",
    "draft_acceptance": "tokens per forward",
    "check_schemas": "refused: ",
    "paper_figure": "wrote figure.svg and figure.pdf",
    "two_lanes": "depth\n1 ",
}


@pytest.fixture(scope="module")
def bundled():
    return playground.load()


def small(script: str) -> str:
    """The script with short runs."""
    for name, value in SMALL.items():
        script = re.sub(rf"^{name} = .*$", f"{name} = {value}", script, flags=re.MULTILINE)
    return script


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs_and_prints_what_it_measured(script, bundled, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(playground, "load", lambda *models, **how: bundled)
    monkeypatch.setenv("MPLBACKEND", "agg")
    exec(compile(small(script.read_text(encoding="utf-8")), script.name, "exec", dont_inherit=True), {})
    assert PRINTED[script.stem] in capsys.readouterr().out
    if script.stem == "paper_figure":
        assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
        assert ">entropy (nats)<" in (tmp_path / "figure.svg").read_text()  # text, not outlines


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_notebook_is_generated_from_the_script(script):
    """`python examples/notebooks.py` writes them again."""
    written = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert written == notebook(script.read_text(encoding="utf-8"))
    first, install, *_ = json.loads(written)["cells"]
    assert first["cell_type"] == "markdown" and "".join(install["source"]) == INSTALL.strip()


def test_every_cell_of_a_script_is_in_its_notebook():
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        made = json.loads(notebook(text))["cells"]
        assert [(cell["cell_type"], "".join(cell["source"])) for cell in made if cell["id"] != "cell-1"] == cells(text)


def test_the_cells_of_a_script_are_read_as_editors_do():
    assert cells("# %% [markdown]\n# # A\n#\n# b\n\n# %%\nc = 1\n") == [("markdown", "# A\n\nb"), ("code", "c = 1")]
