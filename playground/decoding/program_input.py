"""What programs pass to `playground.load`, `run`, `compare` and `score`, converted to what a session takes.

Everything of a wrong type or form raises Refusal here, before a model is loaded.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, TypeVar

import torch

from playground.contract.weight_change import check_changes
from playground.decoding.models import Models
from playground.errors import Refusal
from playground.lane_fields import LaneConfig
from playground.request_limits import check_text, check_whole, quoted
from playground.run_request import RunRequest

Extra = str | tuple[str, Mapping[str, Any]]
Message = Mapping[str, str]  # {"role": "system", "user" or "assistant", "content": text}
Turn = tuple[str, str]
Entry = TypeVar("Entry")

EXTRAS = 'a list such as ["top_p", ("top_k", {"k": 5})]'
TURNS = 'a list of (user, assistant) pairs, or of messages {"role": ..., "content": ...}'
LANES = 'a list of lanes, such as ["greedy", ("top_k", {"k": 5}), {"strategy": "sample", "seed": 3}]'


# --- models ---

def read_name(model: str | Path, option: str = "model") -> str:
    """The name of a model. A Path is always a folder, even if a model of the catalogue has the same name."""
    if not isinstance(model, (str, Path)):
        raise Refusal(f"The {option} must be a name or a path, not {quoted(model)}.", option)
    check_text(str(model), f"name of the {option}", about=option)
    plain = isinstance(model, Path) and not model.is_absolute() and not str(model).startswith((".", "~"))
    return os.path.join(".", model) if plain else str(model)


def read_device(device: str | torch.device) -> str:
    """The name of a device. Only cuda devices are numbered."""
    if isinstance(device, torch.device):
        return str(device) if device.type == "cuda" else device.type
    if not isinstance(device, str):
        raise Refusal(f"The device must be a name such as 'cpu', or a torch.device, not {quoted(device)}.", "device")
    return device


def read_dtype(dtype: str | torch.dtype) -> str:
    """The name of a number format."""
    if not isinstance(dtype, (str, torch.dtype)):
        raise Refusal(f"The dtype must be a name such as 'float32', or a torch.dtype, not {quoted(dtype)}.", "dtype")
    return str(dtype).removeprefix("torch.")


def check_models(models: Any) -> None:
    """Raise Refusal unless these are None or what `playground.load` returns."""
    if models is not None and not isinstance(models, Models):
        raise Refusal(f"models must be what playground.load returns, not {quoted(models)}.", "models")


# --- requests ---

def read_request(
    prompt: str | Iterable[Message],
    lanes: Iterable[LaneConfig] = (),
    *,
    chat: bool = False,
    system: str = "",
    context: str = "",
    before: Any = (),
    form: str = "",
    tools: Any = "",
    seed: int = 0,
    max_new_tokens: int = 64,
    stop: str | Iterable[str] | None = None,
) -> RunRequest:
    """The request, checked. A list of messages is a chat that ends with a message of the user; tools are a list of
    dicts or JSON; integers of numpy and torch are accepted.
    """
    asked = RunRequest(
        context=context,
        form=form,
        lanes=[vars(lane) for lane in lanes],
        length=_whole(max_new_tokens),
        seed=_whole(seed),
        stop=[stop] if isinstance(stop, str) else _listed(stop, "stop", "a text or a list of texts"),
        tools=tools if isinstance(tools, str) else _as_json(tools),
        **_asked(prompt, chat, system, before),
    )
    asked.check_system()
    asked.check()
    return asked


def _asked(prompt: str | Iterable[Message], chat: bool, system: str, before: Any) -> dict[str, Any]:
    """What is asked, as fields of a request."""
    if not isinstance(prompt, (list, tuple)):
        mode = "chat" if chat else "raw"
        return {"prompt": prompt, "mode": mode, "system": system, "before": [[*turn] for turn in _turns(before)]}
    if system or before:
        raise Refusal(
            "The prompt is a list of messages: put the system message and the earlier turns into it.", "prompt"
        )
    return _conversation(list(prompt))


def _as_json(tools: Any) -> str:
    try:
        return json.dumps(list(tools))
    except (TypeError, ValueError, RecursionError):
        raise Refusal("Tools must be a list of JSON objects: change them.", "tools") from None


def _conversation(messages: list[Message]) -> dict[str, Any]:
    said = [_message(message) for message in messages]
    system = said.pop(0)[1] if said and said[0][0] == "system" else ""
    if not said or said[-1][0] != "user":
        raise Refusal("The messages must end with one of the user: add it.", "prompt")
    turns = [[*turn] for turn in _pairs(said[:-1])]
    return {"prompt": said[-1][1], "mode": "chat", "system": system, "before": turns}


def _turns(before: Any) -> tuple[Turn, ...]:
    given = _listed(before, "before", TURNS)
    if given and all(isinstance(turn, Mapping) for turn in given):
        return _pairs([_message(message) for message in given])
    if not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in given):
        raise Refusal(f"before must be {TURNS}.", "before")
    return tuple((user, assistant) for user, assistant in given)


def _message(message: Any) -> tuple[str, Any]:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise Refusal('A message must be {"role": ..., "content": ...}: change it.', "prompt")
    if message["role"] not in ("system", "user", "assistant"):
        raise Refusal(
            f"The role of a message must be system, user or assistant, not {quoted(message['role'])}.", "prompt"
        )
    return message["role"], message["content"]


def _pairs(messages: list[tuple[str, Any]]) -> tuple[Turn, ...]:
    """Earlier messages as turns."""
    users, assistants = messages[::2], messages[1::2]
    if len(messages) % 2 or {role for role, _ in users} - {"user"} or {role for role, _ in assistants} - {"assistant"}:
        raise Refusal(
            "After a system message, if any, the messages of user and assistant must alternate: reorder them.",
            "before",
        )
    return tuple((user, assistant) for (_, user), (_, assistant) in zip(users, assistants))


def _whole(number: Any) -> Any:
    """An integer of any kind as int; anything else is left to the check of the request."""
    try:
        return number if isinstance(number, bool) else index(number)
    except TypeError:
        return number


# --- lanes ---

def read_lanes(lanes: Iterable[Any]) -> list[LaneConfig]:
    """The lanes of a comparison: each a name, (name, knobs), a LaneConfig, or the fields of one as a dict."""
    return [read_lane(lane) for lane in _listed(lanes, "lanes", LANES)]


def read_lane(lane: Any) -> LaneConfig:
    """A lane in any of these forms."""
    lane = _config(lane)
    if not isinstance(lane.strategy, str):
        raise Refusal(f"A strategy is given by its name, not as {quoted(lane.strategy)}.", "strategy")
    forced = [_whole(token) for token in _listed(lane.forced, "forced", "a list of token ids")]
    if not all(type(token) is int for token in forced):
        raise Refusal("forced must be a list of token ids, which are whole numbers.", "forced")
    seed = _whole(lane.seed)
    if seed is not None:
        check_whole(seed, "seed", "seed")
    check_changes(lane.weights)
    # whatever else a lane has stays as it is
    read = replace(lane, knobs=read_knobs(lane.knobs), extras=read_extras(lane.extras), forced=forced, seed=seed)
    read.check_fork()
    return read


def _config(lane: Any) -> LaneConfig:
    """A lane in any form as LaneConfig, its values unchecked."""
    if isinstance(lane, LaneConfig):
        return lane
    if isinstance(lane, str):
        return LaneConfig(lane)
    if isinstance(lane, (list, tuple)) and len(lane) == 2:
        return LaneConfig(*lane)
    if not isinstance(lane, Mapping):
        raise Refusal(f"lanes must be {LANES}, and {quoted(lane)} is no lane.", "lanes")
    LaneConfig.check_fields(lane)
    return LaneConfig(**lane)


def read_extras(extras: Iterable[Extra] | None) -> list[tuple[str, dict[str, Any]]]:
    """Toggles and slot fillings as (name, knobs)."""
    return [_extra(extra) for extra in _listed(extras, "extras", EXTRAS)]


def _extra(extra: Any) -> tuple[str, dict[str, Any]]:
    name, knobs = extra if isinstance(extra, (list, tuple)) and len(extra) == 2 else (extra, {})
    if not isinstance(name, str):
        raise Refusal(f"extras must be {EXTRAS}, and {quoted(extra)} is neither a name nor a pair.", "extras")
    return name, read_knobs(knobs)


def read_knobs(knobs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Knobs by name."""
    if knobs is None:
        return {}
    if not isinstance(knobs, Mapping) or not all(isinstance(name, str) for name in knobs):
        raise Refusal(f"knobs must be a dict such as {{'temperature': 0.7}}, not {quoted(knobs)}.", "knobs")
    return dict(knobs)


def _listed(given: Iterable[Entry] | None, name: str, form: str) -> list[Entry]:
    """The entries of a list or another iterable; none for None. A text or a dict is no list."""
    if given is None:
        return []
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise Refusal(f"{name} must be {form}, not {quoted(given)}.", name)
    return list(given)
