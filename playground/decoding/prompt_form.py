"""How a passage and a prompt become one text, and the tools that a chat template describes."""
from __future__ import annotations

import json
import re

from playground.errors import Refusal
from playground.request_limits import check_text

CHAT_FORM, TEXT_FORM = "Read this: {context} Now answer: {prompt}", "{context}\n{prompt}"
PLACE = re.compile(r"\{(context|prompt)\}")


def filled(form: str, context: str, prompt: str) -> str:
    """Passage and prompt as one text. Both places are filled at once, since a passage may contain "{prompt}"."""
    parts = {"context": context, "prompt": prompt}
    return PLACE.sub(lambda place: parts[place[1]], form)


def check_form(form: str) -> None:
    """Raise Refusal for a form without a place for the passage or for the prompt."""
    if form and sorted(PLACE.findall(form)) != ["context", "prompt"]:
        raise Refusal("The form of the passage has to contain {context} and {prompt} once each: change it.", "form")


def check_tools(tools: str, chat: bool) -> None:
    """Raise Refusal for tools without a chat, or that are no list of tools in JSON."""
    if not tools:
        return
    if not chat:
        raise Refusal("Tools require a chat, whose template describes them: turn chat on, or remove them.", "tools")
    check_text(tools, "list of tools", about="tools")
    try:
        read = json.loads(tools)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, list) or not read or not all(isinstance(tool, dict) for tool in read):
        raise Refusal('Tools are a list in JSON: [{"type": "function", "function": {"name": "add", ...}}].', "tools")
