"""The bundled text: tales of the brothers Grimm in Margaret Hunt's translation of 1884, in the public domain."""
from __future__ import annotations

import json

from playground.asset_files import ASSETS

TALES = ASSETS / "texts" / "tales.jsonl"


def tales() -> str:
    """All tales, about 150,000 characters; paragraphs and tales are separated by empty lines."""
    return "\n\n".join(json.loads(line)["text"] for line in TALES.read_text(encoding="utf-8").splitlines())
