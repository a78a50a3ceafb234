"""The declarations of every strategy, and what its tests must include."""
from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from playground.contract import GUARANTEES, KINDS, Strategy, discover, find, make

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").glob("test_*.py"))


# --- the registry ---

def found() -> list[type[Strategy]]:
    return [cls for cls in discover().values() if cls.__module__.startswith("strategies.")]


every_strategy = pytest.mark.parametrize("cls", found(), ids=lambda cls: cls.name)


@every_strategy
def test_a_strategy_says_what_it_does_and_where_it_comes_from(cls):
    written = cls.__dict__["__doc__"] or ""
    assert written and not written.startswith(f"{cls.__name__}("), "it has no docstring of its own"
    assert len(cls.summary()) >= 20 and cls.title and cls.sheet
    assert cls.paper or "baseline" in written.lower(), "name a paper, or say in the docstring that it is a baseline"


@every_strategy
def test_a_strategy_has_a_kind_and_a_guarantee(cls):
    assert cls.kind in KINDS
    assert cls.guarantee and set(cls.guarantee) <= set(GUARANTEES)


@every_strategy
def test_knobs_have_help_and_defaults_within_their_limits(cls):
    for knob in cls.knobs():
        assert knob.help, f"{knob.name} has no help"
        assert knob.read(knob.default) == knob.default
        assert isinstance(knob.default, knob.type) or (knob.type is float and isinstance(knob.default, int))


@every_strategy
def test_slots_are_filled_with_a_strategy_of_their_kind(cls):
    built = make(cls.name)
    for name, kind in cls.slots().items():
        assert getattr(built, name).kind == kind


# --- the tests ---

def names_marked(mark: str, paths: Iterable[Path] = TESTS) -> set[str]:
    return {name for path in paths for call in calls_of(path, mark) for name in map(ast.literal_eval, call.args)}


def calls_of(path: Path, mark: str) -> list[ast.Call]:
    calls = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func) == f"pytest.mark.{mark}"]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["oracle", "refuses"])
def test_every_strategy_has_an_oracle_and_a_wrong_variant_that_is_refused(mark):
    lacking = {cls.name for cls in found()} - names_marked(mark)
    assert not lacking, f"mark a test of each with pytest.mark.{mark}: {sorted(lacking)}"


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["oracle", "refuses"])
def test_a_strategy_has_them_in_a_file_of_its_own(mark):
    """Tests of several strategies at once have files by topic."""
    lacking = [cls.name for cls in found() if cls.name not in names_marked(mark, [own_file(cls)])]
    assert not lacking, f"move the tests that are marked with pytest.mark.{mark} to their own files: {lacking}"


def own_file(cls: type[Strategy]) -> Path:
    return ROOT / "tests" / f"test_strategies_{cls.name}.py"


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["strategy", "oracle", "refuses"])
def test_marks_name_strategies_that_exist(mark):
    assert names_marked(mark) <= discover().keys()


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(parsed(path)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.slow
def test_no_test_file_imports_another():
    for path in [*TESTS, *(ROOT / "tests" / "support").glob("*.py")]:
        assert not [name for name in imported_by(path) if name.split(".")[-1].startswith("test_")], path.name


# --- the files ---

SOURCES = ("md", "py", "js", "css")
MERGE_MARKERS = ("<<<<<<< ", ">>>>>>> ")


def test_no_file_has_markers_of_an_unfinished_merge():
    written = [*ROOT.glob("*.md"), *(file for kind in SOURCES for file in ROOT.glob(f"[a-z]*/**/*.{kind}"))]
    marked = [path for path in written if any(line.startswith(MERGE_MARKERS) for line in _lines(path))]
    assert len(written) > 500 and not marked


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


# --- what is missing of a paper ---

MISSING = {
    "blockffn": "parts of a finished one",
    "caad": "not bundled",
    "cache_augmentation": "did not help",
    "ems": "Left out",
    "entropy_bound": "No bundled model",
    "explore_then_exploit": "Reconstructed from the abstract",
    "idp": "did not help",
    "lexical_units": "No bundled model",
    "lol": "Reconstructed from the abstract",
    "loopserve": "Reconstructed from the abstract",
    "m2r2": "Left out",
    "mtp": "No bundled model",
    "parallelbench": "are left out",
    "refrag": "not trained further",
    "ssm_dynamics": "No bundled model",
    "cross_attention": "No bundled model is one",
    "wedlm": "No bundled model",
}


def test_the_editor_says_which_part_of_a_paper_is_missing():
    from playground.ui.play.lane_editor import catalogue_of  # late, since it imports gradio
    shown = {declared["name"]: declared["summary"] for declared in catalogue_of(discover())}
    silent = [name for name, says in MISSING.items() if says not in shown.get(name, find(name).summary())]
    assert not silent
