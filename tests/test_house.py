"""The house rules: who may import whom, and what every strategy tells about itself."""
from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from playground.contract import GUARANTEES, KINDS, Strategy, discover, make

ROOT = Path(__file__).parents[1]


# --- imports, read from the source ---

@dataclass
class Module:
    """A source file of the project and the dotted names it imports; imports that only serve annotations do not count.
    """

    name: str
    imports: set[str]

    def reaches(self, *packages: str) -> set[str]:
        return {imported for imported in self.imports if within(imported, *packages)}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def read(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = parts[:-1]
    tree = WithoutAnnotations().visit(ast.parse(path.read_text(encoding="utf-8")))
    imports = {name for node in ast.walk(tree) for name in imported_by(node, package)}
    return Module(".".join(package if parts[-1] == "__init__" else parts), imports)


class WithoutAnnotations(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)


def imported_by(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """`from a import b` gives a.b, for b may be a module; a relative import is resolved from `package`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = [*package[:len(package) - node.level + 1]] if node.level else []
        base += [node.module] if node.module else []
        return [".".join([*base, alias.name]) for alias in node.names]
    return []


FILES = [ROOT / "app.py", *sorted((ROOT / "playground").rglob("*.py")), *sorted((ROOT / "strategies").rglob("*.py"))]
MODULES = {module.name: module for module in map(read, filter(Path.exists, FILES))}


def under(*packages: str) -> list[Module]:
    return [module for module in MODULES.values() if within(module.name, *packages)]


def closure(name: str) -> set[str]:
    """Everything a module imports, and what those of its imports that are ours import."""
    seen, waiting = set(), [name]
    while waiting:
        for imported in MODULES[waiting.pop()].imports - seen:
            seen.add(imported)
            ours = next((known for known in (imported, imported.rpartition(".")[0]) if known in MODULES), None)
            waiting += [ours] if ours else []
    return seen


def test_strategies_see_only_the_contract():
    allowed = (
        "playground.events",
        "playground.contract",
        "playground.errors",
        "playground.parts",
        "playground.engine.sampling",
    )
    for module in under("strategies"):
        strange = {name for name in module.reaches("playground") if not within(name, *allowed)}
        assert not strange, f"{module.name} imports {strange}"


def test_strategies_know_neither_each_other_nor_the_page():
    for module in under("strategies"):
        assert not module.reaches("strategies", "app", "gradio", "spaces"), module


def test_the_engine_knows_neither_page_nor_strategies():
    for module in under("playground.engine"):
        assert not module.reaches("playground.ui", "strategies", "app"), module


@pytest.mark.parametrize("name", ["playground.events", "playground.trace"])
def test_events_and_traces_are_read_without_torch_and_gradio(name):
    assert not [imported for imported in closure(name) if within(imported, "torch", "transformers", "gradio")]


def test_to_offer_strategies_nobody_waits_for_the_transformers_library():
    for module in under("strategies"):
        assert not [imported for imported in closure(module.name) if within(imported, "transformers")], module


def test_gradio_lives_in_the_page():
    for module in MODULES.values():
        assert within(module.name, "playground.ui", "app") or not module.reaches("gradio"), module


def test_the_page_names_models_but_runs_them_only_through_a_session():
    naming = ("playground.engine.catalogue", "playground.engine.load", "playground.engine.hub_files")
    for module in under("playground.ui"):
        engine = {imported for imported in module.imports if within(imported, "playground.engine")}
        assert all(within(imported, *naming) for imported in engine), module
        assert not module.reaches("transformers"), module


@pytest.mark.parametrize("source, package, imports", [
    ("import a.b as c", "p", {"a.b"}),
    ("from a import b, c", "p", {"a.b", "a.c"}),
    ("from .a import b", "p.q", {"p.q.a.b"}),
    ("from .. import a", "p.q", {"p.a"}),
    ("def f():\n    import a", "p", {"a"}),
    ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", "p", {"b"}),
    ("if typing.TYPE_CHECKING:\n    import a", "p", set()),
])
def test_imports_are_read_wherever_they_stand(source, package, imports):
    tree = WithoutAnnotations().visit(ast.parse(source))
    assert {name for node in ast.walk(tree) for name in imported_by(node, tuple(package.split(".")))} == imports


# --- the registry ---

def found() -> list[type[Strategy]]:
    return [cls for cls in discover().values() if within(cls.__module__, "strategies")]


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

TESTS = sorted((ROOT / "tests").glob("test_*.py"))
UNPROVEN = {
    "adacad", "adadec", "aded", "aggressive", "anchored", "asap", "awrs", "beam_search", "best_of_n", "bild",
    "caad", "cachegen", "cad", "choice", "cntp", "contrastive_search", "d2o", "dapq", "del_exit",
    "diverse_beam_search", "dola", "draft_model", "dry", "dyspec", "ead", "ems", "epsilon", "eta", "exact_extract",
    "fastkv", "first_finish", "foreal", "frequency_penalty", "gbnf", "gear", "gencls_ppl", "greedy", "greedy_match",
    "h2o", "hierarchical", "hyperfitting", "icd", "in_context_navigation", "jacobi", "json_schema", "k_seq",
    "key_norm", "kivi", "knn_lm", "lark", "layer_skip", "layer_skip_draft", "lol", "lookahead", "loopserve",
    "masked_diffusion", "mbr", "min_p", "mirostat", "momentum", "monitors", "mustafar", "no_repeat_ngram",
    "omnidraft", "oracle_keep", "pac_sets", "pearl", "pg_td", "prefixkv", "presence_penalty", "prompt_lookup",
    "pyramidkv", "random_keep", "rapid", "rasd", "reflective", "regex", "rejection", "repetition_penalty", "rsd_c",
    "rsd_s", "sample", "sample_match", "scaling_laws", "self_consistency", "sink_window", "smartspec", "smc",
    "smc_steering", "snapkv", "specdec_plus_plus", "spectr", "speculative", "stand", "static", "suffix_decoding",
    "superposed", "syncode", "temperature", "token_recycling", "top_h", "top_k", "top_n_sigma", "top_p", "tova",
    "typical", "uncomp",
}
"""Strategies without a test against an independent oracle, or without a wrong variant that such a test refuses.

It only gets shorter: nothing new is added, and a strategy that has both is taken out.
"""


def names_marked(mark: str) -> set[str]:
    """Names in all marks of this kind, `@pytest.mark.oracle("top_p")`, wherever a test file puts them."""
    return {name for path in TESTS for call in calls_of(path, mark) for name in map(ast.literal_eval, call.args)}


def calls_of(path: Path, mark: str) -> list[ast.Call]:
    calls = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func) == f"pytest.mark.{mark}"]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def unproven() -> set[str]:
    return {cls.name for cls in found()} - (names_marked("oracle") & names_marked("refuses"))


def test_every_strategy_has_an_oracle_and_a_wrong_variant_that_is_refused():
    new = unproven() - UNPROVEN
    assert not new, f"mark a test of each with pytest.mark.oracle, and one with pytest.mark.refuses: {sorted(new)}"


def test_what_has_an_oracle_and_a_refused_variant_leaves_the_list():
    proven = UNPROVEN - unproven()
    assert not proven, f"take these out of UNPROVEN: {sorted(proven)}"


@pytest.mark.parametrize("mark", ["strategy", "oracle", "refuses"])
def test_marks_name_strategies_that_exist(mark):
    assert names_marked(mark) <= discover().keys()


def test_no_test_file_imports_another():
    """What two of them share lies in tests/support."""
    for path in [*TESTS, *(ROOT / "tests" / "support").glob("*.py")]:
        imports = {name for node in ast.walk(parsed(path)) for name in imported_by(node, ())}
        assert not [name for name in imports if name.startswith("test_")], path.name
