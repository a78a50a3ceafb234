"""Models for the Python interface."""
from __future__ import annotations

import pytest
from saved import save_models

import playground

PROMPT = "The green bird"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(saved):
    return playground.load(saved.target, saved.draft, device="cpu")
