"""What holds for every test."""
from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Models made on this machine lie elsewhere: no test sees those of the person who runs it, or leaves one behind."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("PLAYGROUND_HOME", str(folder))
    return folder
