"""Programs and the sandbox that runs them."""
from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from playground.algorithms.programs import sandbox

CANARY, SECRET = "canary-5f1c9e", "secret-b83a07"
CLASS_PATTERN = """def work(items):
    O = str.mro()[1]
    match O:
        case O(__subclasses__=subclasses):
            return [c for c in subclasses(O) if "wrap_close" in str(c)]"""
NO_POLICY = """
import ast, builtins, importlib, re, sys
import kernel
confine = kernel.confine
def confine_with_modules(syscall_filter):  # those that the program names, for none can be read from a file afterwards
    code = sys._getframe(1).f_locals["request"]["code"]
    for name in set(re.findall('import[_(" ]+([a-z_]+)', code)) & sys.stdlib_module_names - {"antigravity"}:
        importlib.import_module(name)
    confine(syscall_filter)
kernel.confine = confine_with_modules
def read(code): return ast.parse(code)
def namespace(): return {"__builtins__": builtins}
"""
NO_KERNEL = """
def confine(syscall_filter):
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY_BYTES, 4 * MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_REAL, 12 * WALL_SECONDS)
"""


@dataclass
class Bait:
    """The bait of an escape: a file to read, one to create, a port to connect to, a process to end."""

    folder: Path
    listener: socket.socket
    bystander: subprocess.Popen

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @property
    def made(self) -> Path:
        return self.folder / "made"

    def fill(self, attempt: str) -> str:
        filled = {
            "canary": self.canary,
            "made": self.made,
            "port": self.listener.getsockname()[1],
            "pid": self.bystander.pid,
            "libc": '__import__("ctypes").CDLL(None, use_errno=True)',
        }
        for name, value in filled.items():
            attempt = attempt.replace(f"@{name}@", str(value))
        return program(attempt)

    def traces(self, output: str) -> list[str]:
        """Traces of an escape, in the system and in its output."""
        said = [word for word in (CANARY, SECRET) if word in output]
        return said + (["a file"] if self.made.exists() else []) + (["a connection"] if self.was_called() else [])

    def was_called(self) -> bool:
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def is_whole(self) -> bool:
        return (
            self.canary.read_text() == CANARY
            and self.canary.stat().st_mode & 0o777 == 0o644
            and self.bystander.poll() is None
        )

    def processes(self) -> list[str]:
        """Command lines of processes that were started from this folder or mention it."""
        lines = [read_or_nothing(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        return [line for line in lines if str(self.folder) in line]


def read_or_nothing(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""


@pytest.fixture
def bait(tmp_path, monkeypatch) -> Iterator[Bait]:
    monkeypatch.setenv("SECRET_OF_THE_PAGE", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener, subprocess.Popen(["sleep", "600"]) as bystander:
        listener.setblocking(False)
        bait = Bait(tmp_path, listener, bystander)
        bait.canary.write_text(CANARY)
        bait.canary.chmod(0o644)
        yield bait
        bystander.kill()


def program(attempt: str) -> str:
    if "\n" not in attempt and not attempt.startswith("raise"):
        return f"def work(x):\n    return {attempt}"
    return f"{attempt}\ndef work(x):\n    return out"


@pytest.fixture
def without(monkeypatch, tmp_path) -> Callable[..., None]:
    """Remove a defence: the process runs from a copy of its scripts in which one or both do nothing."""
    def take_away(policy: bool = False, kernel: bool = False) -> None:
        folder = shutil.copytree(
            sandbox.RUNNER.parent, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__")
        )
        if policy:
            (folder / "policy.py").write_text(NO_POLICY)
        if kernel:
            (folder / "kernel.py").write_text((folder / "kernel.py").read_text() + NO_KERNEL)
        monkeypatch.setattr(sandbox, "RUNNER", folder / "runner.py")
    return take_away
