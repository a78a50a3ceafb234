"""What the page and the command line check before they start: options, model folders, a full disk."""
from __future__ import annotations

import json
import pwd
import re
import socket
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from toys import save

from playground import request_limits
from playground.cli import main
from playground.decoding import fitted_weights
from playground.engine.checkpoint import catalogue
from playground.engine.loading.load import Loading, load
from playground.errors import Refusal
from playground.request_limits import LOCAL, PUBLIC, RequestLimits, Rules, quoted
from playground.ui import start
from playground.ui.components.settings import Settings
from playground.ui.play import gallery, lessons
from support.limited_pages import MODELS, ROOT, STRANGERS, public  # noqa: F401

LONGEST_EXAMPLE = 4096  # tokens: an example may be longer than a public page runs it


# --- starting the page ---

@pytest.mark.parametrize(
    "options, says",
    [
        (["--port", "99999"], "'99999' is not a port"),
        (["--port", "-1"], "'-1' is not a port"),
        (["--port", "1e4"], "is not a port"),
        (["--port", "9" * 5000], "is not a port"),
        (["--host", "nosuch.invalid"], "cannot listen on 'nosuch.invalid'"),
        (["--host", "a" * 300], "cannot listen on"),
        (["--host", "203.0.113.7"], "cannot listen on"),
        (["--host", "a\0b"], "cannot listen on"),
    ],
)
def test_an_unavailable_address_is_refused_in_one_sentence(options, says, capsys, monkeypatch):
    monkeypatch.setattr(start, "build", lambda site: None)
    ended = main(["serve", *options])
    reply = capsys.readouterr().err
    assert ended == 2 and says in reply and "Traceback" not in reply and len(reply) < 400


def test_a_port_in_use_is_refused_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(start, "build", lambda site: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


# --- SECURITY.md ---

def test_the_security_page_prints_the_limits_as_they_are():
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \|", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    written = {name: (int(local.replace(",", "")), int(public.replace(",", ""))) for name, local, public in rows}
    local, strangers = asdict(Rules()) | asdict(LOCAL), asdict(STRANGERS) | asdict(PUBLIC)
    names = [field.name for field in fields(RequestLimits)] + ["characters", "tokens", "repeats", "answers"]
    assert written == {name: (local[name], strangers[name]) for name in names}


def test_values_in_sentences_are_truncated_and_escaped():
    shown = [
        quoted(value) for value in ("\ud800" * 10**6, 10**10_000, [1] * 10**6, float("nan"), {"a": 1}, None, "short")
    ]
    assert all(len(each) < 400 and each.encode() for each in shown) and shown[-1] == "'short'"
    assert request_limits.in_range(1, 0, 1) and not request_limits.in_range(10**400, 0, 1.0)


def test_every_example_and_lesson_keeps_the_limits_of_a_public_page():
    for example in gallery.examples():
        Settings.read(example).check(replace(STRANGERS, tokens=LONGEST_EXAMPLE, programs=True))
    for lesson in lessons.lessons().values():
        for step in range(len(lesson.steps)):
            lessons.settings_of(lesson.name, step).check(replace(STRANGERS, programs=True))


def test_knobs_of_every_type_are_taken():
    knobs = {"prune": False, "longest": 40, "score": "mean", "share": 0.5}
    Settings(
        "Hello",
        lanes=[
            {
                "strategy": "exact_extract",
                "knobs": knobs,
                "extras": [["top_p", {"p": 0.9}]],
                "forced": [1, 2],
                "seed": 3,
            }
        ],
    ).check(STRANGERS)


# --- model folders ---

def edited(**changes):
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return edit


def many_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(100_000)}})
    )


def long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{")


ABSURD = {
    "ten million layers": edited(num_hidden_layers=10**7),
    "a layer for every integer": edited(num_hidden_layers=10**18),
    "a wide network": edited(hidden_size=2**17, intermediate_size=2**30),
    "a large vocabulary": edited(vocab_size=2**36),
    "layers in a text": edited(num_hidden_layers="many"),
    "no heads": edited(num_attention_heads=0),
    "a billion labels": edited(num_labels=10**9),
    "experts": edited(model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=10**8),
    "a list in place of an object": lambda folder: (folder / "config.json").write_text("[]"),
    "ten million brackets": lambda folder: (folder / "config.json").write_text("[" * 10_000_000),
    "deep brackets": lambda folder: (folder / "config.json").write_text('{"a": ' + "[" * 100_000),
    "a hundred thousand shards": many_shards,
    "a long header": long_header,
    "an index that is a list": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors.index.json").write_text("[]"),
    ),
    "a header that is a list": lambda folder: (folder / "model.safetensors").write_bytes(
        (2).to_bytes(8, "little") + b"[]"
    ),
}


@pytest.fixture
def addresses():
    """4 GiB of address space beyond the current use: larger allocations fail without affecting the machine."""
    from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit, setrlimit
    before = getrlimit(RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    setrlimit(RLIMIT_AS, (pages * 4096 + (4 << 30), before[1] if before[1] != RLIM_INFINITY else RLIM_INFINITY))
    yield
    setrlimit(RLIMIT_AS, before)


@pytest.mark.parametrize("broken", ABSURD)
def test_an_absurd_model_is_refused_before_it_is_built(broken, tmp_path, addresses):
    save(tmp_path / "model")
    ABSURD[broken](tmp_path / "model")
    start, before = process_time(), getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(Refusal) as refused:
        load(str(tmp_path / "model"), Loading("cpu"))
    assert str(refused.value).endswith(".") and "memory" not in str(refused.value)
    assert process_time() - start < 10 and getrusage(RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


# --- a full disk ---

@pytest.mark.slow
def test_a_full_disk_is_reported_in_a_sentence():
    from playground.cli.input_files import write_text
    from playground.events import Header
    from playground.trace import Trace
    for write in (lambda: write_text("/dev/full", "x"), lambda: Trace([Header()], []).save("/dev/full")):
        with pytest.raises(Refusal, match="No space left"):
            write()
    reply = subprocess.run(
        [sys.executable, "-m", "playground", "list"],
        cwd=ROOT,
        stdout=open("/dev/full", "w"),
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    assert reply.returncode == 2 and "No space left" in reply.stderr and "Traceback" not in reply.stderr


# --- the home folder ---

def test_a_user_without_a_home_has_the_bundled_models(monkeypatch):
    def unknown(user: int):
        raise KeyError(user)

    for name in ("HOME", "PLAYGROUND_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert catalogue.made() == [] and set(catalogue.BUNDLED) <= set(catalogue.entries())


def test_two_processes_in_one_home_write_the_same_weights_and_neither_fails(tmp_path, monkeypatch):
    path, models = tmp_path / "greedy.safetensors", {"target": SimpleNamespace(revision="1", quantization="none")}
    write = fitted_weights.save_file

    def meanwhile(weights, unfinished, facts):
        write(weights, unfinished, facts)
        monkeypatch.setattr(fitted_weights, "save_file", write)
        with monkeypatch.context() as another:
            another.setattr(fitted_weights.os, "getpid", lambda: 1)
            fitted_weights.save(path, {"a": torch.zeros(2)}, models)

    monkeypatch.setattr(fitted_weights, "save_file", meanwhile)
    fitted_weights.save(path, {"a": torch.ones(2)}, models)
    assert load_file(path)["a"].tolist() == [1, 1] and [one.name for one in tmp_path.iterdir()] == [path.name]


# --- programs of models ---

def test_a_page_that_runs_no_programs_names_the_strategy_as_its_menu_does():
    asked = Settings(prompt="a", lanes=[{"strategy": "pg_td", "knobs": {"tests": "work([]) == 0"}}])
    with pytest.raises(Refusal, match="^Planning-guided decoding runs programs written by a model, and this page"):
        asked.check(Rules.for_visitors())
