"""Values that no control of the page has, sent to every function of the public page: an answer, and no traceback."""
from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from visitor import LAST, TurnedAway, Visitor

from playground.ui.guard.event_inputs import UNREADABLE
from support.limited_pages import public  # noqa: F401

FILE = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
STRANGE = {"nothing": None, "text": "x", "an object": {"form": {}}, "a list": ["form"], "a number": -7.5,
           "a truth": True, "a file of the server": FILE}


async def answered(visitor: Visitor, function: int, data: list) -> str:
    """How an event with these values, the first of them as its own data, ended: its last message, or a refusal."""
    body = {"fn_index": function, "data": data, "event_data": data[0] if data else None}
    try:
        await visitor.join_raw(json.dumps(body | {"session_hash": visitor.session}).encode())
    except TurnedAway as refused:
        return str(refused)
    async with aclosing(visitor.messages(20)) as messages:
        return [message.raw async for message in messages if message.kind in LAST][-1]


async def each_function(address: str, value: object) -> list[str]:
    async with Visitor(address) as visitor:
        functions = await visitor.configure()
        return [await answered(visitor, one["id"], [value] * (1 + len(one["inputs"]))) for one in functions]


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
def test_strange_values_leave_no_traceback(public, value, capfd, caplog):
    ends = asyncio.run(each_function(f"http://{public}", value))
    assert len(ends) > 40 and all("process_completed" in end or end.startswith("HTTP 4") for end in ends)
    assert "Traceback" not in capfd.readouterr().err and not [one for one in caplog.records if one.exc_info]


def test_too_few_values_are_refused_with_a_sentence(public, capfd):
    async def end() -> str:
        async with Visitor(f"http://{public}") as visitor:
            await visitor.configure()
            return await answered(visitor, visitor.functions["run"], [])

    message = json.loads(asyncio.run(end()))
    assert not message["success"] and message["output"]["error"] == UNREADABLE
    assert "Traceback" not in capfd.readouterr().err
