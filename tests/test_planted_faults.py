"""The planted faults of tools/planted_faults.py have their places; the tool itself runs them, which takes an hour."""
from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _tool():
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / "tools" / "planted_faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses are looked up
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
FAULTS = [fault for faults in TOOL.FAULTS.values() for fault in faults]


def test_there_are_six_faults_in_each_of_five_areas():
    assert Counter(fault.area for fault in FAULTS) == dict.fromkeys(TOOL.FAULTS, 6)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_has_its_place_and_its_tests(fault):
    assert (ROOT / fault.place).read_text(encoding="utf-8").count(fault.before) == 1
    assert all((ROOT / "tests" / f"{name}.py").exists() for name in fault.tests)
