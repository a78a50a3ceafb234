"""The chat template of a tokenizer: which one is used, and what it writes for given messages.

A template is a program that came with the model's files, so a confined child renders it (`template_sandbox`). Those of
the bundled models are rendered here, without a process.
"""
from __future__ import annotations

import atexit
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from playground.confined.child import BrokenLimit, Busy, ConfinedChild
from playground.engine.checkpoint.catalogue import BUNDLED_MODELS
from playground.engine.text.template_sandbox import BOUNDS, rendered
from playground.errors import Refusal
from playground.request_limits import without_mark

WORK = "playground.engine.text.template_sandbox"
WAIT_SECONDS = 10.0  # for one of the child's places
BROKEN = {
    "time": f"takes more than {BOUNDS.cpu_seconds:g} s of processor time, or {BOUNDS.wall_seconds:g} s in all",
    "memory": f"takes more than {BOUNDS.memory_bytes >> 20} MB of memory, or is nested too deeply",
    "start": "has to be rendered in a process of its own, which does not start",
}
KEPT = 64  # orders whose results are kept: the lanes of a run encode the same prompt
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """What a template is to write. `answer`: up to where the next answer begins, otherwise up to the last message."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None = None
    answer: bool = True

    def variables(self) -> dict[str, Any]:
        """As `apply_chat_template` passes them: without fields that are None, which many templates would write out."""
        messages = [{key: value for key, value in message.items() if value is not None} for message in self.messages]
        return {
            "messages": messages, "tools": self.tools, "documents": None, "add_generation_prompt": self.answer,
        }


@dataclass(frozen=True)
class Rendering:
    """The text of a chat, or why there is none: in the template's own words (`refused`), or an error of it."""

    text: str = ""
    refused: str = ""
    failed: str = ""

    @property
    def reason(self) -> str:
        return self.refused or self.failed


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template)


def render(tokenizer: PreTrainedTokenizerBase, *chats: Chat) -> list[Rendering]:
    """The texts of chats, all with tools or all without, or why there are none. Raises Refusal if there is no template
    for them.
    """
    source = template_of(tokenizer, chats[0].tools is not None)
    order = {
        "template": source,
        "variables": tokenizer.special_tokens_map,
        "now": datetime.now().isoformat() if "strftime_now" in source else "",
        "chats": [chat.variables() for chat in chats],
    }
    return _outcomes(json.dumps(order, default=str))


@lru_cache(KEPT)
def _outcomes(order: str) -> list[Rendering]:
    """What a template writes. Raises Refusal if it breaks a limit."""
    given = json.loads(order)
    confined = hasattr(os, "fork") and not is_bundled(given["template"])
    return [Rendering(**outcome) for outcome in (_confined(given) if confined else rendered(given))]


def _confined(order: dict[str, Any]) -> list[dict[str, str]]:
    try:
        return _renderer().ask(order, wait_seconds=WAIT_SECONDS)
    except Busy:
        raise Refusal("Other chat templates are being rendered and take long: try again in a few seconds.") from None
    except BrokenLimit as broken:
        raise Refusal(
            f"The model's chat template {BROKEN[broken.reason]}: turn chat off, or choose another model.", "chat"
        ) from None


@cache
def _renderer() -> ConfinedChild:
    """The child of this process; it ends with it."""
    child = ConfinedChild(WORK, BOUNDS)
    atexit.register(child.close)
    return child


@cache
def _bundled_templates() -> frozenset[str]:
    return frozenset(path.read_text(encoding="utf-8") for path in BUNDLED_MODELS.glob("*/chat_template.jinja"))


def is_bundled(template: str) -> bool:
    """Whether a template is that of a bundled model."""
    return template in _bundled_templates()


def template_of(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> str:
    """The template to use; raises Refusal."""
    named = tokenizer.chat_template
    if not named:
        raise Refusal("This model has no chat template: turn chat off and write the prompt as plain text.", "chat")
    if isinstance(named, dict):
        named = named.get("tool_use" if with_tools and "tool_use" in named else "default", named)
    if isinstance(named, dict):
        raise Refusal(
            f"This model has several chat templates ({', '.join(sorted(map(str, named)))[:100]}) and none is the "
            "default: turn chat off, or name one of them \"default\" in its tokenizer_config.json.",
            "chat",
        )
    if not isinstance(named, str):
        raise Refusal("The chat template of this model is no text: turn chat off, or mend its files.", "chat")
    return without_mark(named)
