"""Fixtures and hooks for all tests."""
from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from playground.contract import find
from playground.errors import Refusal
from support import tiers


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--strategy", metavar="NAME", help="only the tests about one strategy, chosen by their marks")
    group.addoption(
        "--tier",
        choices=("quick", "default", "browser", "full"),
        default="full",
        help="how much is run; see tests/README.md",
    )
    group.addoption(
        "--part",
        type=int,
        choices=range(tiers.PARTS),
        default=tiers.part_of_today(),
        metavar="N",
        help="which part of crossings and pages the default tier takes, instead of that of the last commit's date",
    )


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("strategy"):
        try:
            find(name)
        except Refusal as refusal:
            raise pytest.UsageError(str(refusal)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    tier, part = config.getoption("tier"), config.getoption("part")
    return f"crossings and pages: part {part} of {tiers.PARTS}" if tier == "default" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = config.getoption("strategy")
    return True if name and collection_path.suffix == ".py" and not tiers.concerns(collection_path, name) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collection makes millions of objects that stay. Scanning them again and again would take a third of its time, and
    slow down the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = tiers.chosen(items, *map(config.getoption, ("tier", "part", "strategy")))
    if left := set(items) - set(kept):
        config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = kept
    for item in kept:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def homes(tmp_path_factory) -> Iterator[Path]:
    """New folders; pytest's own factory scans all existing ones for each new one."""
    root = tmp_path_factory.mktemp("homes")
    return (root / str(number) for number in count())


@pytest.fixture(autouse=True)
def home(homes, monkeypatch) -> Path:
    """A separate folder for models made here: tests neither see the user's models nor leave any behind."""
    folder = next(homes)
    folder.mkdir()
    monkeypatch.setenv("PLAYGROUND_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def audible() -> None:
    """Each test hears the log, which commands that were called in this process before have silenced."""
    logging.getLogger("playground").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def app(tmp_path_factory) -> Iterator[str]:
    """Address of one app shared by all tests that only visit it: starting takes a while."""
    from app_page import started  # imports a browser driver
    with started(tmp_path_factory.mktemp("models")) as address:
        yield address
