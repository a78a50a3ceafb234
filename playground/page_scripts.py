"""The page's scripts: ES modules in assets/scripts, each joined with what it imports into one script.

A browser gets one script: Gradio runs that of a component as the body of a function, and a saved run plays from a file,
where modules cannot import each other. The order follows from the imports. A module is a function of its own in the
joined script, so what it does not export is its own here, too. Two sources of imports are no files:

    import { element, props, trigger, watch } from "component";   what Gradio gives to the script of a component
    import { VERSION, EVENTS } from "python";                     the constants given to `joined`
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from posixpath import dirname, join, normpath
from typing import Any

from playground.asset_files import ASSETS

SCRIPTS = ASSETS / "scripts"
COMPONENT, PYTHON = "component", "python"
IMPORT = re.compile(r'^import (?:\{\s*(\w+(?:,\s*\w+)*),?\s*\} from )?"([^"]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function|class) (\w+))", re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """A file. imports: the names by the file or other source that they are of, in the order of the file."""

    name: str
    imports: dict[str, tuple[str, ...]]
    exports: tuple[str, ...]
    body: str

    @property
    def files(self) -> list[str]:
        """The modules that it imports."""
        return [source for source in self.imports if source not in (COMPONENT, PYTHON)]

    def joined(self) -> str:
        """The module as a constant that has its exports."""
        imported = [f"const {{ {', '.join(self.imports[name])} }} = {_constant(name)};"
                    for name in self.files if self.imports[name]]
        exported = f"return {{ {', '.join(self.exports)} }};"
        return "\n".join([f"const {_constant(self.name)} = (() => {{", *imported, self.body, exported, "})();"])


def joined(entry: str, constants: Mapping[str, Any] = {}) -> str:
    """One script of the module at a path below assets/scripts and of all it imports; it runs at once.

    `constants` has those that the modules import from "python"; a KeyError names one that is missing.
    """
    return joined_module(read_module(entry), constants)


def joined_module(entry: Module, constants: Mapping[str, Any] = {}) -> str:
    modules = in_order(entry)
    wanted = dict.fromkeys(name for module in modules for name in module.imports.get(PYTHON, ()))
    given = [f"const {name} = {literal(constants[name])};" for name in wanted]
    return "\n".join(["(() => {", '"use strict";', *given, *(module.joined() for module in modules), "})();"])


def in_order(entry: Module) -> list[Module]:
    """A module and all it imports, each after what it imports, as a browser would run them. ValueError for a cycle."""
    return list(_after_imports(entry, (), set()))


def _after_imports(module: Module, path: tuple[str, ...], seen: set[str]) -> Iterator[Module]:
    if module.name in path:
        raise ValueError(f"These modules import each other: {' -> '.join([*path, module.name])}.")
    if module.name in seen:
        return
    seen.add(module.name)
    for imported in module.files:
        yield from _after_imports(read_module(imported), (*path, module.name), seen)
    yield module


@cache
def read_module(name: str) -> Module:
    """A module by its path below assets/scripts."""
    return parsed(name, (SCRIPTS / name).read_text(encoding="utf-8"))


def parsed(name: str, source: str) -> Module:
    """A module of this text. Its imports and exports are statements that begin a line, as above."""
    imports: dict[str, tuple[str, ...]] = {}
    for names, written in IMPORT.findall(source):
        origin = normpath(join(dirname(name), written)) if written.startswith(".") else written
        imports[origin] = (*imports.get(origin, ()), *re.findall(r"\w+", names))
    return Module(name, imports, tuple(EXPORT.findall(source)), EXPORT.sub("", IMPORT.sub("", source)).strip())


def literal(value: Any) -> str:
    """A value as a JavaScript literal that cannot close the script element around it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _constant(name: str) -> str:
    """The constant that holds a module's exports: "views/cache/bars.js" is $views_cache_bars."""
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))
