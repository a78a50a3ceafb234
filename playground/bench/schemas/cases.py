"""Reads schemas from a folder: one per file, as in JSONSchemaBench, or with instances, as in its MaskBench and the
official Test Suite.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from playground.errors import Refusal

LAYOUTS = "a schema, an object with schema and tests, or a list of such objects"


class Instance(NamedTuple):
    """Data that is valid under its schema, or is not."""

    description: str
    data: Any
    valid: bool


@dataclass(frozen=True)
class Case:
    """A schema with its instances; `group` is its file in a test suite, or its folder in a collection."""

    name: str
    group: str
    schema: Any
    instances: tuple[Instance, ...] = ()

    @property
    def source(self) -> str:
        return json.dumps(self.schema, ensure_ascii=False)


def read_cases(folder: str) -> list[Case]:
    """Every schema of every .json below a folder, or of one file; raises Refusal."""
    root = Path(folder)
    files = [root] if root.is_file() else sorted(root.rglob("*.json"))
    if not files:
        raise Refusal(f"There is no .json in {folder}: name a folder of schemas.", "folder")
    return [case for file in files for case in _cases(file, str(file.relative_to(root)) if file != root else file.name)]


def _cases(file: Path, name: str) -> list[Case]:
    try:
        read = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as reason:
        raise Refusal(f"{name} cannot be read as JSON ({reason}): correct it, or leave it out.", "folder") from None
    if isinstance(read, list):
        return [
            _with_instances(part, f"{name}: {_title(part, number)}", file.stem) for number, part in enumerate(read, 1)
        ]
    group = file.parent.name
    return [_with_instances(read, name, group) if _has_instances(read) else Case(name, group, read)]


def _has_instances(read: Any) -> bool:
    return isinstance(read, dict) and "schema" in read and isinstance(read.get("tests"), list)


def _title(part: Any, number: int) -> str:
    return str(part.get("description", number)) if isinstance(part, dict) else str(number)


def _with_instances(part: Any, name: str, group: str) -> Case:
    if not _has_instances(part) or not all(
        isinstance(test, dict) and {"data", "valid"} <= test.keys() for test in part["tests"]
    ):
        raise Refusal(f"{name} has none of the known layouts: a file contains {LAYOUTS}.", "folder")
    instances = (
        Instance(str(test.get("description", number)), test["data"], bool(test["valid"]))
        for number, test in enumerate(part["tests"], 1)
    )
    return Case(name, group, part["schema"], tuple(instances))
