"""A linter for the page's modules: every name is defined, imported or a browser's, every import exists and is used.

The modules are parsed by tree-sitter. Names follow the scopes of the language; the order of statements is not checked.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from posixpath import dirname

import tree_sitter_javascript
from tree_sitter import Language, Node, Parser

from playground.page_scripts import COMPONENT, EXPORT, IMPORT, PYTHON, parsed

JAVASCRIPT = Parser(Language(tree_sitter_javascript.language()))
FUNCTIONS = {"function_declaration", "generator_function_declaration", "function_expression", "generator_function",
             "arrow_function", "method_definition"}
SCOPES = FUNCTIONS | {"program", "class", "statement_block", "for_statement", "for_in_statement", "catch_clause",
                      "switch_body"}
NAMED = {"function_declaration", "generator_function_declaration", "class_declaration"}  # in the scope around them
PATTERN = {"identifier", "shorthand_property_identifier_pattern"}
OF_COMPONENTS = {"element", "props", "server", "SOURCE", "trigger", "watch"}
BROWSER = set("""
    Array Blob Boolean CSS CompressionStream CustomEvent DOMException DOMMatrix Date DecompressionStream Error Event
    EventSource FontFace Function Image Infinity IntersectionObserver JSON Map Math MutationObserver NaN Node Number
    Object Promise RangeError ReadableStream ResizeObserver Response Set String TextDecoder TypeError URL
    URLSearchParams Uint16Array Uint8Array WeakMap XMLSerializer addEventListener atob btoa clearTimeout console
    decodeURIComponent document encodeURIComponent fetch getComputedStyle getSelection history innerHeight innerWidth
    localStorage location matchMedia navigator parseFloat parseInt performance requestAnimationFrame scrollTo scrollY
    sessionStorage setTimeout undefined window
""".split())
OF_WINDOW = {"addEventListener", "devicePixelRatio", "fetch", "history", "innerHeight", "playground",
             "removeEventListener"}
"""Names of `window` that modules use: the browser's, and the one by which the page's scripts reach each other."""
MISREAD = {"await"}  # before a bracket the parser may take it for a function
OF_PAGES = {"document", "window", "location", "history", "localStorage", "sessionStorage", "navigator"}
ROOMS = (("components",), ("run",), ("lane",), ("views",), ("views/cache",), ("visit",), ("stage",), ("player",),
         ("benchmark", "classroom", "editor", "game", "library", "models", "page", "play"))
"""Modules import from their own room and those before it; of the last ones, none imports from another."""


class Script:
    """One module: what it defines, and what its statements name that they do not define."""

    def __init__(self, name: str, source: str):
        self.name, self.source, self.module = name, source, parsed(name, source)
        self.tree = JAVASCRIPT.parse(source.encode()).root_node

    @cached_property
    def statements(self) -> list[tuple[set[str], set[str]]]:
        """What each statement defines, and what it names and does not define itself."""
        nodes = [node for node in self.tree.named_children if node.type not in ("import_statement", "comment")]
        return [(set(_defined_by(node)), free_names(node)) for node in nodes]

    @cached_property
    def defined(self) -> set[str]:
        return {name for defined, _ in self.statements for name in defined}

    @cached_property
    def named(self) -> set[str]:
        return {name for _, named in self.statements for name in named}

    @cached_property
    def imported(self) -> dict[str, str]:
        """Imported names with their sources."""
        return {name: source for source, names in self.module.imports.items() for name in names}

    def is_used(self, name: str) -> bool:
        """Whether a statement names this that does not define it."""
        return any(name in named and name not in defined for defined, named in self.statements)


def free_names(node: Node) -> set[str]:
    """What a part of a module names and does not define itself."""
    if node.type in ("identifier", "shorthand_property_identifier"):
        return {_text(node)}
    names = set().union(*(free_names(child) for child in node.named_children)) if node.named_children else set()
    return names - _defined_in(node) if node.type in SCOPES else names


def _defined_in(scope: Node) -> set[str]:
    own = {"arguments"} if scope.type in FUNCTIONS else set()
    given = [scope.child_by_field_name(field) for field in ("parameters", "parameter")]
    if scope.type in ("class", "function_expression"):
        given.append(scope.child_by_field_name("name"))
    if scope.type == "for_in_statement":
        given.append(scope.child_by_field_name("left"))
    bound = {name for node in given if node for name in _bound_by(node)}
    return own | bound | {name for child in scope.named_children for name in _defined_by(child)}


def _defined_by(node: Node) -> Iterator[str]:
    """Names that a statement defines in the scope around it."""
    if node.type in NAMED:
        yield _text(node.child_by_field_name("name"))
    elif node.type in ("export_statement", "lexical_declaration"):
        for child in node.named_children:
            yield from _defined_by(child)
    elif node.type == "variable_declarator":
        yield from _bound_by(node.child_by_field_name("name"))


def _bound_by(pattern: Node) -> Iterator[str]:
    """Names that a pattern binds; defaults and keys bind none."""
    if pattern.type in PATTERN:
        yield _text(pattern)
    for child in pattern.named_children:
        if child != pattern.child_by_field_name("right"):
            yield from _bound_by(child)


def _text(node: Node) -> str:
    return node.text.decode()


def problems(sources: Mapping[str, str], given: set[str], tested: str = "") -> list[str]:
    """What is wrong in these modules, a line each. given: constants that Python provides. tested: a text that may use
    exports, too.
    """
    scripts = {name: Script(name, source) for name, source in sources.items()}
    return [f"{name}: {problem}" for name, script in scripts.items() for problem in (
        *_form(script), *_names(script), *_imports(script, scripts, given), *_exports(script, scripts, tested),
        *_window(script, scripts), *_room(script),
    )]


def _form(script: Script) -> Iterator[str]:
    if script.tree.has_error:
        yield "this is not JavaScript"
    for node in script.tree.named_children:
        text = _text(node)
        if node.type == "import_statement" and not IMPORT.fullmatch(text + "\n"):
            yield f"an import has another form: {text}"
        if node.type == "export_statement" and not EXPORT.match(text):
            yield f"an export has another form: {text.splitlines()[0]}"
    if re.search(r"^\s*var ", script.source, re.MULTILINE):
        yield "`var` is not used: const or let"


def _names(script: Script) -> Iterator[str]:
    for name in sorted(script.named - script.defined - script.imported.keys() - BROWSER - MISREAD):
        yield f"{name} is neither defined nor imported"
    for name in sorted(script.imported.keys() & script.defined):
        yield f"{name} is imported and defined"
    for name in sorted(script.defined - set(script.module.exports)):
        if not script.is_used(name):
            yield f"{name} is not used"


def _imports(script: Script, scripts: Mapping[str, Script], given: set[str]) -> Iterator[str]:
    for source, names in script.module.imports.items():
        known = given if source == PYTHON else OF_COMPONENTS if source == COMPONENT else None
        if known is None and source not in scripts:
            yield f"there is no module {source}"
            continue
        known = set(scripts[source].module.exports) if known is None else known
        yield from (f"{source} does not export {name}" for name in names if name not in known)
        yield from (f"{name} is imported and not used" for name in names if name not in script.named)


def _exports(script: Script, scripts: Mapping[str, Script], tested: str) -> Iterator[str]:
    wanted = {name for other in scripts.values() for name in other.module.imports.get(script.name, ())}
    for name in script.module.exports:
        if name not in wanted and not re.search(rf"\b{name}\b", tested):
            yield f"{name} is exported and not imported"


def _window(script: Script, scripts: Mapping[str, Script]) -> Iterator[str]:
    """The scripts of a page reach each other through `playground`, where each name is set in one place."""
    for name in sorted(set(re.findall(r"\bwindow\??\.(\w+)", script.source)) - OF_WINDOW):
        yield f"window.{name} is not the browser's"
    for name in sorted(set(re.findall(r"(?<![-/\w])playground\??\.(\w+)", script.source))):
        setting = [other.name for other in scripts.values() if re.search(rf"\bplayground\.{name} = ", other.source)]
        if len(setting) > 1 or not setting and name not in OF_PYTHON:
            yield f"playground.{name} is set in {len(setting)} places"


OF_PYTHON = {"restoreSettings", "settingsModel"}  # set by the short scripts of components


def _room(script: Script) -> Iterator[str]:
    here = _place(script.name)
    for source in script.module.files:
        there = _place(source)
        if there is not None and here is not None and (there > here or there == here and dirname(source) != dirname(
                script.name)):
            yield f"{source} is in a room above, or beside"
    if dirname(script.name) == "run" and (of_page := sorted(script.named & OF_PAGES)):
        yield f"what a run is needs no page, and this names {', '.join(of_page)}"


def _place(name: str) -> int | None:
    return next((i for i, rooms in enumerate(ROOMS) if dirname(name) in rooms), None)
