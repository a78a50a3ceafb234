"""Carries out the steps of the Dockerfile without a container engine, then runs its command as a container would.

    python tests/container_steps.py [--build-arg NAME=VALUE]

No engine and no base image is used: the root is a copy-on-write view of this machine's own (overlayfs), in which a new,
empty virtual environment stands for the Python of the base image. RUN, COPY, ENV, ARG, WORKDIR and USER act there as
written. The command then runs as the image's user on the read-only root, with an empty /tmp and a volume. Checked: the
health check passes; nothing else can be written; a run is answered; SIGTERM during a run ends it with a message and
the process within the grace period. What an engine adds (layers, capabilities, seccomp profile, network) is not tested.
Needs root on Linux.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from time import monotonic, sleep
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
PYTHON = "/opt/base-python"  # stands for the interpreter of the base image
PATIENCE, GRACE = 120, 10  # seconds until the page is healthy; from SIGTERM to the end
ADDRESS = "http://127.0.0.1:7860"
STOPPING = "The server is stopping"  # the beginning of what a visitor reads
VISIT = """
import sys
from gradio_client import Client
lanes, length = [{"strategy": "greedy"}] * int(sys.argv[2]), int(sys.argv[1])
print(Client("http://127.0.0.1:7860", verbose=False).predict("Mia", lanes, length=length, api_name="/compare"))
"""


@dataclass(frozen=True)
class Step:
    """One instruction: RUN, COPY, ..., and what follows it, continuation lines joined."""

    word: str
    rest: str


def steps(dockerfile: str) -> list[Step]:
    lines = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [Step(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def command(rest: str) -> list[str]:
    """The words of a CMD in exec form; the shell form would not pass signals on."""
    return json.loads(rest[rest.index("["):])


@dataclass
class Image:
    """What the steps make: a root folder and the settings of its processes."""

    root: Path
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": f"{PYTHON}/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
    folder: str = "/"
    user: str = "root"
    volumes: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)

    def carry_out(self, step: Step) -> None:
        getattr(self, f"_{step.word.lower()}", self._unknown)(step.rest)

    def inside(self, words: list[str], **how) -> subprocess.Popen:
        """Start a process in the root, as the image's user, with nothing of this process's environment."""
        as_user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--"]
        given = [f"{name}={value}" for name, value in self.environment.items()]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', self.folder, *as_user, *words]
        return subprocess.Popen(["chroot", str(self.root), "env", "-i", *given, *there], text=True, **how)

    def _unknown(self, rest: str) -> None:
        raise SystemExit(f"error: a step of the Dockerfile is not known here: {rest}")

    def _from(self, rest: str) -> None:
        pass  # the environment at PYTHON

    def _expose(self, rest: str) -> None:
        pass

    def _stopsignal(self, rest: str) -> None:
        assert rest == "SIGTERM"

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.arguments.setdefault(name, value)

    def _env(self, rest: str) -> None:
        self.environment |= dict(pair.split("=", 1) for pair in rest.split())

    def _workdir(self, rest: str) -> None:
        self.folder = rest
        (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, rest: str) -> None:
        self.user = rest

    def _volume(self, rest: str) -> None:
        self.volumes.append(rest)

    def _healthcheck(self, rest: str) -> None:
        self.health = command(rest)

    def _cmd(self, rest: str) -> None:
        self.start = command(rest)

    def _run(self, rest: str) -> None:
        given = [f"{name}={value}" for name, value in self.arguments.items()]
        done = self.inside(["env", *given, "/bin/sh", "-c", rest], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = done.communicate()
        if done.returncode:
            raise SystemExit(f"error: RUN {rest}\n{output[-3000:]}")

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        for source in sources:
            _copy(ROOT / source, self.root / self.folder.lstrip("/") / target)


def _copy(source: Path, target: Path) -> None:
    """COPY: a file lands in a folder, the contents of a folder become those of the target."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def ignored(name: str, rules: list[str]) -> bool:
    """Whether .dockerignore keeps a file of the top folder out of the build: the last rule that matches decides."""
    verdicts = [not rule.startswith("!") for rule in rules if fnmatch(name, rule.lstrip("!"))]
    return bool(verdicts) and verdicts[-1]


# --- the root ---

def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def copy_of_this_machine(place: Path) -> Path:
    """A root whose changes go to memory, with its own empty Python environment."""
    mount("-t", "tmpfs", "none", str(place))
    upper, work, root = (place / name for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        folder.mkdir()
    mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", str(root))
    for name in ("proc", "dev"):
        mount("--rbind", f"/{name}", str(root / name))
    for folder in Path(sys.base_prefix).parents:  # an interpreter in root's home is closed to the image's user
        there = root / str(folder).lstrip("/")
        there.chmod(there.stat().st_mode | 0o555)
    subprocess.run(["chroot", str(root), f"{sys.base_prefix}/bin/python3", "-m", "venv", PYTHON], check=True)
    return root


def as_container(image: Image, volumes: Path) -> None:
    """Read-only root, empty /tmp, and for each volume a folder that begins as what the image has there."""
    mount("-o", "remount,ro", str(image.root))
    mount("-t", "tmpfs", "none", str(image.root / "tmp"))
    (image.root / "tmp").chmod(0o1777)
    for volume in image.volumes:
        there, here = image.root / volume.lstrip("/"), volumes / volume.strip("/")
        here.mkdir(parents=True)
        os.chown(here, there.stat().st_uid, there.stat().st_gid)
        mount("--bind", str(here), str(there))


# --- the checks ---

@contextmanager
def running(image: Image) -> Iterator[subprocess.Popen]:
    page = image.inside(image.start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(page.stdout), daemon=True).start()
    try:
        yield page
    except BaseException:
        print("".join(lines)[-3000:], file=sys.stderr)
        raise
    finally:
        page.kill()
        page.wait()


def ends_well(image: Image, words: list[str]) -> bool:
    return image.inside(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait() == 0


def wait_until_healthy(image: Image, page: subprocess.Popen) -> None:
    started = monotonic()
    while not ends_well(image, image.health):
        if page.poll() is not None or monotonic() - started > PATIENCE:
            raise SystemExit("error: the health check does not pass")
        sleep(0.5)
    say("healthy", started)


def check_writable(image: Image) -> None:
    """Only the volumes and /tmp can be written."""
    for place in ("/", "/etc", image.folder, "/var/tmp"):
        assert not ends_well(image, ["touch", f"{place}/written"]), f"{place} can be written"
    for place in ("/tmp", *image.volumes):
        assert ends_well(image, ["touch", f"{place}/written"]), f"{place} cannot be written"


def visit(image: Image, length: int, lanes: int = 1) -> subprocess.Popen:
    words = ["python", "-c", VISIT, str(length), str(lanes)]
    return image.inside(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def check_answer(image: Image) -> None:
    started = monotonic()
    answer, _ = visit(image, 4).communicate(timeout=PATIENCE)
    assert "token_ids" in answer, answer
    say("a run was answered", started)


def check_drain(image: Image, page: subprocess.Popen) -> None:
    """SIGTERM during a run: its visitor gets a message, and the process ends in time with exit code 0."""
    visitor = visit(image, 900, lanes=4)
    wait_for_a_run(visitor)
    started = monotonic()
    page.terminate()
    code = page.wait(GRACE)
    say(f"ended with exit code {code}", started)
    answer, _ = visitor.communicate(timeout=PATIENCE)
    assert code == 0 and STOPPING in answer, answer
    print(f"the visitor read: {answer.strip().splitlines()[-1][-160:]}")


def wait_for_a_run(visitor: subprocess.Popen) -> None:
    """Return while the visitor's run has a seat: a signal that comes later would find no run to end."""
    started = monotonic()
    while not seated():
        assert visitor.poll() is None and monotonic() - started < PATIENCE, "the run did not begin"
        sleep(0.05)
    say("a long run began", started)


def seated() -> int:
    """Runs that the page is working on."""
    with urlopen(f"{ADDRESS}/health", timeout=PATIENCE) as answer:
        return json.load(answer)["seated"]


def say(what: str, started: float) -> None:
    print(f"{what} after {monotonic() - started:.1f} s", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Carry out the Dockerfile's steps without a container engine.")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    given = dict(pair.split("=", 1) for pair in parser.parse_args(arguments).build_arg)
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as volumes:
        image = Image(copy_of_this_machine(Path(place)), given)
        for step in steps((ROOT / "Dockerfile").read_text(encoding="utf-8")):
            started = monotonic()
            image.carry_out(step)
            say(f"{step.word} {step.rest[:60]}", started)
        as_container(image, Path(volumes))
        with running(image) as page:
            wait_until_healthy(image, page)
            check_writable(image)
            check_answer(image)
            check_drain(image, page)
        subprocess.run(["umount", "-R", "-l", place], check=True)
    print("no container engine ran: these are the Dockerfile's steps on a copy-on-write root")


if __name__ == "__main__":
    if "--mounts-of-its-own" not in sys.argv:
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv, "--mounts-of-its-own"])
    main([word for word in sys.argv[1:] if word != "--mounts-of-its-own"])
