"""`lm` is described once, in the contract: what strategies use of it is there, and the running lane has all of it."""
from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from playground.contract import Lane, lane
from playground.decoding.lane import Lane as RunningLane

ROOT = Path(__file__).parents[1]
PARTS = [lane.LaneRandomness, lane.LaneText, lane.LaneModels, lane.LaneBranches, lane.LaneRequests]
FACTS = {name for part in PARTS for name in part.__annotations__}
METHODS = {name for part in PARTS for name in vars(part) if not name.startswith("_")}
MOST = 25  # public methods of a class
ROOMS = ("playground/contract", "playground/decoding/lane", "playground/decoding/stream")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def members_of_lm(path: Path) -> set[str]:
    """What the functions of a file whose `lm` is a Lane read of it."""
    functions = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, ast.FunctionDef) and any(is_lane(argument) for argument in node.args.args)]
    return {node.attr for function in functions for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lm"}


def is_lane(argument: ast.arg) -> bool:
    return argument.arg == "lm" and argument.annotation is not None and ast.unparse(argument.annotation) == "Lane"


def test_strategies_use_nothing_of_a_lane_that_the_contract_does_not_describe():
    used = set().union(*map(members_of_lm, sources("strategies", "playground/algorithms")))
    assert len(used) > 50 and used <= FACTS | METHODS


@pytest.mark.parametrize("part", PARTS, ids=lambda cls: cls.__name__)
def test_the_running_lane_implements_what_the_contract_describes(part):
    for name, described in vars(part).items():
        if name.startswith("_"):
            continue
        made = getattr(RunningLane, name)
        assert made is not described and getattr(Lane, name) is described
        assert (described.__doc__ if isinstance(described, property) else inspect.getdoc(described)), name
        if not isinstance(described, property):
            assert shape(made) == shape(described), name


def shape(method) -> list[tuple]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]


def classes(*folders: str) -> list[tuple[str, ast.ClassDef]]:
    return [(path.name, node) for path in sources(*folders)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]


def test_a_class_of_the_contract_or_a_lane_has_few_public_methods():
    for file, cls in classes(*ROOMS):
        public = {node.name for node in cls.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
        assert len(public) <= MOST, f"{file}: {cls.name} has {len(public)}"


def test_a_file_of_these_rooms_has_fewer_than_400_lines():
    long = {path.name for path in sources(*ROOMS) if path.read_text(encoding="utf-8").count("\n") >= 400}
    assert long <= {"lane_config.py"}
