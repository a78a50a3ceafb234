"""The documentation names every registered strategy, and no other."""
import re
from pathlib import Path

from playground.contract import discover
from playground.engine.checkpoint.catalogue import ORACLE

PAGE = Path(__file__).parents[1] / "docs" / "strategy-list.md"


def test_the_list_of_strategies_is_complete():
    items = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("- ")]
    registered = {name for name, cls in discover().items() if cls.__module__.startswith("strategies.")}
    assert set(re.findall(r"`(\w+)`", "\n".join(items))) - {ORACLE} == registered


def test_additions_of_strategies_meet_on_no_line():
    items = re.findall(r"^- (`\w+`(?: and `\w+`)*)(?=$|: )", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(items) == PAGE.read_text(encoding="utf-8").count("\n- ")
    assert all(item.count(" and ") <= 1 for item in items)
