"""Renders chat templates: Jinja programs that come with a model's files, so any of them may be wrong or hostile.

What a template can use is what `apply_chat_template` of the transformers library gives it (5.23): Jinja's immutable
sandbox with `tojson`, `raise_exception`, `strftime_now`, `dict`, `namespace`, loop controls and `{% generation %}`.
That module itself takes two seconds to import; this one imports nothing but Jinja. It is the work of a confined child
(`confined.server`): the kernel bounds time, memory and stack, and there are no files.
"""
from __future__ import annotations

import codecs
import json
import pprint  # noqa: F401 - Jinja imports it and the next two when a template first needs them, where no file is open
import textwrap  # noqa: F401
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.constants
from jinja2 import Template, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from playground.confined.task_bounds import TaskBounds

BOUNDS = TaskBounds(cpu_seconds=1.0, wall_seconds=5.0, memory_bytes=256 << 20, answer_bytes=64 << 20, at_once=4)
LONGEST = 2_000_000  # characters of a rendered chat
LONGEST_REASON = 200  # characters of a template's own message that are repeated
COMPILED = 16
CODECS = ("unicode_escape", "raw_unicode_escape", "ascii", "latin_1", "utf_8", "utf_16", "utf_32", "idna", "punycode")


def warm() -> None:
    """Load what Python and Jinja load when a template first needs it: codecs, and what messages of errors take."""
    for name in CODECS:
        codecs.lookup(name)
    rendered({"template": "{{ 1 / 0 }}", "variables": {}, "now": "", "chats": [{}]})


def learn(lesson: Any) -> None:
    """There is nothing to learn: a template is compiled where it is rendered, since that runs parts of it."""


def answer(order: dict[str, Any], learned: None) -> list[dict[str, str]]:
    """The answer of the child is what `rendered` returns."""
    return rendered(order)


def rendered(order: dict[str, Any]) -> list[dict[str, str]]:
    """Render chats with one template. For each {"text"}, or {"refused"} with the template's own message, or {"failed"}
    with what went wrong.

    order: {"template", "variables": what every chat sees, "now": local time in ISO form, "chats": what each one sees}.
    """
    try:
        template = _compiled(order["template"], order["now"])
    except Exception as reason:
        return [_failure(reason)] * len(order["chats"])
    return [_outcome(template, {**order["variables"], **chat}) for chat in order["chats"]]


def _outcome(template: Template, seen: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": "".join(_bounded(template.generate(**seen)))}
    except Exception as reason:  # a program may raise anything
        return _failure(reason)


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > LONGEST:
            raise OverflowError(f"it writes more than {LONGEST:,} characters")
        yield piece


def _failure(reason: Exception) -> dict[str, str]:
    said = " ".join(str(reason).split())[:LONGEST_REASON].rstrip(".:")
    if type(reason) is jinja2.TemplateError:
        return {"refused": said}
    if isinstance(reason, RecursionError):
        return {"failed": "it calls itself without end, or is nested too deeply"}
    if isinstance(reason, MemoryError):
        return {"failed": "it takes too much memory"}
    if isinstance(reason, OverflowError):
        return {"failed": said}
    return {"failed": f"{type(reason).__name__}: {said}" if said else type(reason).__name__}


@lru_cache(COMPILED)
def _compiled(source: str, now: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.fromisoformat(now).strftime(form),
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
             sort_keys: bool = False) -> str:
    """Without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(message)


class GenerationBlock(Extension):
    """{% generation %}: marks what the assistant says, for training. Here the block is written as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        return caller()


class PlainDict:
    """`dict`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PlainNamespace(Namespace):
    """`namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace has no attribute {name!r}")
