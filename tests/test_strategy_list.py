"""The documentation names every registered strategy, and no other."""
import re
from pathlib import Path

from playground.contract import discover
from playground.engine.checkpoint.catalogue import ORACLE

PAGE = Path(__file__).parents[1] / "docs" / "strategy-list.md"


def test_the_list_of_strategies_is_complete():
    table = "\n".join(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    registered = {name for name, cls in discover().items() if cls.__module__.startswith("strategies.")}
    assert set(re.findall(r"`(\w+)`", table)) - {ORACLE} == registered
