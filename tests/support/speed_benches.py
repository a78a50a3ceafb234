"""Small networks that the benchmark of speed times."""
from __future__ import annotations

import json
import logging

import pytest
from saved import save_models

from playground.cli import main

SIZES = ["--repeats", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def saved(folder):
    return save_models(folder)


@pytest.fixture(scope="module")
def measured(folder, saved):
    """A minimal benchmark: its document and its page."""
    tasks = [{"task": "birds", "prompt": "The green bird"}, {"task": "foxes", "prompt": "The red fox", "chat": True}]
    (folder / "prompts.json").write_text(json.dumps(tasks))
    run("bench", "--model", saved.target, "--draft", saved.draft, "--prompts", str(folder / "prompts.json"), *SIZES,
        "--max-new-tokens", "12", "--json", str(folder / "b.json"), "--page", str(folder / "b.md"))
    return json.loads((folder / "b.json").read_text()), (folder / "b.md").read_text()


def run(*words: str) -> None:
    level = logging.getLogger("playground").level
    code = main([*words])
    logging.getLogger("playground").setLevel(level)
    assert code == 0
