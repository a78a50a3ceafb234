"""Starts a folder as a Hugging Face Space would: its packages in a new environment, its app, and one run through it; or
its app alone, to say how long that takes.
"""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from urllib.request import urlopen
from venv import EnvBuilder

from playground.cli.space.space_folder import CPU_INDEX, SPACE_PACKAGES, settings
from playground.errors import Refusal

INSTALLING, STARTING = 1800, 120  # seconds at most
OWN = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "SSL_CERT_FILE")  # the rest is not in a Space either
# A run on the bundled models, and a request that a private page allows and a Space must refuse.
VISIT = """
import sys
from gradio_client import Client
client = Client(sys.argv[1], verbose=False)
answer, = client.predict("Tell me a story about Mia.", [{"strategy": "greedy"}], mode="chat", length=4,
                         api_name="/compare")
assert answer["metrics"]["tokens"] == 4, answer
try:
    client.predict("Hello", [{"strategy": "greedy"}], model="/", api_name="/compare")
except Exception as refusal:
    assert "public page" in str(refusal), refusal
else:
    sys.exit("a folder of the machine can be opened")
"""


def start(folder: Path) -> None:
    """Start the folder's app with the packages of this environment, say after how many seconds its page is ready, and
    stop it. Nothing else on the network reaches it. Raises Refusal.
    """
    started = monotonic()
    with _serving(sys.executable, folder, "127.0.0.1"):
        _say("started with the packages of this environment: the page was ready", started)


def check(folder: Path) -> None:
    """Install and start the folder in a new environment, wait for a run's answer, and stop it. Raises Refusal."""
    with tempfile.TemporaryDirectory() as place:
        started = monotonic()
        python = _installed(folder, Path(place))
        _say("installed", started)
        started = monotonic()
        with _serving(python, folder) as address:
            _say("the page was ready", started)
            _run([python, "-c", VISIT, address], "The page does not answer", STARTING, _environment())
            _say("a run was answered, and a folder of the machine refused,", started)


def _installed(folder: Path, place: Path) -> str:
    """Python of a new environment with what a Space installs."""
    EnvBuilder(with_pip=True).create(place)
    python = str(place / ("Scripts" if os.name == "nt" else "bin") / "python")
    requirements = place / "requirements.txt"
    requirements.write_text(_requirements(folder), encoding="utf-8")
    packages = [package.format(**settings(folder)) for package in SPACE_PACKAGES]
    pip = [python, "-m", "pip", "install", "-q", "-r", str(requirements), *packages]
    _run(pip, "The packages cannot be installed", INSTALLING)
    return python


def _requirements(folder: Path) -> str:
    """The folder's requirements; without the index of CPU builds if this machine does not reach it, since pip would
    try again for minutes.
    """
    text = (folder / "requirements.txt").read_text(encoding="utf-8")
    if CPU_INDEX not in text or _reached(CPU_INDEX.split()[-1]):
        return text
    print(f"{CPU_INDEX.split()[-1]} cannot be reached: torch comes from the default index", file=sys.stderr)
    return text.replace(CPU_INDEX, "")


def _reached(address: str) -> bool:
    try:
        with urlopen(f"{address}/torch/", timeout=10):
            return True
    except (OSError, ValueError):
        return False


@contextmanager
def _serving(python: str, folder: Path, host: str = "0.0.0.0") -> Iterator[str]:
    """The address of the app, started with a Space's variables in a process without this one's."""
    app, own = settings(folder)["app_file"], {*folder.rglob("*")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = subprocess.Popen([python, app], cwd=folder, env=_environment(port, host), text=True, errors="replace",
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    late = threading.Timer(STARTING, page.kill)
    late.start()
    try:
        _wait_until_up(page)
        yield f"http://127.0.0.1:{port}"
    finally:
        late.cancel()
        page.terminate()
        page.wait()
        _clear({*folder.rglob("*")} - own)


def _clear(made: set[Path]) -> None:
    """Remove what a start left in the folder, such as the stubs that Gradio writes beside components."""
    for path in sorted(made, reverse=True):  # files before their folders
        path.rmdir() if path.is_dir() else path.unlink()


def _wait_until_up(page: subprocess.Popen[str]) -> None:
    lines: list[str] = []
    while not lines or "Running on" not in lines[-1]:
        if not (line := page.stdout.readline()):
            raise Refusal(f"The page does not start: {_end(''.join(lines))}")
        lines.append(line)
    threading.Thread(target=page.stdout.read, daemon=True).start()


def _environment(port: int = 0, host: str = "0.0.0.0") -> dict[str, str]:
    kept = {name: os.environ[name] for name in OWN if name in os.environ}
    return kept | {"SPACE_ID": "somebody/decoding-playground", "GRADIO_SERVER_NAME": host, "PYTHONUNBUFFERED": "1",
                   "GRADIO_SERVER_PORT": str(port), "PYTHONDONTWRITEBYTECODE": "1"}


def _run(command: list[str], failure: str, seconds: int, environment: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Refusal(f"{failure} within {seconds} s.") from None
    if done.returncode:
        raise Refusal(f"{failure}: {_end(done.stderr or done.stdout)}")


def _end(output: str) -> str:
    return " ".join(output.split())[-600:]


def _say(what: str, started: float) -> None:
    print(f"{what} after {monotonic() - started:.0f} s", file=sys.stderr)
