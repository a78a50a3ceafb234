"""The command line, called in this process."""
from __future__ import annotations

import logging
from pathlib import Path

import pytest
from saved import save_models

import playground
from playground.cli import main
from playground.cli.terminal_view import Screen
from playground.events import Header, Stamped

ROOT = Path(__file__).parents[2]
PROMPT = ["--prompt", "The green bird"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def pair(saved):
    return ["--model", saved.target, "--draft", saved.draft]


@pytest.fixture
def shell(capsys):
    """Carry out a command line: exit code, standard output, standard error."""
    log, level = logging.getLogger("playground"), logging.getLogger("playground").level

    def call(*words: str) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    yield call
    log.setLevel(level)  # commands silence it


@pytest.fixture
def no_models(monkeypatch):
    def load(*names, **how):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(playground, "load", load)


def assert_one_line(err: str) -> None:
    """One error, after the line about the model if it was loaded."""
    lines = [line for line in err.splitlines() if ": a text ends at " not in line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and err.endswith("\n"), err


def show(*events) -> None:
    screen = Screen([Header()])
    for seq, event in enumerate(events):
        screen.show(Stamped(0, seq, 0.0, event))
