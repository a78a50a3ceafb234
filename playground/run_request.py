"""What a run is asked for. Programs, the shell, HTTP, links, lessons, the gallery and sessions read this one model.

A `RunRequest` is plain JSON data; its lanes are the fields of a `LaneConfig` (`lane_fields`). The arguments of the HTTP
API, the order of the page's controls, the keys of a lesson and the JSON Schema are made from its fields.

    RunRequest.given({"prompt": "Once", "lanes": [{"strategy": "greedy"}]})     # from a program: refuses what is wrong
    RunRequest.read(json.loads(text))                                           # from a link: leaves out what is wrong

Imports neither torch nor gradio.
"""
from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema

from playground.errors import Refusal
from playground.lane_fields import EXAMPLE, LaneConfig, Reader, check_lane_list, check_some_lane, untrusted_lane
from playground.prompt_form import check_form, check_tools
from playground.request_limits import (
    QUOTED,
    Rules,
    check_lanes,
    check_length,
    check_seed,
    check_stop_strings,
    check_stops,
    check_text,
    check_whole,
    quoted,
    without_mark,
)
from playground.weight_changes import QUANTIZED

LANES = 4
DEFAULT = "default"  # the model or draft the page was started with
NO_DRAFT = "none"
TURNS = 32  # earlier turns of a chat
STRICT = ConfigDict(strict=True)


def untrusted_turns(raw: Any) -> list[list[str]]:
    """Pairs of texts; anything else is left out."""
    pairs = raw if isinstance(raw, (list, tuple)) else []
    return [
        [*pair]
        for pair in pairs
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
    ][:TURNS]


def _lanes(raw: list[Any]) -> list[dict[str, Any]]:
    return [lane for lane in map(untrusted_lane, raw) if lane]


def _lines(stop: str | list[str]) -> str:
    """Stop strings as a page shows them, one per line."""
    return stop if isinstance(stop, str) else "\n".join(text.replace("\n", "\\n") for text in stop)


# how fields of more than one value are read from untrusted data
UNTRUSTED: dict[str, Reader] = {"lanes": _lanes, "before": untrusted_turns, "stop": _lines}


# --- the request ---

def _about(description: str) -> Any:
    return Field(description=description)


LANE_SCHEMA = TypeAdapter(LaneConfig).json_schema() | {"required": ["strategy"], "additionalProperties": False}
Lane = Annotated[dict[str, Any], WithJsonSchema(LANE_SCHEMA)]
Turn = Annotated[list[str], Field(min_length=2, max_length=2)]
Quantized = Literal["int8", "nf4", "fp4"]
assert get_args(Quantized) == QUANTIZED


@dataclass
class RunRequest:
    """Everything a run depends on, in the order of the page's controls. A field that is left out keeps its default."""

    MOST: ClassVar[int] = LANES
    prompt: Annotated[str, _about("text to continue")] = ""
    mode: Annotated[Literal["raw", "chat"], _about('"raw", or "chat" for the model\'s chat template')] = "raw"
    system: Annotated[str, _about("system message of a chat")] = ""
    context: Annotated[str, _about("a passage that every lane reads before the prompt")] = ""
    seed: Annotated[
        int, _about("of the lanes without a seed of their own; lanes with the same seed share their random draws")
    ] = 0
    length: Annotated[int, _about("maximum number of tokens a lane generates")] = 96
    stop: Annotated[
        str | list[str], _about("strings that end a text, one per line, where \\n is a line break; or a list")
    ] = ""
    model: Annotated[
        str, _about('target model, from the page\'s list; "default" is the one the page was started with')
    ] = DEFAULT
    draft: Annotated[str, _about('draft model; "default" is the target\'s own, "none" is none')] = DEFAULT
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], _about("number format of the models")
    ] = "auto"
    quantization: Annotated[Literal["none", Quantized], _about("of the target's weights")] = "none"
    lanes: Annotated[list[Lane], _about(f"one to {LANES} lanes, such as {EXAMPLE}")] = field(
        default_factory=lambda: [{"strategy": "greedy"}]
    )
    before: Annotated[
        Annotated[list[Turn], Field(max_length=TURNS)], _about("earlier turns of a chat, [[user, assistant], ...]")
    ] = field(default_factory=list)
    form: Annotated[
        str, _about('how context and prompt become one text, such as "{context} Question: {prompt}"')
    ] = ""
    tools: Annotated[
        str, _about("tools of a chat as for a chat API, a list in JSON, which the model's chat template describes")
    ] = ""

    @classmethod
    def names(cls) -> list[str]:
        return [each.name for each in fields(cls)]

    # --- in and out ---

    @classmethod
    def given(cls, arguments: dict[str, Any]) -> Self:
        """A program's request. Raises Refusal for a field that does not exist, or of a wrong type, and for a lane of
        which something cannot be used.
        """
        for name, value in arguments.items():
            _check_field(cls, name, value)
        return cls(**arguments)

    @classmethod
    def read(cls, raw: Any) -> Self:
        """A request from untrusted data; invalid fields keep their defaults."""
        blank, offered = cls(), choices(cls)
        given = raw.items() if isinstance(raw, dict) else ()
        known = {
            name: UNTRUSTED.get(name, lambda whole: whole)(value)
            for name, value in given
            if _fits(name, value, getattr(blank, name, None)) and value in offered.get(name, (value,))
        }
        known["lanes"] = known.get("lanes", blank.lanes)[:cls.MOST]
        return cls(**known)

    @classmethod
    def from_code(cls, code: str) -> Self | None:
        """The request in a link's code; None if it is malformed."""
        try:
            padded = code.encode() + b"=" * (-len(code) % 4)
            return cls.read(json.loads(base64.urlsafe_b64decode(padded)))
        except (ValueError, binascii.Error, RecursionError):
            return None

    def to_code(self) -> str:
        """A short code for a link: compact JSON without defaults, in base64."""
        blank = asdict(type(self)())
        changed = {name: value for name, value in asdict(self).items() if value != blank[name]}
        text = json.dumps(changed, separators=(",", ":"), ensure_ascii=False)
        return base64.urlsafe_b64encode(text.encode(errors="surrogatepass")).decode().rstrip("=")

    # --- what a session takes ---

    def configs(self) -> list[LaneConfig]:
        return [LaneConfig.of(lane) for lane in self.lanes]

    def stops(self) -> tuple[str, ...]:
        """Stop strings. In a text there is one per line, and a line break is written \\n."""
        if not isinstance(self.stop, str):
            return tuple(self.stop)
        return tuple(line.replace("\\n", "\n") for line in self.stop.splitlines() if line)

    def turns(self) -> tuple[tuple[str, str], ...]:
        """The earlier turns as pairs (user, assistant)."""
        return tuple((asked, answered) for asked, answered in self.before)

    @property
    def chat(self) -> bool:
        return self.mode == "chat"

    # --- checks ---

    def check(self, rules: Rules | None = None) -> None:
        """Raise Refusal for anything that can be checked without a model.

        rules: of a deployment, whose visitors' requests are limited in size; None for a program's own request.
        """
        self._check_numbers(rules)
        self._check_size(rules)
        self.check_prompt(rules)
        check_stops(self.stops())
        if rules:
            check_some_lane(self.lanes)
            check_lanes(self.lanes, self.length, rules.limits)

    def check_prompt(self, rules: Rules | None = None) -> None:
        """Raise Refusal for what is no text or has lone surrogates, an empty prompt, and what requires a chat."""
        most = rules.characters if rules else None
        texts = {"prompt": self.prompt, "system message": self.system, "context": self.context, "form": self.form}
        for name, text in texts.items():
            check_text(text, name, most, name.split()[0])
        for said in (said for turn in self.turns() for said in turn):
            check_text(said, "text of an earlier turn", most, "before")
        check_form(self.form)
        if not without_mark(self.prompt).strip():
            raise Refusal("The prompt is empty: write a few words for the models to continue.", "prompt")
        if self.before and not self.chat:
            raise Refusal("Earlier turns require a chat: turn chat on, or remove the turns.", "before")
        self.check_tools(rules)

    def check_tools(self, rules: Rules | None = None) -> None:
        """Raise Refusal for tools that no model can use here."""
        check_text(self.tools, "list of tools", rules.characters if rules else None, "tools")
        check_tools(self.tools.strip(), self.chat)

    def check_system(self) -> None:
        """Raise Refusal for a system message outside a chat, which a page keeps for the next chat."""
        if self.system and not self.chat:
            raise Refusal("A system message requires a chat: turn chat on, or leave the message out.", "system")

    def _check_numbers(self, rules: Rules | None) -> None:
        check_whole(self.seed, "seed", "seed")
        check_length(self.length, rules.tokens if rules else None)
        if rules:
            check_seed(self.seed)

    def _check_size(self, rules: Rules | None) -> None:
        """Raise Refusal for texts beyond the limits, before anything is computed from them."""
        if not rules:
            return
        check_text(self.tools, "list of tools", rules.characters, "tools")
        whole = [self.prompt, self.system, self.context, self.form, self.tools]
        whole += [text for turn in self.turns() for text in turn]
        if sum(map(len, whole)) > rules.characters:
            more = len(self.prompt) < sum(map(len, whole))
            named = "prompt, system message, tools, context and earlier turns together have" if more else "prompt has"
            raise Refusal(f"The {named} more than {rules.characters:,} characters: shorten the text.", "prompt")
        for name in ("model", "draft", *choices(RunRequest)):
            check_text(getattr(self, name), f"choice of {name}", rules.limits.name_characters, name)
        check_stop_strings(self.stop, rules.limits)


def _types(cls: type[RunRequest]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def choices(cls: type[RunRequest]) -> dict[str, tuple[str, ...]]:
    """The values of the fields that offer a choice."""
    return _choices(cls)  # type: ignore[arg-type]  # a class is hashable; mypy looks at its objects


@cache
def _choices(cls: type) -> dict[str, tuple[str, ...]]:
    """Cached: annotations are evaluated for it."""
    return {name: get_args(kind) for name, kind in get_type_hints(cls).items() if get_origin(kind) is Literal}


def kinds(cls: type[RunRequest]) -> dict[str, type]:
    """The types of the fields, as a link or a lesson gives them."""
    return {name: type(value) for name, value in vars(cls()).items()}


def descriptions(cls: type[RunRequest]) -> dict[str, str]:
    """What each field is for."""
    return {name: about["description"] for name, about in schema(cls)["properties"].items()}


def schema(cls: type[RunRequest] = RunRequest) -> dict[str, Any]:
    """The JSON Schema of a request."""
    return TypeAdapter(cls).json_schema()


def _field_reader(cls: type[RunRequest], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_types(cls)[name], config=STRICT)


def _check_field(cls: type[RunRequest], name: str, value: Any) -> None:
    """Raise Refusal unless a request has this field, with a value of this type."""
    if name not in cls.names():
        near = get_close_matches(str(name)[:QUOTED], cls.names(), 1)
        hint = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(cls.names())}."
        raise Refusal(f"A request has no field {quoted(name)}; {hint}", str(name)[:QUOTED])
    if name == "lanes":
        return check_lane_list(value, cls.MOST)
    try:
        _field_reader(cls, name).validate_python(value)
    except ValidationError:
        raise Refusal(f"{name} must be {_expected(cls, name)}, not {quoted(value)}.", name) from None


def _expected(cls: type[RunRequest], name: str) -> str:
    said = {int: "a whole number", str: "text", list: "a list of [user, assistant] pairs"}
    offered = choices(cls).get(name)
    if name == "stop":
        return "text, or a list of texts"
    return f"one of {', '.join(offered)}" if offered else said[kinds(cls)[name]]


def _fits(name: str, value: Any, default: Any) -> bool:
    return name == "stop" and _are_texts(value) or default is not None and type(value) is type(default)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
