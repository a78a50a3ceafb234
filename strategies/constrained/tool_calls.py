"""Tool calls, each valid under the schema of its tool."""
import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from playground.contract import Constraint, knob
from playground.errors import Refusal
from playground.events import Event, Note
from playground.grammar.limits import check_text
from playground.grammar.schema.source import SchemaSource, understood
from playground.grammar.schema.subset import FIXED_WHITESPACE
from playground.grammar.tagged_grammar import TaggedSource
from playground.grammar.triggered_grammar import TriggeredSource

EXAMPLE = json.dumps([
    {
        "name": "find_shop",
        "parameters": {
            "type": "object",
            "properties": {"sells": {"enum": ["bread", "fish", "cheese"]}, "open": {"type": "boolean"}},
            "required": ["sells"],
            "additionalProperties": False,
        },
    },
    {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
])


PARAMETERS = ("parameters", "input_schema", "inputSchema")  # of a tool, in the forms of several APIs


class ToolCalls(Constraint):
    """The model writes freely, and every tool call it begins names a tool that exists, with arguments that are valid
    under the schema of that tool.

    A call is a JSON object with the name of the tool and its arguments, between two strings as in the chat templates of
    Qwen and Hermes models, or it is the whole answer, as in those of Llama 3, which write `parameters` for the
    arguments. Or its form is read from the model's own chat template. The tools are given as to a chat API. After the
    name only the keys and values of that tool's schema are possible. With `describe` the chat template describes the
    tools in the prompt; otherwise nothing is added to it. A string that is a special token of the model never begins a
    call. With one tool and the whole answer it is `json_schema`. Engine: llguidance; see JSONSchemaBench, Geng et al.
    2025, arXiv 2501.10868.
    """

    name, title, paper, sheet = "tool_calls", "Tool calls", "2501.10868", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    tools: str = knob(
        EXAMPLE, multiline=True, file=True, json_text=True, help="the tools as JSON: a list of names and parameters"
    )
    place: str = knob(
        "between tags",
        choices=("between tags", "whole answer", "chat template"),
        help="calls within free text, a call as the answer, or whichever the model's chat template writes",
    )
    begin_tag: str = knob("<tool_call>", help="the string that begins a call within free text")
    end_tag: str = knob("</tool_call>", help="the string that ends a call within free text")
    arguments: str = knob(
        "arguments", choices=("arguments", "parameters"), help="what the key of the arguments is called"
    )
    must: bool = knob(False, help="whether the text may end only after a call")
    describe: bool = knob(False, help="whether the model's chat template describes the tools in the prompt")

    begins: ClassVar[int]  # these come with the lane
    spelling: ClassVar[Callable[[int], bytes]]
    form: ClassVar[Any] = None  # of a call in the model's chat template

    def check_target(self, model):
        if self.place == "between tags":
            model.tokens.check_is_text(self.begin_tag, "begin_tag")
            model.tokens.check_is_text(self.end_tag, "end_tag")
        if self.place != "chat template":
            return
        self.form = model.tokens.call_format()
        if self.form is None:
            raise Refusal(
                "This model's chat template writes no tool calls, or in a form that is not recognised: choose another "
                "place of the calls.",
                "place",
            )
        if any(model.tokens.is_special(token) for token in model.tokens.encode_continuation(self.form.begin)):
            raise Refusal(
                f"In this model's chat template a call begins with a special token, {self.form.begin[:40]!r}, which is "
                "no text: choose another place of the calls.",
                "place",
            )

    def tools_to_describe(self):
        return json.dumps([_described(tool) for tool in self._read()]) if self.describe else ""

    def grammar(self):
        keys = (self.form.keys if self.form else ()) or ("name", self.arguments)
        if self.place == "whole answer" or self.form and not self.form.begin:
            return "json_schema", json.dumps({"x-guidance": FIXED_WHITESPACE, **self._schema(keys)})
        if self.form and self.form.end:
            return "tags", self._tagged(keys).packed()
        begin, end = (self.form.begin, "") if self.form else (self.begin_tag, self.end_tag)
        parts = TriggeredSource("json_schema", json.dumps(self._schema(keys)), begin, end, self.must)
        return "triggered", parts.packed()

    def _tagged(self, keys: tuple[str, ...]) -> TaggedSource:
        """Calls as the chat template writes them: one tag for all tools, or one for each if the tag has its name."""
        form = self.form
        calls = {form.begin: self._schema(keys)}
        if not form.keys:
            calls = {form.begin_of(name): parameters for name, parameters in self._tools().items()}
        tags = [TriggeredSource("json_schema", json.dumps(schema), begin, form.end) for begin, schema in calls.items()]
        return TaggedSource(tuple(tags), (form.trigger,), self.must)

    def _schema(self, keys: tuple[str, ...]) -> dict:
        """The schema of one call of any of the tools, with the keys of its name and its arguments in this order."""
        calls = [self._call(name, parameters, keys) for name, parameters in self._tools().items()]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    def _call(self, name: str, parameters: dict, keys: tuple[str, ...]) -> dict:
        name_key = self.form.name_key if self.form else "name"
        return {
            "type": "object",
            "properties": {key: {"const": name} if key == name_key else parameters for key in keys},
            "required": list(keys),
            "additionalProperties": False,
        }

    def begin(self, start, spelling):
        self.begins, self.spelling = start, spelling

    def explain(self, history, token) -> Iterator[Event]:
        if b"}" not in self.spelling(token):
            return
        before = b"".join(map(self.spelling, history[self.begins:]))
        known, calls = (
            calls_in(text.decode("utf-8", "replace"), list(self._tools()))
            for text in (before, before + self.spelling(token))
        )
        for name, arguments in calls[len(known):]:
            yield Note(f"Call of the tool {name} with {json.dumps(arguments)}.")

    def remarks(self):
        return [
            f"Tool {name[:60]!r}: {remark}"
            for name, parameters in self._tools().items()
            if parameters
            for remark in _understood(name, parameters).remarks
        ]

    def _read(self) -> list:
        """The tools as they were given. Raises Refusal."""
        check_text("list of tools", self.tools)
        try:
            given = json.loads(self.tools)
        except (ValueError, RecursionError):
            raise Refusal("The tools are not valid JSON: give a list of names and parameters.", "tools") from None
        given = given.get("tools", [given]) if isinstance(given, dict) else given
        return given if isinstance(given, list) else []

    def _tools(self) -> dict[str, dict]:
        """The schema of the arguments of each tool. Raises Refusal."""
        found: dict[str, dict] = {}
        for tool in self._read():
            inner = tool.get("function", tool) if isinstance(tool, dict) else {}
            name = inner.get("name") if isinstance(inner, dict) else None
            parameters = next((inner[key] for key in PARAMETERS if key in inner), {"type": "object"}) if name else None
            if not isinstance(name, str) or not isinstance(parameters, dict):
                raise Refusal('A tool has no name: write {"name": "add", "parameters": {...}}.', "tools")
            if name in found:
                raise Refusal(f"Two tools are called {name[:60]!r}: rename one.", "tools")
            found[name] = _closed(name, _understood(name, parameters).schema)
        if not found:
            raise Refusal("There is no tool: give a list of at least one name with parameters.", "tools")
        return found


def calls_in(text: str, tools: list[str]) -> list[tuple[str, dict]]:
    """The complete calls in a text, each with the name of its tool and the arguments.

    The JSON has the name and the arguments, or the name comes right before it in the text.
    """
    found, place = [], 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        said = [part for part in value.values() if isinstance(part, str) and part in tools]
        arguments = next((part for part in value.values() if isinstance(part, dict)), {})
        named = [tool for tool in tools if text[:place].rstrip().rstrip(">:").endswith(tool)]
        if said or named:
            found.append((said[0], arguments) if said else (named[0], value))
        place = end
    return found


def _described(tool: dict) -> dict:
    """A tool as chat templates expect it."""
    return tool if "function" in tool else {"type": "function", "function": {"description": "", **tool}}


def _understood(name: str, parameters: dict) -> SchemaSource:
    try:
        return understood(parameters)
    except Refusal as refused:
        raise Refusal(f"The tool {name[:60]!r}: {refused}", "tools") from None


def _closed(name: str, parameters: dict) -> dict:
    """A schema without references, which would point to another place once it is part of a larger one."""
    if '"$ref"' in json.dumps(parameters):
        raise Refusal(f"The parameters of {name[:60]!r} use $ref: write the schema out in its place.", "tools")
    return parameters
