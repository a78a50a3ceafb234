"""The README and the guides are correct: their commands are accepted and run, and their examples run as written."""
from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import yaml
from run_documents import blocks, lines

import playground
from playground.cli import main, parser
from playground.contract import base, discover
from playground.trace import Trace
from support.folders import links_of

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/command-line.md", "docs/deploy.md", "docs/classroom.md", "docs/course.md")
COMMAND = ["python", "-m", "playground"]
SHORT = ["--max-new-tokens", "16"]
TOO_LONG = ("bench", "fit", "variant")  # these measure and train for minutes
SHORTENED = {"bench survey": ["--questions", "1", "--max-new-tokens", "4"]}  # unless they have a short form
ADDRESS = "http://127.0.0.1:7860"


def commands(page: str) -> Iterator[list[str]]:
    """The words of every command of a page, in their order."""
    for line in lines(page):
        yield from (shlex.split(part, comments=True) for part in line.split("&&"))


def ours(page: str) -> list[list[str]]:
    return [words[3:] for words in commands(page) if words[:3] == COMMAND]


def shown(page: str) -> dict[str, str]:
    """What a page says that a command prints, by the command's words."""
    lines = (line.partition("# -> ") for line in "".join(blocks(page, "bash")).splitlines())
    return {shlex.join(shlex.split(command)[3:]): text for command, arrow, text in lines if arrow}


def shortened(words: list[str]) -> list[str] | None:
    """The command as a test runs it; None if it takes too long in every form."""
    words = [word for word in words if word != "--check"]  # the long tests install a Space's packages
    if (kind := " ".join(words[:2])) in SHORTENED:
        return [*words, *SHORTENED[kind]]
    if words[0] in TOO_LONG:
        return None
    return [*words, *SHORT] if words[0] in ("run", "compare") else words


def run_as_written(example: str, page: str) -> None:
    """Run an example as a separate module, without the __future__ imports of this one."""
    exec(compile(example, page, "exec", dont_inherit=True), {"__name__": "example"})


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder like the project's, for what the examples write; every model is loaded once."""
    for name in ("assets", "playground"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(playground, "load", cache(playground.load))
    log, level = logging.getLogger("playground"), logging.getLogger("playground").level
    yield tmp_path
    log.setLevel(level)  # commands silence it


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_command_exists(page):
    for words in ours(page):
        assert parser().parse_args(words).act
    assert ours(page)


@pytest.mark.parametrize("page", PAGES)
def test_other_documented_commands_name_existing_files(page):
    named = {word for words in commands(page) if words[:3] != COMMAND for word in words}
    files = {word for word in named if re.search(r"\.(txt|py)$|^tests/", word)}
    assert all((ROOT / file).exists() for file in files) and (files or page != "README.md")


def test_docker_commands_name_existing_profiles_and_arguments():
    """container_steps.py carries out what `docker build` would."""
    given = [words for page in PAGES for words in commands(page) if words[:1] == ["docker"]]
    profiles = {words[words.index("--profile") + 1] for words in given if "--profile" in words}
    assert profiles == yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].keys()
    arguments = {words[words.index("--build-arg") + 1].split("=")[0] for words in given if "--build-arg" in words}
    assert arguments and all(f"ARG {name}=" in (ROOT / "Dockerfile").read_text() for name in arguments)


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md",
             *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_command_that_a_page_names_is_accepted_with_its_options(page):
    """Also those in running text and those that take too long to be run here."""
    inline = re.findall(r"`python -m playground ([^`]+)`", (ROOT / page).read_text(encoding="utf-8").replace("\n", " "))
    named = [*map(shlex.split, inline), *(words[3:] for words in commands(page) if words[:3] == COMMAND)]
    for words in named:
        if "--help" not in words:
            parser().parse_args(["speculative" if word == "NAME" else word for word in words])


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_link_of_a_page_leads_to_a_file(page):
    for link in links_of(ROOT / page):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_every_refusal_that_the_help_explains_is_one_that_the_code_gives():
    """A sentence may be divided among several strings of the code."""
    code = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "playground").rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)
    table = (ROOT / "docs/help.md").read_text(encoding="utf-8").split("## Refusals")[1].split("## ")[0]
    explained = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(explained) >= 7 and [sentence for sentence in explained if sentence not in code] == []


def test_every_strategy_that_the_help_recommends_exists():
    table = (ROOT / "docs/help.md").read_text(encoding="utf-8").split("## Which strategy when")[1].split("\n## ")[0]
    said = [words.split() for words in re.findall(r"`([^`]+)`", table) if not words.startswith("python")]
    names = {word.partition(":")[0] for words in said for word in words if not word.startswith("--")}
    assert len(names) >= 12 and names <= discover().keys()


def test_the_hardware_table_has_the_numbers_of_the_benchmark():
    help_page, benchmark = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("help.md", "benchmark.md"))
    rows = re.findall(r"^\| ([\w. ]+B) \| \w+ \| [\d.]+ GB \| ([\d.]+) s \| ([\d.]+) s \|$", help_page, re.MULTILINE)
    assert len(rows) == 3
    for shape, first, later in rows:
        for heading, said, digits in (("First token", first, 1), ("Lanes together", later, 2)):
            part = benchmark.split(f"## {heading}\n")[1].split("\n## ")[0]
            measured = re.findall(rf"^\| [ABD] \| {shape} \| 128 \| ([\d.]+)", part, re.MULTILINE)
            assert float(said) in {round(float(number) / 1000, digits) for number in measured}, (shape, heading)


def test_the_index_lists_every_page():
    pages = {path.name for kind in ("*.md", "*.html") for path in (ROOT / "docs").glob(kind)} - {"README.md"}
    listed = {link for page in ("README.md", "measured.md") for link in links_of(ROOT / "docs" / page)}
    assert {link for link in listed if link.endswith((".md", ".html")) and "/" not in link} - {"README.md"} == pages


def test_the_page_of_findings_has_the_numbers_of_the_data():
    said = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    drafts = json.loads((ROOT / "docs/guessing.json").read_text())
    ratios = [row["times_as_fast"]["median"] for row in drafts["library"]]
    assert f"in {sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} pairs" in said
    assert f"{median(ratios):.2f} times in the median" in said
    theirs = {row["theirs"] for row in drafts["library"]}
    lossless = [row for row in drafts["table"] if row["entrant"] not in {"greedy"} | theirs and row["times_as_fast"]]
    assert all(row["same_text"] == row["compared"] for row in drafts["table"])
    programs, edits, records, chat = (max(row["times_as_fast"]["median"] for row in lossless if row["task"] == task)
                                      for task in ("programs", "edit", "records", "chat"))
    assert f"{programs:.2f} times plain decoding on programs, {edits:.2f} on edits, {records:.2f} on records, " \
           f"{chat:.2f} on chat" in said
    page = (ROOT / "docs/compute.md").read_text(encoding="utf-8")
    rows = {lane: re.search(rf"^\| {lane} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) ", page, re.MULTILINE).groups()
            for lane in ("acm", "greedy")}
    (score, flops, time), (plain, *_) = (map(float, rows[lane]) for lane in ("acm", "greedy"))
    assert f"{flops:.2f} of the operations at a score of {score:.2f} (plain decoding {plain:.2f})" in said
    assert f"takes {time:.2f} times as long" in said
    part = (ROOT / "docs/benchmark.md").read_text(encoding="utf-8").split("## Greedy against generate, run A")[1]
    found = re.findall(r"\| (\d\.\d\d) \([^|]*\| \d of \d \|", part.split("\n## ")[0])
    assert f"{min(found)} to {max(found)} times as fast as the library's" in said
    shown = re.findall(r"^## \w+: (shown|not shown)$", (ROOT / "docs/effects.md").read_text("utf-8"), re.MULTILINE)
    assert (shown.count("shown"), len(shown)) == (4, 6) and "four of six do" in said
    canvases = (ROOT / "docs/block-diffusion.md").read_text(encoding="utf-8").split("## All tasks")[1].split("## ")[0]
    cells = r" \| [\d.]+ \| (\d+) of (\d+) \| ([\d.]+) "
    singly, together = (re.search(rf"^\| {lane}{cells}", canvases, re.MULTILINE).groups()
                        for lane in ("one position per forward", "threshold 0.9"))
    assert f"{float(together[2]):.1f} tokens per forward with one answer of {together[1]} fewer right" in said
    assert int(singly[0]) - int(together[0]) == 1


def test_the_recorded_demo_is_small_and_self_contained_and_plays_the_bundled_trace():
    """`python -m playground replay assets/traces/first_view.jsonl --html docs/demo.html` writes it again."""
    demo = (ROOT / "docs/demo.html").read_text(encoding="utf-8")
    assert len(demo.encode()) < 600_000 and not re.search(r"(src|href)=[\"']?(https?:)?//", demo)
    embedded = Trace.from_json(json.loads(re.search(r'<script[^>]*id="trace"[^>]*>(.*?)</script>', demo, re.DOTALL)[1]))
    assert embedded.to_json() == Trace.load(ROOT / "assets/traces/first_view.jsonl").to_json()


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_one_after_the_other(page, place, capsys):
    for given in ours(page):
        if words := shortened(given):
            code = main(words)
            out, err = capsys.readouterr()
            assert code == 0, f"{shlex.join(words)}: {err}"
            assert out or "wrote" in err, shlex.join(words)
            assert shown(page).get(shlex.join(given), "") in out, shlex.join(words)


def test_what_commands_print_stands_beside_some_of_them():
    assert len(shown("docs/command-line.md")) >= 4 and shown("README.md")


def test_commands_excluded_for_their_run_time_are_still_documented():
    left_out = {words[0] for page in PAGES for words in ours(page) if shortened(words) is None}
    cut = {" ".join(words[:2]) for page in PAGES for words in ours(page)}
    assert left_out == set(TOO_LONG) and SHORTENED.keys() <= cut


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_examples_of_a_page_run_as_written(page, place, monkeypatch, capsys):
    monkeypatch.setattr(base, "REGISTERED", dict(discover()))  # an example defines a strategy
    for example in blocks(page, "python"):
        run_as_written(example, page)
        out = capsys.readouterr().out
        printed = re.findall(r"print\(.*# -> (.*)$", example, re.MULTILINE)
        assert all(text in out for text in printed), out
        assert out or "print(" not in example


def test_the_example_of_the_http_api_runs_against_a_page(app, capsys):
    example, = blocks("docs/api.md", "python")
    assert ADDRESS in example
    run_as_written(example.replace(ADDRESS, app), "docs/api.md")
    assert "# -> True, in less than half of the forwards" in example
    same, drafted, plain = capsys.readouterr().out.split()[-3:]
    assert same == "True" and int(drafted) < int(plain) / 2
