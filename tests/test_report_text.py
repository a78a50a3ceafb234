"""Documents of benchmarks as they are stored: rounded, and readable record by record."""
from __future__ import annotations

import json

from playground.bench.report_text import report_json


def test_a_stored_document_has_a_line_for_each_record_and_six_digits():
    rows = [{"a": 1 / 3, "n": 123456789}, {"a": [2e-9 / 3], "b": None}]
    text = report_json({"format": "x", "rows": rows, "none": [], "pair": (0.1,)})
    rounded = [{"a": 0.333333, "n": 123456789}, {"a": [6.66667e-10], "b": None}]
    assert json.loads(text) == {"format": "x", "rows": rounded, "none": [], "pair": [0.1]}
    assert '\n{"a":0.333333,"n":123456789},\n{"a":[6.66667e-10],"b":null}\n' in text
