"""What the confined child does that lists the attributes of a value: static analysis by jedi, of a program that a
visitor or a model wrote.

jedi follows `sys.path` changes and imports in the program. Here it finds no file but the stubs of the standard library
that came with it, which are read once, before any program; no module is imported for a program.
"""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jedi
import parso
from jedi.api.environment import InterpreterEnvironment
from jedi.file_io import FileIO
from jedi.inference.compiled.subprocess import InferenceStateSameProcess
from jedi.inference.gradual import typeshed

from playground.algorithms.programs.attribute_bounds import BOUNDS as BOUNDS

MEMBERS = ("function", "property", "statement", "instance", "class", "module")
NOWHERE = jedi.Project("/nowhere", sys_path=[], smart_sys_path=False)
STUBS = Path(typeshed.TYPESHED_PATH) / "stdlib"
MODULES = (
    "os", "sys", "re", "json", "math", "random", "collections", "itertools", "functools", "datetime", "dataclasses",
    "typing", "enum",
)
VALUES = ("''", "[]", "{}", "0", "re.compile('')", "os.path")


class StubFile(FileIO):
    """A stub in memory; any other file does not exist."""

    texts: dict[Path, bytes] = {}

    def read(self) -> bytes:
        try:
            return self.texts[Path(self.path)]
        except KeyError:
            raise FileNotFoundError(self.path) from None

    def get_last_modified(self) -> float | None:
        return 0.0 if Path(self.path) in self.texts else None


class StubsOnly(InferenceStateSameProcess):
    """What jedi asks of Python: no module is found but the builtins, of which it needs True, False and None."""

    def get_module_info(self, full_name: str, **where: Any) -> tuple[None, bool | None]:
        return None, False if full_name == "builtins" else None

    def iter_module_names(self, paths: list[str]) -> list[str]:
        return [name for path in paths for name in stubs_in(Path(path))]

    def get_builtin_module_names(self) -> tuple[str, ...]:
        return ()


class Environment(InterpreterEnvironment):
    def get_sys_path(self) -> list[str]:
        return []

    def get_inference_state_subprocess(self, inference_state: Any) -> StubsOnly:
        return StubsOnly(inference_state)


def warm() -> None:
    """Read all stubs, and parse those of the modules that programs use most."""
    StubFile.texts.update((path, path.read_bytes()) for path in STUBS.rglob("*.pyi"))
    typeshed.FileIO = StubFile
    typeshed._create_stub_map = stub_map
    parso.cache._load_from_file_system = lambda *where, **options: None  # pickles of other programs
    parso.cache._save_to_file_system = parso.cache._remove_cache_and_update_lock = lambda *what, **options: None
    for value in (*VALUES, *MODULES):
        members(f"import {', '.join(MODULES)}\n{value}.", "")


def stubs_in(folder: Path) -> Iterator[str]:
    """Names of the modules in a folder of the stubs."""
    for path in StubFile.texts:
        if path.parent == folder and path.stem != "__init__":
            yield path.stem
        elif path.parent.parent == folder and path.stem == "__init__":
            yield path.parent.name


def stub_map(directory: Any) -> dict[str, Any]:
    """For jedi: the stubs of a folder, by the name of the module."""
    folder = Path(directory.path)
    paths = {name: folder / name / "__init__.pyi" for name in stubs_in(folder)}
    found = {name: path if path in StubFile.texts else folder / f"{name}.pyi" for name, path in paths.items()}
    return {name: typeshed.PathInfo(str(path), False) for name, path in found.items()}


def learn(lesson: Any) -> None:
    """There are no lessons."""


def answer(order: list[str], learned: None) -> list[str] | None:
    """Attributes of the value before the dot that ends a program; None if the analysis fails."""
    try:
        return members(*order)
    except Exception:  # an incomplete program can raise anything
        return None


def members(program: str, below: str) -> list[str]:
    """Attributes of the value before the dot that ends a program, by static analysis; empty if it is unknown."""
    end = parso.parse(program).get_last_leaf()
    dot = end.get_previous_leaf()
    if end.prefix or dot is None or dot.value != ".":  # the dot belongs to a comment, a string or a number
        return []
    lines = parso.split_lines(program)
    script = jedi.Script(f"{program}\n{below}", project=NOWHERE, environment=Environment())
    return sorted({entry.name for entry in script.complete(len(lines), len(lines[-1])) if entry.type in MEMBERS})
