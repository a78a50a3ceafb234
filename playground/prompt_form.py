"""How a passage and a prompt become one text, and the tools that a chat template describes."""
from __future__ import annotations

import json
import re
from typing import Any

from playground.errors import Refusal
from playground.request_limits import check_text

CHAT_FORM, TEXT_FORM = "Read this: {context} Now answer: {prompt}", "{context}\n{prompt}"
PLACE = re.compile(r"\{(context|prompt)\}")
TOOL = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'


def filled(form: str, context: str, prompt: str) -> str:
    """Passage and prompt as one text. Both places are filled at once, since a passage may contain "{prompt}"."""
    parts = {"context": context, "prompt": prompt}
    return PLACE.sub(lambda place: parts[place[1]], form)


def check_form(form: str) -> None:
    """Raise Refusal for a form without a place for the passage or for the prompt."""
    if form and sorted(PLACE.findall(form)) != ["context", "prompt"]:
        raise Refusal("The form of the passage has to contain {context} and {prompt} once each: change it.", "form")


def check_tools(tools: str, chat: bool) -> None:
    """Raise Refusal for tools without a chat, or that are no list of objects with names in JSON."""
    if not tools:
        return
    if not chat:
        raise Refusal("Tools require a chat, whose template describes them: turn chat on, or remove them.", "tools")
    check_text(tools, "list of tools", about="tools")
    read = _read(tools)
    if not isinstance(read, list) or not read:
        raise Refusal(f"The tools must be a list in JSON with at least one tool: write [{TOOL}].", "tools")
    check_text(json.dumps(read, ensure_ascii=False), "list of tools", about="tools")  # escapes are characters now
    for number, tool in enumerate(read, 1):
        if not _is_named(tool):
            raise Refusal(f"Tool {number} is no JSON object with a name: write {TOOL}.", "tools")


def _read(tools: str) -> Any:
    """What a JSON text holds; raises Refusal."""
    try:
        return json.loads(tools)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise Refusal(f"The tools are not valid JSON ({error.msg} at {place}): write [{TOOL}].", "tools") from None
    except (ValueError, RecursionError):  # a number of too many digits, or too many brackets
        raise Refusal("The tools are too large or nested too deeply: shorten them.", "tools") from None


def _is_named(tool: Any) -> bool:
    """Whether this is {"name": ...}, or as chat APIs take it, {"function": {"name": ...}}."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(inner, dict) and isinstance(inner.get("name"), str) and bool(inner["name"].strip())
