"""Prompts of the speed benchmark, by task: speculative decoding pays on some tasks and not on others."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.errors import Refusal

DEFAULT = Path(__file__).with_name("prompts.json")


@dataclass(frozen=True)
class Task:
    """One prompt and its task. `chat` applies only to models with a chat template.

    If only the length of a prompt matters, it is given as token ids.
    """

    task: str
    prompt: str
    chat: bool = False
    ids: tuple[int, ...] = ()


def read_tasks(path: str | Path = DEFAULT) -> list[Task]:
    """Tasks from a JSON array of {"task", "prompt", "chat"}; raises Refusal."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as reason:
        raise Refusal(
            f"The prompts {path} cannot be read ({reason.strerror or reason}): check the path.", "prompts"
        ) from None
    except ValueError:
        raise Refusal(
            f"The prompts {path} are not JSON: write an array of objects with task and prompt.", "prompts"
        ) from None
    tasks = [_task(entry) for entry in entries] if isinstance(entries, list) else []
    if not tasks or None in tasks:
        raise Refusal(
            f"The prompts {path} must be an array of objects such as "
            '{"task": "story", "prompt": "Once", "chat": false}.',
            "prompts",
        )
    return tasks


def _task(entry: Any) -> Task | None:
    valid = isinstance(entry, dict) and all(
        isinstance(entry.get(name), str) and entry[name].strip() for name in ("task", "prompt")
    )
    return Task(entry["task"], entry["prompt"], entry.get("chat") is True) if valid else None
