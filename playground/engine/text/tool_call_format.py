"""How the chat template of a model writes tools and calls of them.

The form of a call is read from what the template writes for a call of a made-up tool, so that no list of model families
is needed: text, then JSON with the name and the arguments, then text; or text with the name, then the arguments alone.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonprefix

from transformers import PreTrainedTokenizerBase

from playground.engine.text.chat_template import Chat, Rendering, has_template, render

NAME, ARGUMENTS = "made_up_tool", {"made_up_argument": 7}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"made_up_argument": {"type": "integer"}}},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "Hello."}


@dataclass(frozen=True)
class CallFormat:
    """What is written around a call, and the keys of its JSON object in order, the name's and that of the arguments.

    Without keys the JSON is the arguments alone, and `begin` has NAME in place of the tool's name.
    """

    begin: str
    end: str
    keys: tuple[str, ...] = ()
    name_key: str = ""

    def begin_of(self, tool: str) -> str:
        return self.begin.replace(NAME, tool)

    @property
    def trigger(self) -> str:
        """The start of `begin` that every call has, without white space at its ends; empty for a whole answer."""
        return self.begin.partition(NAME)[0].strip()


def read_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """The form of a tool call in the tokenizer's chat template; None if it has none, or one that is not recognised."""
    written = _written_call(tokenizer)
    return next(_formats(written), None) if written and NAME in written else None


def describes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes the tools it is given."""
    return NAME in _rendered(tokenizer, Chat([ASKED], [TOOL]))[0].text


def _written_call(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes as the answer with a call, without what ends a turn."""
    answers = (
        {"role": "assistant", "content": content, "tool_calls": [CALL]} for content in ("", None)
    )  # templates differ in what an answer without text is
    before, *answered = _rendered(
        tokenizer, Chat([ASKED], [TOOL]), *(Chat([ASKED, answer], [TOOL], answer=False) for answer in answers)
    )
    whole = next((rendering.text for rendering in answered if not rendering.reason), "")
    return _without_turn_end(whole[len(commonprefix([before.text, whole])):], tokenizer)


def _rendered(tokenizer: PreTrainedTokenizerBase, *chats: Chat) -> list[Rendering]:
    """The texts of chats, empty if there is no template. Raises Refusal for one that cannot be used at all."""
    return render(tokenizer, *chats) if has_template(tokenizer) else [Rendering()] * len(chats)


def _without_turn_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    shorter = text.rstrip()
    for special in tokenizer.all_special_tokens:
        shorter = shorter.removesuffix(special).rstrip()
    return shorter if shorter == text.rstrip() else _without_turn_end(shorter, tokenizer)


def _formats(written: str) -> Iterator[CallFormat]:
    for place in (place for place, letter in enumerate(written) if letter == "{"):
        try:
            value, end = json.JSONDecoder().raw_decode(written, place)
        except ValueError:
            continue
        begin, rest = written[:place].lstrip(), written[end:]
        if isinstance(value, dict) and len(value) == 2 and NAME in value.values() and ARGUMENTS in value.values():
            yield CallFormat(begin, rest, tuple(value), next(key for key, said in value.items() if said == NAME))
        elif value == ARGUMENTS and NAME in begin and rest:
            yield CallFormat(begin, rest)
