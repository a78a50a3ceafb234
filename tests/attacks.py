"""Malicious requests against the page or its other visitors. To add one, add a line to ATTACKS.

Most are one request to the endpoint `run`: a text that costs the server far more than it cost to write. Bodies are
built before the attack begins, so that this does not disturb the measurement.
"""
from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
from visitor import Message, TurnedAway, Visitor, request

PRIME = 1_000_003
# what the attacker received: sentences, "done" for a normal answer, "HTTP 4xx: ..."
Send = Callable[[Visitor], Awaitable[list[str]]]


@dataclass(frozen=True)
class Attack:
    name: str
    prepare: Callable[[Visitor], Send]


def ask(name: str, *requests: Callable[[], list[Any]]) -> Attack:
    """Requests to `run`, one after another."""

    def prepare(visitor: Visitor) -> Send:
        bodies = [body_of(visitor, data()) for data in requests]
        return lambda visitor: _each(visitor, bodies)
    return Attack(name, prepare)


def raw(name: str, body: Callable[[Visitor], bytes]) -> Attack:
    """A malformed body."""

    def prepare(visitor: Visitor) -> Send:
        made = body(visitor)
        return lambda visitor: _each(visitor, [made])
    return Attack(name, prepare)


def body_of(visitor: Visitor, data: list[Any]) -> bytes:
    """The body of a request to `run`."""
    return json.dumps({"data": data, "fn_index": visitor.functions["run"], "session_hash": visitor.session}).encode()


async def _each(visitor: Visitor, bodies: list[bytes]) -> list[str]:
    return [line for body in bodies for line in await _answers(visitor, body)]


async def _answers(visitor: Visitor, body: bytes) -> list[str]:
    """The answer to one request; a closed connection counts as no answer."""
    said: list[str] = []
    try:
        await visitor.join_raw(body)
        async with aclosing(visitor.messages()) as messages:
            said += [line async for message in messages for line in _said(message)]
    except TurnedAway as refused:
        said.append(str(refused))
    except httpx.HTTPError as broken:
        said.append(f"CLOSED {type(broken).__name__}")
    return said


def _said(message: Message) -> list[str]:
    """The sentences in one message; most have none."""
    internal = [f"INTERNAL {message.internal_error}"] if message.internal_error else []
    broken = [message.kind] if message.kind in ("unexpected_error", "server_stopped") else []
    answered = message.sentences() if message.kind == "process_completed" else []
    return [*internal, *["done"] * message.ends_run, *answered, *broken]


def lane(
    strategy: str = "greedy", extra: str = "", knobs: dict[str, Any] | None = None, **more: Any
) -> Callable[[], list[Any]]:
    """One lane: a strategy with knobs, or greedy with a toggle that has them."""
    whole = {
        "strategy": strategy,
        "knobs": {} if extra else knobs or {},
        "extras": [[extra, knobs or {}]] if extra else [],
        **more,
    }
    return lambda: request(lanes=[whole], length=16)


def grammar(kind: str, source: Callable[[], str], knob: str) -> Callable[[], list[Any]]:
    return lambda: lane(extra=kind, knobs={knob: source()})()


def lark_chain(rules: int = 5_000) -> str:
    """Every rule is the next one, and the last is a letter."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(rules)), f'r{rules}: "a"'])


def ref_chain(links: int = 9_000) -> str:
    """318 KB: each definition refers to the next."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)} | {f"d{links}": {"type": "null"}}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def gbnf_rules(rules: int = 20_000) -> str:
    return "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(rules)), f'r{rules} ::= "a"'])


def optionals(count: int = 22) -> str:
    """A rule with two expansions for every optional part: 2 to the power of `count`."""
    return "start: " + " ".join(f'["{chr(97 + i)}"]' for i in range(count))


def deep(depth: int = 100_000) -> str:
    return "[" * depth + "]" * depth


def deep_body(visitor: Visitor) -> bytes:
    return f'{{"fn_index": {visitor.functions["run"]}, "session_hash": "{visitor.session}", "data": {deep()}}}'.encode()


def numbers_body(visitor: Visitor) -> bytes:
    """40 MB of numbers in the place of the lanes."""
    head, tail = json.dumps(request(lanes="LANES")).split('"LANES"')
    numbers = "[" + "1," * 20_000_000 + "1]"
    return (
        f'{{"fn_index": {visitor.functions["run"]}, "session_hash": "{visitor.session}", "data":'
        f" {head}{numbers}{tail}}}".encode()
    )


def unread(count: int = 80) -> Attack:
    """Requests in separate sessions whose answers are never fetched."""

    def prepare(visitor: Visitor) -> Send:
        data = request(length=256)
        bodies = [
            json.dumps(
                {"data": data, "fn_index": visitor.functions["run"], "session_hash": f"{visitor.session}{i}"}
            ).encode()
            for i in range(count)
        ]
        return lambda visitor: _joined(visitor, bodies)
    return Attack("80 requests whose answers are never read", prepare)


async def _joined(visitor: Visitor, bodies: list[bytes]) -> list[str]:
    """The result of joining the queue for each: "done" or an error."""
    answers = await asyncio.gather(*(visitor.join_raw(body) for body in bodies), return_exceptions=True)
    return [str(answer) if isinstance(answer, Exception) else "done" for answer in answers]


SURROGATE = "\ud800"
ATTACKS = [
    ask("a Lark chain of 5,000 rules", grammar("lark", lark_chain, "source")),
    ask("a $ref chain of 318 KB", grammar("json_schema", ref_chain, "source")),
    ask("400,000 forced tokens", lambda: lane(forced=[1] * 400_000)()),
    ask("200,000 token ids that no model has", lambda: lane(forced=[10**9] * 200_000)()),
    ask(
        "300 KB of labels for gencls_ppl",
        lambda: lane("gencls_ppl", knobs={"labels": "|".join(f"label {i}" for i in range(25_000))})(),
    ),
    ask(
        "300 KB of text for caad",
        lambda: lane(extra="caad", knobs={"pairs": "\n".join(f"q {i} => a {i}" for i in range(17_000))})(),
    ),
    ask("50,000 choices", grammar("choice", lambda: " | ".join(f"option {i}" for i in range(50_000)), "options")),
    ask(
        "a multipleOf that is a large prime",
        grammar("json_schema", lambda: json.dumps({"type": "integer", "multipleOf": PRIME}), "source"),
    ),
    ask(
        "a regex of 900 optional letters for syncode",
        grammar("syncode", lambda: "start: A\nA: /([a-z]?){900}b/", "source"),
    ),
    ask("22 optional parts for syncode", grammar("syncode", optionals, "source")),
    ask("a GBNF grammar of 20,000 rules", grammar("gbnf", gbnf_rules, "source")),
    ask(
        "a schema over whose error message the grammar engine panics",
        grammar("json_schema", lambda: json.dumps({"required": {"a" * 97 + "é": 1}}), "source"),
    ),
    ask("a regex that counts to a million", grammar("regex", lambda: "(((a{100}){100}){100})", "pattern")),
    ask(
        "lone surrogates",
        lambda: request(prompt=SURROGATE),
        lambda: request(stop=SURROGATE),
        lambda: request(model=SURROGATE),
        grammar("regex", lambda: SURROGATE, "pattern"),
        lane(SURROGATE),
        lambda: request(context=SURROGATE, mode="chat", system=SURROGATE),
    ),
    ask("NUL characters", lambda: request(prompt="\0"), grammar("lark", lambda: 'start: "\0"', "source")),
    raw("a body nested 100,000 deep", deep_body),
    raw("40 MB of numbers", numbers_body),
    unread(),
]
