"""What holds for every test."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def homes(tmp_path_factory) -> Iterator[Path]:
    """Folders that do not exist yet; pytest's own way looks through all there are before it makes one more."""
    root = tmp_path_factory.mktemp("homes")
    return (root / str(number) for number in count())


@pytest.fixture(autouse=True)
def home(homes, monkeypatch) -> Path:
    """Models made on this machine lie elsewhere: no test sees those of the person who runs it, or leaves one behind."""
    folder = next(homes)
    folder.mkdir()
    monkeypatch.setenv("PLAYGROUND_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def app(tmp_path_factory) -> Iterator[str]:
    """Where the app answers, for every test that wants nothing but to visit it: it takes a while to start."""
    from app_page import started  # it brings a browser's driver along
    with started(tmp_path_factory.mktemp("models")) as address:
        yield address
