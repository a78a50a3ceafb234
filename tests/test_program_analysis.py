"""The analysis behind `monitors`: what it knows, and what a hostile program does not learn, take or hold up."""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag
from time import perf_counter

import pytest
import torch
from tables import TableModel

import playground
from playground.algorithms.programs import program_attributes as client
from playground.algorithms.programs.attribute_bounds import BOUNDS
from playground.algorithms.programs.program_attributes import analyst, attributes
from playground.confined.child import ConfinedChild
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Figure
from playground.ui.server.worker import Worker
from support.confined_attacks import BOUNDS as SHORT

ACCOUNT = (
    "class Account:\n    def __init__(self):\n        self.balance = 1\n    def deposit(self, sum):\n       "
    " pass\naccount = Account()\n"
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    names("''.")


def names(program: str, below: str = "") -> list[str]:
    found = attributes(program, below, BOUNDS.cpu_seconds)
    return found or []


def public(program: str, below: str = "") -> list[str]:
    return [name for name in names(program, below) if not name.startswith("_")]


# --- what it knows ---

@pytest.mark.parametrize(
    "program",
    [
        ACCOUNT + "account.",
        ACCOUNT + "print(account.",
        ACCOUNT + "for a in [account]:\n    a.",
        ACCOUNT + "def f(x: Account):\n    return [x.",
    ],
)
def test_attributes_of_a_class_of_the_program_are_known_in_half_written_code(program):
    assert public(program) == ["balance", "deposit"]


def test_code_below_the_cursor_counts():
    assert public("def f(x: 'Later'):\n    return x.", "\nclass Later:\n    size = 1\n") == ["size"]


@pytest.mark.parametrize(
    "program, known",
    [
        ("import math\nmath.", "sqrt"),
        ("import os.path as p\np.", "join"),
        ("import xml.etree.ElementTree as e\ne.", "parse"),
        ("import xml\nxml.", "etree"),
        ("from collections import namedtuple\nN = namedtuple('N', 'first second')\nN(1, 2).", "second"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nP(1).", "x"),
        ("True.", "bit_length"),
        ("{}.", "setdefault"),
        ("import re\nre.compile('a').", "fullmatch"),
    ],
)
def test_the_standard_library_and_the_program_are_known(program, known):
    assert known in public(program)


def test_installed_packages_are_unknown_to_the_analysis():
    assert names("import torch\ntorch.") == [] and names("import jedi\njedi.") == []


@pytest.mark.parametrize(
    "program",
    ["x = 3.", "# see x.", "(1,\n # x.", "'a text.", '"""A text.', "...", "f'a.", "def f(x):\n    x.", "The end.", "."],
)
def test_other_dots_and_unknown_objects_give_no_names(program):
    assert names(program) == []


def test_analyses_of_several_visitors_do_not_mix_up_their_answers():
    asked = {
        f"import {module}\n{module}.": name
        for module, name in [("math", "sqrt"), ("json", "dumps"), ("os", "getcwd"), ("re", "compile")]
    }
    with ThreadPoolExecutor(len(asked)) as visitors:
        found = list(visitors.map(names, asked))
    assert [name in names for name, names in zip(asked.values(), found)] == [True] * len(asked)


# --- what a program does not learn ---

SECRETS = ("swordfish", "postgres", "hunter2", "API_TOKEN", "hidden_module", "tulip")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of the server with settings, a package, and files of other kinds."""
    made = tmp_path_factory.mktemp("server")
    (made / "settings_secret.py").write_text(
        "DATABASE_PASSWORD = 'swordfish'\nAPI_TOKEN = 1\nBASES = {'postgres': 'tulip'}\n"
        "def key():\n    return 'hunter2'\nclass Keys:\n    hunter2 = 1\n"
    )
    (made / "settings_secret.pyi").write_text("API_TOKEN: int\nswordfish: int\n")
    (made / "package").mkdir()
    (made / "package" / "__init__.py").write_text("from . import hidden_module\n")
    (made / "package" / "hidden_module.py").write_text("swordfish = 1\n")
    (made / "thing-stubs").mkdir()
    (made / "thing-stubs" / "__init__.pyi").write_text("swordfish: int\n")
    (made / "swordfish.txt").write_text("x")
    (made / "archive.zip").write_bytes(b"PK\x05\x06" + bytes(18))
    return made


SHOWN = "from collections import namedtuple\n"
READS = {
    "a constant": SHOWN + "from settings_secret import DATABASE_PASSWORD as d\nN = namedtuple('N', d)\nN.",
    "a constant of an instance": SHOWN + "from settings_secret import DATABASE_PASSWORD as d\nnamedtuple('N', d)(1).",
    "the values of a dict": SHOWN + "from settings_secret import BASES\nN = namedtuple('N', BASES['postgres'])\nN.",
    "the keys of a dict": SHOWN + "from settings_secret import BASES\nN = namedtuple('N', list(BASES))\nN.",
    "the result of a function": SHOWN + "from settings_secret import key\nN = namedtuple('N', key())\nN.",
    "the names of a module": "import settings_secret\nsettings_secret.",
    "the names of all": "from settings_secret import *\nKeys.",
    "the names of a class": "from settings_secret import Keys\nKeys().",
    "the modules of a package": "import package\npackage.",
    "a module of a package": "import package.hidden_module as m\nm.",
    "a stub of a package": "import thing\nthing.",
    "a relative import": "from . import settings_secret as s\ns.",
    "a relative import far above": "from ...... import settings_secret as s\ns.",
    "the folder as a namespace": "import {name}\n{name}.",
    "the file names of the folder": "import os\nos.listdir('{folder}').",
    "a file that is opened": "open('{folder}/settings_secret.py').read().",
    "a module that is loaded": "import importlib\nm = importlib.import_module('settings_secret')\nm.",
    "a module that is loaded by a name": "m = __import__('settings_secret')\nm.",
    "a module that is run": "import runpy\nrunpy.run_path('{folder}/settings_secret.py').",
    "a fixture of pytest": "def test_a(settings_secret):\n    settings_secret.",
    "a Django model": "from django.conf import settings\nsettings.",
}
REACHES = {
    "append": "import sys\nsys.path.append('{folder}')\n",
    "insert": "import sys\nsys.path.insert(0, '{folder}')\n",
    "assignment": "import sys\nsys.path[0:0] = ['{folder}']\n",
    "a path that is computed": "import sys\na = '{folder}'\nsys.path.append(a[:3] + a[3:])\n",
    "the parent": "import sys\nsys.path.append('{folder}/../{name}')\n",
    "an archive": "import sys\nsys.path.append('{folder}/archive.zip')\n",
}


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("read", READS)
def test_a_program_learns_nothing_of_a_folder_of_the_server(folder, read, reach):
    program = REACHES[reach] + READS[read]
    found = names(program.replace("{folder}", str(folder)).replace("{name}", folder.name))
    assert not {name for name in found if any(secret in name for secret in SECRETS)}, found


@pytest.mark.parametrize(
    "program", ["import sys\nsys.modules['jedi'].", "import os\nos.environ['PYTHONPATH'].", "import sys\nsys.path[0].",
                "import __main__\n__main__.", "import playground\nplayground.", "import jedi\njedi.settings."])
def test_a_program_learns_nothing_of_the_process_that_analyses_it(program):
    assert not {"Script", "warm", "load", "cache_directory"} & set(names(program))


def test_the_analysis_leaves_no_file_behind_and_needs_no_home(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    names(f"import sys\nsys.path.append('{folder}')\nimport settings_secret\nsettings_secret.")
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")} and os.listdir(tmp_path) == []


# --- what a program does not take ---

PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))
EXPENSIVE = {
    "a large package": f"import sys\nsys.path.append('{PACKAGES}')\nfrom sympy import *\nfrom torch import *\nx.",
    "every module": "".join(f"import {name}\n" for name in sorted(sys.stdlib_module_names)) + "asyncio.",
    "nested calls": "f(" * 900 + "x.",
    "nested lists": "x = " + "[" * 90 + "]" * 90 + "\n" + "x" + "[0]" * 90 + ".",
    "a tower of classes": "class A0: a = 1\n" + "".join(f"class A{i}(A{i - 1}): b{i} = A{i - 1}()\n" for i in
                                                        range(1, 500)) + "A499().",
    "functions that call each other twice": "def f0(x): return x\n" + "".join(
        f"def f{i}(x): return f{i - 1}(f{i - 1}(x))\n" for i in range(1, 40)) + "f39('').",
    "a function that calls itself": "def f(x): return f([x, f(x)])\nf(1).",
    "a tuple of tuples": "a0 = (1, 2)\n" + "".join(f"a{i} = (a{i - 1}, a{i - 1})\n" for i in range(1, 60)) + "a59.",
    "a text that doubles": "x = 'a' * 3000\n" + "x = x + x\n" * 60 + "x.",
    "a power": "x = 10 ** 10 ** 10\nx.",
    "100,000 characters": "x = 1\n" * 16_000 + "x.",
    "unions": "x = 1\n" + "".join(f"if a: x = x or {i}.0 or [x]\n" for i in range(400)) + "x.",
    "generics": "from typing import *\n" + "x: " + "List[" * 80 + "int" + "]" * 80 + "\nx.",
    "comprehensions": "x = " + "[" * 30 + "a" + "".join(f" for a{i} in x]" for i in range(30)) + "\nx.",
    "a metaclass of itself": "class M(type, metaclass=lambda *a: M): pass\nclass A(M, metaclass=M): pass\nA.",
    "NUL and half a character": "x = '\0'\nx.",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPENSIVE)
def test_an_expensive_analysis_ends_in_time_and_alone(name):
    before, start = analyst().pid, perf_counter()
    names(EXPENSIVE[name])
    assert perf_counter() - start < BOUNDS.wall_seconds + 2
    assert analyst().pid == before and "balance" in names(ACCOUNT + "account.")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_analyst_that_was_killed_or_stopped_is_replaced(how):
    before = analyst().pid
    os.kill(before, how)
    assert "balance" in names(ACCOUNT + "account.") and analyst().pid != before


def test_a_lone_surrogate_is_no_program():
    assert names("x = '\ud800'\nx.") in ([], names("''."))


# --- what an analysis does not hold up ---

@pytest.fixture
def never_answers(monkeypatch) -> Iterator[ConfinedChild]:
    """A child whose analyses take all the time they may."""
    child = ConfinedChild("support.endless_analysis", SHORT)
    monkeypatch.setattr(client, "analyst", lambda: child)
    yield child
    child.close()


def lanes(count: int, **knobs) -> list[LaneConfig]:
    return [LaneConfig("greedy", {}, [("monitors", knobs)]) for _ in range(count)]


def dotted(spread: float = 3.0) -> TableModel:
    """A model that writes nothing but dots and names, so that every other token needs an analysis."""
    row = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    return TableModel([".", "a", "$"], ends="$", rule=lambda context: row if context and context[-1] else row.flip(0))


def test_no_step_of_the_worker_waits_for_an_analysis(never_answers):
    attackers = [prepare(Models(dotted()), lanes(4), Prompt("a."), Limits(max_new_tokens=8)) for _ in range(2)]
    quiet = prepare(Models(dotted()), [LaneConfig("greedy")], Prompt("a."), Limits(max_new_tokens=200))
    worker = Worker()
    runs = [worker.take(session) for session in attackers]
    client.attributes("", "", 1.0)
    own = worker.take(quiet)
    end = perf_counter() + 20
    while not own.over and perf_counter() < end:
        Flag().wait(0.01)
    for run in runs:
        run.stop()
    assert own.over and not own.error
    gaps = [later - earlier for earlier, later in zip(own.times, own.times[1:])]
    assert max(gaps) < 0.5, max(gaps)  # each analysis held the worker for up to 1.5 s


def test_an_analysis_of_a_lane_that_was_stopped_is_killed(never_answers):
    session = prepare(Models(dotted()), lanes(1), Prompt("a."), Limits(max_new_tokens=8))
    forks = "/proc/{}/task/{}/children"
    end = perf_counter() + 20
    while not (never_answers.pid and Path(forks.format(never_answers.pid, never_answers.pid)).read_text().split()):
        session.advance()
        assert perf_counter() < end
    session.stop()
    end = perf_counter() + 1  # well before its limit
    while Path(forks.format(never_answers.pid, never_answers.pid)).read_text().split():
        assert perf_counter() < end
        Flag().wait(0.01)


# --- through a run ---

@pytest.mark.parametrize(
    "source, shown", [("d = 'visible'", True), ("from settings_secret import DATABASE_PASSWORD as d", False)]
)
def test_a_run_shows_names_of_the_program_and_brings_nothing_of_the_server_into_its_figures(folder, source, shown):
    above = f"import sys\nsys.path.append('{folder}')\n{SHOWN}{source}\nN = namedtuple('N', d)\n"
    outcome = playground.run(
        "greedy", "N(1).", models=playground.load(), max_new_tokens=3, extras=[("monitors", {"above": above})]
    )
    labels = {
        label
        for stamped in outcome.trace.events
        if isinstance(stamped.event, Figure)
        for label in stamped.event.data.get("labels", ())
    }
    assert ("visible" in labels) == shown and "swordfish" not in labels
