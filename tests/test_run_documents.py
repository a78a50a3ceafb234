"""The script that runs every command of the documents."""
from __future__ import annotations

import sys

import pytest
import run_documents
from run_documents import Command, Outcome, commands, main, run

PAGE = """# A page

```bash
python -c "print(1)"   # a remark
python -c "import sys; sys.exit(3)"
no-such-program --help
cd elsewhere
```

```python
from pathlib import Path
Path("written.txt").write_text("x")
```
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one page."""
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(run_documents, "ROOT", tmp_path)
    return tmp_path


def test_the_table_has_a_line_for_each_command_and_failures_give_the_exit_code(project, capsys):
    assert main(["page.md"]) == 1
    rows = [line.split(None, 4) for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-1]) for row in rows if row[0] != "not"] == [
        ("0", 'python -c "print(1)"'), ("3", 'python -c "import sys; sys.exit(3)"'), ("0", "Python example 1")]
    assert [row[0] for row in rows].count("not") == 2
    assert not (project / "written.txt").exists(), "nothing is written beside the sources"


def test_a_command_that_does_not_end_is_stopped(tmp_path):
    outcome = run(Command("page", "python", [sys.executable, "-c", "import time; time.sleep(600)"]), tmp_path, 1.0)
    assert outcome.code == "stopped" and outcome.seconds < 60 and not outcome.failed


@pytest.mark.parametrize(("code", "failed"), [("0", False), ("2", True), ("-11", True), ("not here", False)])
def test_only_exit_codes_are_failures(code, failed):
    assert Outcome(Command("page", "x", ["bash"]), code, 0.0).failed == failed


@pytest.mark.parametrize(("example", "reason"), [
    ("import os\nprint(os.name)", ""),
    ("def decode(self, lm):\n    yield lm.prefill()  # from playground.contract import Lane", "a part"),
    ("class Mine(Sampler):\n    ...\n  p = 1", "a part"),
    ("import pytest\n\ndef test_it():\n    assert True", "a part"),
    ("import os\nask('http://127.0.0.1:7860')", "no page"),
])
def test_examples_that_do_not_run_by_themselves_say_why(monkeypatch, example, reason):
    monkeypatch.setattr(run_documents, "answers", lambda port: False)
    assert run_documents.why_not(example) == reason


def test_strategies_of_a_page_are_found_by_its_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_documents, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("```python\nfrom playground.contract import knob\n```\n"
                                      "```bash\ntest -s $PLAYGROUND_STRATEGIES/page_1.py\n```\n")
    main(["page.md"])
    assert capsys.readouterr().out.startswith("       0 ")


def test_every_page_with_commands_is_read():
    assert sum(command.page == "docs/command-line.md" for command in commands("docs/command-line.md")) > 25


def test_commands_with_a_named_word_are_listed_as_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_documents, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("```bash\nfalse bench\ntrue benches\n```\n")
    assert main(["page.md", "--skip", "bench"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["skipped", "0"]
