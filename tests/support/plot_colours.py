"""The colours of plotly figures."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}|(rgb|hsl)a?\(.*\)")


def colours_of(figure: Any) -> set[str]:
    """Every colour that a figure names, in its data and its layout; those of plotly's own template are left out."""
    drawn = json.loads(figure.to_json())
    drawn["layout"].pop("template", None)
    return set(_colours(drawn))


def _colours(part: Any) -> Iterator[str]:
    if isinstance(part, str) and COLOUR.fullmatch(part):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _colours(inner)
