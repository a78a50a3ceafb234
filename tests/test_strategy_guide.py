"""The first screen of the guide adds a sampler and a cache policy that work, with a test that passes."""
from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from playground.contract import base, find
from support.eviction import alone, course, models

GUIDE = (Path(__file__).parents[1] / "docs" / "add-a-strategy.md").read_text(encoding="utf-8")
SCREEN = GUIDE[:GUIDE.index("\n## ")]
SAMPLER, POLICY, TEST = re.findall(r"```python\n(.*?)```", SCREEN, re.DOTALL)


def run(name: str, source: str, monkeypatch) -> ModuleType:
    """The module of this name and source, as if its file were there."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), vars(module))
    return module


@pytest.fixture
def added(monkeypatch):
    """Both strategies, registered until the end of the test."""
    find("greedy")  # so that all others are registered
    for name, source in (("above_average", SAMPLER), ("every_nth", POLICY)):
        run(f"strategies.{name}", source, monkeypatch)
    yield
    for name in ("above_average", "every_nth"):
        del base.REGISTERED[name]


def test_the_test_of_the_sampler_passes(added, monkeypatch):
    module = run("guide_test", TEST, monkeypatch)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_policy_keeps_every_nth_token_and_the_latest(added):
    _, held = course(alone(find("every_nth")(n=4, recent=3)), models())
    for layers in held[:-1]:
        for head in (head for layer in layers for head in layer):
            end = max(head) + 1
            assert head == {p for p in range(end) if p % 4 == 0 or end - p < 3}


def test_the_first_screen_is_a_screen():
    assert SCREEN.count("\n") < 140
