"""Tool calls, each valid under the schema of its tool."""
import json

from playground.contract import Constraint, knob
from playground.engine.grammar_limits import check_text
from playground.engine.schema_subset import FIXED_WHITESPACE
from playground.engine.triggered_grammar import TriggeredSource
from playground.errors import Refusal

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


class ToolCalls(Constraint):
    """The model writes freely, and every tool call it begins names a tool that exists, with arguments that are valid
    under the schema of that tool.

    A call is a JSON object with the name of the tool and its arguments, between two strings as in the chat templates of
    Qwen and Hermes models, or it is the whole answer, as in those of Llama 3, which write `parameters` for the
    arguments. The tools are given as to a chat API. After the name only the keys and values of that tool's schema are
    possible. The constraint adds nothing to the prompt: describe the tools there. A string that is a special token of
    the model never begins a call. With one tool and the whole answer it is `json_schema`. Engine: llguidance; see
    JSONSchemaBench, Geng et al. 2025, arXiv 2501.10868.
    """

    name, title, paper, sheet = "tool_calls", "Tool calls", "2501.10868", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    tools: str = knob(
        EXAMPLE, multiline=True, file=True, json_text=True, help="the tools as JSON: a list of names and parameters"
    )
    place: str = knob(
        "between tags", choices=("between tags", "whole answer"), help="calls within free text, or a call as the answer"
    )
    begin_tag: str = knob("<tool_call>", help="the string that begins a call within free text")
    end_tag: str = knob("</tool_call>", help="the string that ends a call within free text")
    arguments: str = knob(
        "arguments", choices=("arguments", "parameters"), help="what the key of the arguments is called"
    )
    must: bool = knob(False, help="whether the text may end only after a call")

    def grammar(self):
        schema = self._schema()
        if self.place == "whole answer":
            return "json_schema", json.dumps({"x-guidance": FIXED_WHITESPACE, **schema})
        parts = TriggeredSource("json_schema", json.dumps(schema), self.begin_tag, self.end_tag, self.must)
        return "triggered", parts.packed()

    def _schema(self) -> dict:
        """The schema of one call of any of the tools."""
        calls = [self._call(name, parameters) for name, parameters in self._tools().items()]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    def _call(self, name: str, parameters: dict) -> dict:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def _tools(self) -> dict[str, dict]:
        """The schema of the arguments of each tool. Raises Refusal."""
        check_text("list of tools", self.tools)
        try:
            given = json.loads(self.tools)
        except (ValueError, RecursionError):
            raise Refusal("The tools are not valid JSON: give a list of names and parameters.", "tools") from None
        found: dict[str, dict] = {}
        for tool in given if isinstance(given, list) else []:
            inner = tool.get("function", tool) if isinstance(tool, dict) else {}
            name, parameters = inner.get("name"), inner.get("parameters", {"type": "object"})
            if not isinstance(name, str) or not isinstance(parameters, dict):
                raise Refusal('A tool has no name: write {"name": "add", "parameters": {...}}.', "tools")
            if name in found:
                raise Refusal(f"Two tools are called {name[:60]!r}: rename one.", "tools")
            found[name] = _closed(name, parameters)
        if not found:
            raise Refusal("There is no tool: give a list of at least one name with parameters.", "tools")
        return found


def _closed(name: str, parameters: dict) -> dict:
    """A schema without references, which would point to another place once it is part of a larger one."""
    if '"$ref"' in json.dumps(parameters):
        raise Refusal(f"The parameters of {name[:60]!r} use $ref: write the schema out in its place.", "tools")
    return parameters
