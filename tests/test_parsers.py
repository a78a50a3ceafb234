"""Every library that reads what others wrote has a row in SECURITY.md that says where it runs and what bounds it."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# what reads no text or bytes of others: numbers, devices, progress, the page's own files
NO_READERS = {
    "torch", "numpy", "accelerate", "bitsandbytes", "psutil", "pyseccomp", "spaces", "tqdm", "app",
    "matplotlib",  # draws the numbers of a run
    "triton", "llvmlite",  # compile kernels of the project's own
    "kernel", "policy", "playground", "strategies",
}
# of the standard library, what parses, unpacks or renders
READERS = {
    "ast", "base64", "binascii", "bz2", "codecs", "codeop", "configparser", "csv", "ctypes.util", "dbm", "email",
    "fnmatch", "gettext", "glob", "gzip", "html", "http", "imaplib", "ipaddress", "json", "locale", "lzma", "mailbox",
    "marshal", "mimetypes", "netrc", "nntplib", "pickle", "plistlib", "quopri", "re", "shelve", "shlex", "sqlite3",
    "string", "struct", "symtable", "tarfile", "tokenize", "tomllib", "unicodedata", "urllib", "uu", "wave",
    "xdrlib", "xml", "xmlrpc", "zipfile", "zipimport", "zlib",
}


@cache
def rows() -> dict[str, list[str]]:
    """By library, the cells of its row: what it reads, where, and its bounds."""
    document = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section, found = document.partition("## Libraries that read")[2].partition("\n## ")[0], {}
    for line in section.splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`([\w.]+)`", first):
            found[name] = cells
    return found


@cache
def imported() -> dict[str, set[str]]:
    """By library, the modules that import it."""
    found: dict[str, set[str]] = {}
    for path in [ROOT / "app.py", *(ROOT / "playground").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_every_library_that_reads_what_others_wrote_has_a_row():
    known = {name for name in imported() if name in READERS or name not in sys.stdlib_module_names}
    assert known - NO_READERS - set(rows()) == set(), "say in SECURITY.md where it runs and what bounds it"


def test_every_row_is_of_a_library_that_is_imported():
    assert set(rows()) - set(imported()) == set()


def test_every_row_says_where_it_runs_and_what_bounds_it():
    for name, (reads, where, bounds) in rows().items():
        places = set(re.split(r",(?: then)? ", where))
        assert reads and places <= {"page", "child", "sandbox", "shell", "notebooks"}, name
        assert bounds != "-" or places <= {"shell", "notebooks"}, f"{name} has no bound"


@pytest.mark.slow
def test_what_runs_in_a_child_only_is_not_loaded_by_the_page():
    """jinja2 is loaded by Gradio and torch, for pages of their own."""
    children = {name for name, (_, where, _) in rows().items() if where == "child"} - {"jinja2"}
    program = "import sys, app; from playground.contract import discover; discover(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert loaded.returncode == 0, loaded.stderr
    assert children == {"jedi", "parso"} and not children & set(loaded.stdout.split())


def test_what_runs_in_a_child_only_is_imported_by_its_work_alone():
    assert imported()["jedi"] == imported()["parso"] == {"playground/algorithms/programs/attributes_work.py"}
    assert imported()["jinja2"] == {"playground/engine/text/template_sandbox.py"}
