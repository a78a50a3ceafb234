"""Runs what the documents say, as a reader would, and prints a table: exit code, seconds, command.

    python tools/run_documents.py                          # everything: hours, since some commands train and measure
    python tools/run_documents.py README.md --limit 60     # commands that are not over by then are stopped: "stopped"
    python tools/run_documents.py --skip bench fit         # commands with one of these words are listed as "skipped"

Commands run one after the other in a folder that has the project's files as links, so that nothing is written beside
the sources. Strategies that a page shows are in the folder of one's own, so that its commands find them. A command with
programs that are not here, such as docker, is "not here"; an example that imports nothing, or is a test, is "a part" of
a file; one that asks a page that does not answer has "no page". Exit code: 1 if a command failed.
"""
from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("git", "cd", "source", "hf")  # of a clone, an environment or an account that is there or is not
BROKEN = 1
STRATEGIES = "PLAYGROUND_STRATEGIES"
PORT = 7860  # of the page


class Command(NamedTuple):
    """A line of a page for a shell, or an example in Python."""

    page: str
    text: str
    words: list[str]  # as a program and its arguments


class Outcome(NamedTuple):
    """What became of a command: its exit code, or why it has none."""

    command: Command
    code: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.code.lstrip("-").isdecimal() and self.code != "0"


def blocks(page: str, language: str) -> list[str]:
    """The examples of a page in a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def lines(page: str) -> list[str]:
    """The lines for a shell, each whole, without those that are comments alone."""
    found = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in found if line.strip() and not line.lstrip().startswith("#")]


def commands(page: str) -> Iterator[Command]:
    for line in lines(page):
        yield Command(page, line.split("  #")[0].strip(), ["bash", "-c", line])
    for number, example in enumerate(blocks(page, "python"), 1):
        yield Command(page, f"Python example {number}", [sys.executable, "-c", example])


def skipped(command: Command, words: Sequence[str]) -> bool:
    return not {*words}.isdisjoint(re.split(r"[^\w-]+", command.text))


def run(command: Command, place: Path, limit: float) -> Outcome:
    """Run a command in a folder, for so many seconds at most."""
    program = shlex.split(command.text, comments=True)[0] if command.words[0] == "bash" else sys.executable
    if program in OTHERS or not (shutil.which(program) or (place / program).exists()):
        return Outcome(command, "not here", 0.0)
    if program == sys.executable and (reason := why_not(command.words[-1])):
        return Outcome(command, reason, 0.0)
    started = monotonic()
    # "python" in the documents is this one
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = str(place / STRATEGIES)
    process = subprocess.Popen(command.words, cwd=place, env=os.environ | {"PATH": path, STRATEGIES: own},
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    try:
        code = str(process.wait(limit))
    except subprocess.TimeoutExpired:
        code = "stopped"
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
    return Outcome(command, code, monotonic() - started)


def why_not(example: str) -> str:
    """Why an example in Python does not run by itself; empty if it does."""
    if f":{PORT}" in example and not answers(PORT):
        return "no page"
    return "a part" if not (found := modules(example)) or "pytest" in found else ""


def modules(example: str) -> set[str]:
    """What an example imports; nothing if it is no Python by itself."""
    try:
        nodes = ast.parse(example).body
    except SyntaxError:
        return set()
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def keep_strategies(page: str, place: Path) -> None:
    """Write the strategies that a page shows where its commands find them."""
    (own := place / STRATEGIES).mkdir(exist_ok=True)
    for number, example in enumerate(blocks(page, "python"), 1):
        if "playground.contract" in modules(example) and not why_not(example):
            (own / f"{Path(page).stem.replace('-', '_')}_{number}.py").write_text(example, encoding="utf-8")


def linked(place: Path) -> None:
    """Links to everything at the root of the project."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (place / path.name).symlink_to(path)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=["README.md", *sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))])
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="of each command")
    parser.add_argument("--skip", nargs="+", default=[], metavar="WORD", help="leave out commands with these words")
    options = parser.parse_args(words)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        linked(place := Path(folder))
        for page in options.pages:
            keep_strategies(page, place)
            for command in commands(page):
                outcome = (Outcome(command, "skipped", 0.0) if skipped(command, options.skip)
                           else run(command, place, options.limit))
                failed += outcome.failed
                print(f"{outcome.code:>8}  {outcome.seconds:7.1f} s  {page}: {command.text}", flush=True)
    return BROKEN if failed else 0


if __name__ == "__main__":
    sys.exit(main())
