"""Makes a notebook of each script here, ready for Colab: `python examples/notebooks.py`. A test compares both.

A line `# %%` begins a cell of code and `# %% [markdown]` one of text, as editors and jupytext read them. The first cell
of a notebook is added here: it installs the playground where it is missing.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = tuple(sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name))
INSTALL = """\
# Colab: choose the address of the repository, then run this cell. It does nothing where the playground is installed.
from importlib.util import find_spec

REPOSITORY = "https://github.com/YOU/decoding-playground"  # @param {type: "string"}
if find_spec("playground") is None:
    %pip install -q "git+{REPOSITORY}" matplotlib
"""


def cells(script: str) -> list[tuple[str, str]]:
    """The cells of a script: ("markdown" or "code", text)."""
    parts = script.split("# %%")[1:]
    return [_markdown(part) if part.startswith(" [markdown]") else ("code", part.strip()) for part in parts]


def _markdown(part: str) -> tuple[str, str]:
    lines = part.strip().splitlines()[1:]
    return "markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def notebook(script: str) -> str:
    """The notebook as JSON, in format 4.5."""
    title, *rest = cells(script)
    made = [_cell(number, *cell) for number, cell in enumerate([title, ("code", INSTALL.strip()), *rest])]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.splitlines(keepends=True)}


if __name__ == "__main__":
    for script in SCRIPTS:
        script.with_suffix(".ipynb").write_text(notebook(script.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {script.with_suffix('.ipynb')}")
