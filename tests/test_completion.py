"""What commands offer to complete in a shell: commands, options, and the names of strategies."""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from playground.cli.completion import strategy_names
from playground.contract import discover

ROOT = Path(__file__).parents[1]
ASK = """
import sys
from playground.cli import main
try:
    main([])
finally:
    assert not {"torch", "gradio"} & {*sys.modules}, "a completion may not wait for them"
"""


def completed(line: str) -> list[str]:
    """Completions at the end of a line, as argcomplete gives them to a shell."""
    pytest.importorskip("argcomplete")
    with tempfile.NamedTemporaryFile("r") as answer:
        asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": answer.name, "COMP_LINE": line,
                 "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
                 "COMP_TYPE": "9"}
        done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, env=os.environ | asked, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr
        return answer.read().split("\n")


@pytest.mark.parametrize(("line", "some"), [
    ("playground com", ["compare"]),
    ("playground run spec", ["specdec_plus_plus", "speculative"]),
    ("playground run greedy --max", ["--max-new-tokens"]),
    ("playground run greedy --with prompt_", ["prompt_lookup"]),
    ("playground bench surv", ["survey"]),
    ("playground bench survey --qu", ["--quantization", "--questions"]),
])
def test_a_shell_completes_commands_options_and_names(line, some):
    assert set(some) <= set(completed(line))


def test_the_names_are_those_of_the_registry():
    assert set(strategy_names("")) == {cls.name for cls in discover().values()}
    assert strategy_names("specul") == [name for name in sorted(discover()) if name.startswith("specul")]
