"""The page's modules: their rules, and that a joined script is what a browser would run of them."""
from __future__ import annotations

from collections import Counter
from pathlib import Path
from posixpath import dirname

import pytest
from chromium import chromium

from playground.page_scripts import SCRIPTS, joined_module, parsed
from playground.player import live_view_assets
from playground.ui.play import lane_editor
from support.script_rules import problems

TESTS = Path(__file__).parent
LARGEST_ROOM = 15
LONGEST = 400


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    files = sorted(SCRIPTS.rglob("*.js"))
    return {path.relative_to(SCRIPTS).as_posix(): path.read_text(encoding="utf-8") for path in files}


def constants() -> set[str]:
    """What Python gives to any script."""
    return {*live_view_assets.constants(), *lane_editor.constants(), "GLOSSARY", "IN_DARK", "LESSONS", "KNOWN"}


def test_the_modules_keep_the_rules(sources):
    tested = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.glob("*.py") if path != Path(__file__))
    assert len(sources) > 60 and problems(sources, constants(), tested) == []


def test_a_room_has_few_modules_and_a_module_few_lines(sources):
    assert not {room for room, count in Counter(map(dirname, sources)).items() if count > LARGEST_ROOM}
    assert not {name for name, text in sources.items() if len(text.splitlines()) > LONGEST}


# --- the rules, each with a module that breaks it ---

RIGHT = {
    "run/sums.js": 'export function sum(values) {\n  return values.reduce((total, one) => total + one, 0);\n}\n',
    "lane/lane.js": ('import { trigger } from "component";\nimport { CLOCK } from "python";\n'
                     'import { sum } from "../run/sums.js";\n\n'
                     "for (const [key, { at = CLOCK, ...rest }] of Object.entries({ a: [1] })) "
                     "trigger(key, { at, rest, all: sum([1]) });\n"),
}


def found(**changed: str) -> list[str]:
    """The problems of the two modules after texts of one were replaced."""
    (name, (before, after)), = changed.items()
    path = {"sums": "run/sums.js", "lane": "lane/lane.js"}[name]
    assert before in RIGHT[path]
    return problems({**RIGHT, path: RIGHT[path].replace(before, after)}, {"CLOCK"})


def test_two_modules_that_keep_the_rules_have_no_problem():
    assert problems(RIGHT, {"CLOCK"}) == []


@pytest.mark.parametrize("changed, said", [
    ({"lane": ("sum([1])", "summed([1])")}, "summed is neither defined nor imported"),
    ({"lane": ("at, rest", "at, count")}, "count is neither defined nor imported"),
    ({"sums": ("(total, one) =>", "(total) =>")}, "one is neither defined nor imported"),
    ({"lane": ("all: sum([1])", "all: 1")}, "sum is imported and not used"),
    ({"lane": ("{ sum } from", "{ sum, mean } from")}, "run/sums.js does not export mean"),
    ({"lane": ("{ CLOCK } from", "{ CLOCK, BEAT } from")}, "python does not export BEAT"),
    ({"lane": ("sums.js", "figures.js")}, "there is no module run/figures.js"),
    ({"lane": ("{ sum }", "{ sum as total }")}, "an import has another form"),
    ({"sums": ("export function", "export default function")}, "an export has another form"),
    ({"sums": ("export function", "const more = 1;\nexport function")}, "more is not used"),
    ({"sums": ("export function", "export const more = 1;\n\nexport function")}, "more is exported and not imported"),
    ({"sums": ("export function", 'import { at } from "../lane/lane.js";\nexport function')}, "a room above"),
    ({"sums": ("return", "document.title = 'a'; return")}, "needs no page, and this names document"),
    ({"lane": ("trigger(key", "playground.tell(key")}, "playground.tell is set in 0 places"),
    ({"lane": ("trigger(key", "window.tell(key")}, "window.tell is not the browser's"),
    ({"lane": ("for (", "for ((")}, "this is not JavaScript"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_broken_rule_is_found(changed, said):
    assert any(said in problem for problem in found(**changed))


# --- joining ---

@pytest.fixture(scope="module")
def window():
    with chromium() as browser:
        yield browser.new_page()


def test_a_joined_script_runs_each_module_once_after_what_it_imports_and_keeps_its_names_to_itself(window, tmp_path,
                                                                                                   monkeypatch):
    (tmp_path / "one.js").write_text('import "./log.js";\nimport { note } from "./log.js";\n\nconst own = "one";\n'
                                     "note(own);\n\nexport class One {}\n")
    (tmp_path / "log.js").write_text("export const notes = [];\n\nexport async function later() {}\n\n"
                                     "export function note(text) {\n  notes.push(text);\n}\n")
    monkeypatch.setattr("playground.page_scripts.SCRIPTS", tmp_path)
    entry = parsed("main.js", 'import { GIVEN } from "python";\nimport { One } from "./one.js";\n'
                              'import { note, notes } from "./log.js";\n\nconst own = GIVEN;\nnote(own);\n'
                              "window.notes = [...notes, new One().constructor.name, typeof globalThis.own];\n")
    window.evaluate(joined_module(entry, {"GIVEN": "</script>"}))
    assert window.evaluate("notes") == ["one", "</script>", "One", "undefined"]
    assert "</script>" not in joined_module(entry, {"GIVEN": "</script>"})


def test_a_constant_that_python_does_not_give_and_a_circle_of_imports_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr("playground.page_scripts.SCRIPTS", tmp_path)
    with pytest.raises(KeyError, match="MISSING"):
        joined_module(parsed("main.js", 'import { MISSING } from "python";\n'))
    (tmp_path / "turn.js").write_text('import "./round.js";\n')
    (tmp_path / "round.js").write_text('import "./turn.js";\n')
    with pytest.raises(ValueError, match="round.js -> turn.js -> round.js"):
        joined_module(parsed("main.js", 'import "./round.js";\n'))
