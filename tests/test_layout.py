"""Who may import whom, type-checking imports included, read from the source."""
from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    ("playground.errors", "playground.events", "playground.run_request", "playground.lane_fields",
     "playground.request_limits", "playground.prompt_form", "playground.weight_changes", "playground.asset_files",
     "playground.page_scripts", "playground.network_errors", "playground.named_arguments", "playground.stopping",
     "playground.loading_bar", "playground.strategy_files"),
    ("playground.confined",),
    ("playground.trace", "playground.grammar"),
    ("playground.player",),
    ("playground.engine",),
    ("playground.contract",),
    ("playground.decoding",),
    ("playground.remote",),
    ("playground.algorithms",),
    ("playground.questions",),
    ("playground.pocket",),
    ("playground.training",),
    ("playground.bench",),
    ("playground.ui",),
    ("playground.cli",),
    ("app",),
)
SEEN_BY_STRATEGIES = ("playground.events", "playground.contract", "playground.errors", "playground.algorithms",
                      "playground.engine.sampling", "playground.engine.host_copies", "playground.confined",
                      "playground.grammar")
LARGEST_ROOM = 15  # files, beside the package's own
LARGER_ROOMS = {"contract", "decoding", "questions/world"}
LARGEST_CLASS = 25  # methods
METHODS = ast.FunctionDef, ast.AsyncFunctionDef


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [ROOT / "app.py", *sorted((ROOT / "playground").rglob("*.py")), *sorted((ROOT / "strategies").rglob("*.py"))]
NAMES = {module_name(path) for path in FILES}


def imported_by(tree: ast.AST, package: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted names a module imports; `from a import b` gives a.b if that is one of our modules, and a otherwise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[:len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}" if f"{module}.{alias.name}" in NAMES else module


def read(path: Path) -> set[str]:
    return set(imported_by(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).parts[:-1]))


@cache  # at the first test: parsing all files takes seconds, which workers without these tests need not spend
def imports_of_all() -> dict[str, set[str]]:
    return {module_name(path): read(path) for path in FILES}


def under(*packages: str) -> dict[str, set[str]]:
    return {name: imports for name, imports in imports_of_all().items() if within(name, *packages)}


def reached(name: str) -> set[str]:
    """Everything a module imports when it runs, and what those of its imports that are ours import."""
    seen, waiting = set(), [name]
    while waiting:
        for imported in run_time_imports(waiting.pop()) - seen:
            seen.add(imported)
            waiting += [imported] if imported in NAMES else []
    return seen


@cache
def run_time_imports(name: str) -> set[str]:
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = WithoutAnnotations().visit(ast.parse(path.read_text(encoding="utf-8")))
    return set(imported_by(tree, path.relative_to(ROOT).parts[:-1]))


class WithoutAnnotations(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)


def level(name: str) -> int | None:
    """The number of a module's layer. The interface of the whole package stands above what makes a run."""
    if name == "playground":
        return 1 + LAYERS.index(("playground.decoding",))
    return next((i for i, packages in enumerate(LAYERS) if within(name, *packages)), None)


def test_every_module_of_the_playground_has_a_layer():
    outside = {"playground.__main__"}
    assert {name for name in under("playground") if level(name) is None} == outside


@pytest.mark.parametrize("packages", LAYERS, ids=lambda packages: packages[0])
def test_imports_point_downward_only(packages):
    here = LAYERS.index(packages)
    for name, imports in under(*packages).items():
        upward = {imported for imported in imports if (level(imported) or 0) > here}
        assert not upward, f"{name} imports {upward}"


@pytest.mark.parametrize("package, other", [("trace", "grammar"), ("grammar", "trace"), ("engine", "trace")])
def test_what_reads_runs_and_what_makes_them_do_not_import_each_other(package, other):
    for name, imports in under(f"playground.{package}").items():
        assert not {imported for imported in imports if within(imported, f"playground.{other}")}, name


def test_no_two_modules_import_each_other():
    """A package's own face is left out: `from playground.contract import x` inside another package is one import."""
    graph = {name: imports & NAMES for name, imports in imports_of_all().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_room_has_few_files():
    playground = ROOT / "playground"
    rooms = Counter(path.parent for path in FILES if path.is_relative_to(playground) and path.stem != "__init__")
    larger = {str(room.relative_to(playground)) for room, count in rooms.items() if count > LARGEST_ROOM}
    assert larger == LARGER_ROOMS


@pytest.mark.slow
def test_a_class_has_few_methods():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    larger = {cls.name for cls in classes if sum(isinstance(part, METHODS) for part in cls.body) > LARGEST_CLASS}
    assert not larger


@pytest.mark.slow
def test_no_two_classes_have_one_name():
    modules = [ast.parse(path.read_text(encoding="utf-8")).body for path in FILES]
    names = Counter(node.name for body in modules for node in body if isinstance(node, ast.ClassDef))
    # the running lane has the name of what it implements, the contract's lane
    assert [name for name, count in names.items() if count > 1] == ["Lane"]


def test_strategies_see_only_the_contract_and_shared_algorithms():
    for name, imports in under("strategies").items():
        strange = {imported for imported in imports if within(imported, "playground")
                   and not within(imported, *SEEN_BY_STRATEGIES)} - {"playground.engine"}
        assert not strange, f"{name} imports {strange}"


def test_strategies_import_neither_each_other_nor_the_page():
    for name, imports in under("strategies").items():
        own = ".".join(name.split(".")[:3])
        strange = {imported for imported in imports if within(imported, "strategies", "app", "gradio", "spaces")}
        assert not {imported for imported in strange if not within(imported, own)}, name


@pytest.mark.parametrize("name", ["playground.events", "playground.trace", "playground.questions.questions"])
def test_events_traces_and_answers_are_read_without_torch_and_gradio(name):
    assert not {imported for imported in reached(name) if within(imported, "torch", "transformers", "gradio")}


@pytest.mark.slow
def test_listing_strategies_does_not_import_transformers():
    for name in under("strategies"):
        assert not {imported for imported in reached(name) if within(imported, "transformers")}, name


def test_gradio_is_imported_by_the_page_only():
    for name, imports in imports_of_all().items():
        assert within(name, "playground.ui", "app") or not {i for i in imports if within(i, "gradio")}, name


@pytest.mark.slow
def test_the_python_interface_imports_nothing_of_the_page():
    assert not {imported for imported in reached("playground") if within(imported, "playground.ui", "gradio")}


def test_no_command_but_the_one_that_opens_the_page_imports_gradio():
    for name in under("playground.cli").keys() - {"playground.cli.serve"}:
        assert not {imported for imported in reached(name) if within(imported, "gradio")}, name


def test_the_page_names_models_but_runs_them_only_through_a_session():
    naming = ("playground.engine.checkpoint", "playground.engine.loading.load")
    naming += ("playground.engine.loading.model_sizes", "playground.engine.memory_bandwidth")
    naming += ("playground.engine.device_memory", "playground.engine.heap_memory")  # need no model
    for name, imports in under("playground.ui").items():
        engine = {imported for imported in imports if within(imported, "playground.engine")}
        assert all(within(imported, *naming) for imported in engine), name
        assert not {imported for imported in imports if within(imported, "transformers")}, name


@pytest.mark.parametrize("source, package, imports", [
    ("import a.b as c", "p", {"a.b"}),
    ("from playground.engine import sampling", "p", {"playground.engine.sampling"}),
    ("from playground.errors import Refusal", "p", {"playground.errors"}),
    ("from .a import b", "p.q", {"p.q.a"}),
    ("def f():\n    import a", "p", {"a"}),
    ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", "p", {"a", "b"}),
])
def test_imports_are_read_wherever_they_are_written(source, package, imports):
    assert set(imported_by(ast.parse(source), tuple(package.split(".")))) == imports


def test_type_checking_imports_do_not_count_at_run_time():
    tree = WithoutAnnotations().visit(ast.parse("if TYPE_CHECKING:\n    import a\nelse:\n    import b"))
    assert set(imported_by(tree)) == {"b"}
