"""docs/numbers.md explains every number of the page, the exports and the API with its definition."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from playground.cli import main
from playground.page_scripts import SCRIPTS
from playground.trace.csv_export import COLUMNS
from playground.trace.lane_metrics import METRICS, definitions
from playground.ui.benchmark.results_table import MEANINGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
HELP = re.compile(r'label: "([^"]+)", help: "([^"]+)"')
NAMED = re.compile(r'\{ name: "([^"]+)", label: "([^"]+)", help: "([^"]+)"')


def section(title: str) -> list[str]:
    """The rows of the table below a heading, without its head."""
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def objects(file: str, name: str) -> str:
    """The text of a constant of a module of the page."""
    return re.search(rf"^export const {name} = [\[{{]\n(.*?)^[\]}}];", (SCRIPTS / file).read_text(), re.M | re.S)[1]


def test_metrics_are_listed_in_order_with_their_definitions():
    assert section("Metrics of a lane") == [f"| `{name}` | {meaning} |" for name, meaning in definitions().items()]
    assert list(definitions()) == list(METRICS)


def test_the_strip_under_a_lane_is_explained_as_on_the_page():
    strip = objects("run/metrics.js", "STRIP")
    rows = [f"| {label} | `{name}` | {help_} |" for name, label, help_ in NAMED.findall(strip)]
    assert section("Under a lane") == rows and len(rows) == strip.count("name:")


@pytest.mark.parametrize("title, file, name", [("Where the time went", "run/ledger.js", "WORKERS"),
                                               ("Origins of tokens", "lane/colour.js", "ORIGINS")])
def test_marks_and_shares_are_explained_as_on_the_page(title, file, name):
    assert section(title) == [f"| {label} | {help_} |" for label, help_ in HELP.findall(objects(file, name))]


def test_the_columns_of_a_benchmark_are_explained_as_in_its_table():
    assert section("Benchmark table") == [f"| {name} | {meaning} |" for name, (meaning, _) in MEANINGS.items()]


def test_every_column_of_the_csv_file_is_explained():
    named = [re.match(r"\| `(\w+)` \| \S", row)[1] for row in section("Columns of a CSV file and of a data frame")]
    assert named == list(COLUMNS)


def test_the_command_line_prints_the_definitions(capsys):
    assert main(["list", "--metrics"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name}: {meaning}" for name, meaning in definitions().items()]
