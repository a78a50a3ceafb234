"""Training texts named on the command line."""
from __future__ import annotations

import json

from playground.algorithms.fairy_tales import TALES
from playground.cli.input_files import read_text
from playground.errors import Refusal


def read_texts(paths: list[str] | None) -> list[str]:
    """Each file is one text, or many if it is JSON Lines; the bundled tales if none is named. Raises Refusal."""
    texts = [text for path in paths or [str(TALES)] for text in _read(path)]
    if not any(text.strip() for text in texts):
        raise Refusal("The texts are empty: name files with text in them.", "texts")
    return texts


def _read(path: str) -> list[str]:
    text = read_text(path)
    if not path.endswith(".jsonl"):
        return [text]
    return [
        _text_of(line, f"Line {number} of {path}") for number, line in enumerate(text.splitlines(), 1) if line.strip()
    ]


def _text_of(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise Refusal(
            f'{place} is not of the form {{"text": "..."}}: write one such object per line, or name a plain text file.',
            "texts",
        )
    return text
