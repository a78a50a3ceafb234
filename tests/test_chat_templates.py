"""Chat templates write what they write in the library, leave nothing out in silence, and fail with a sentence."""
from __future__ import annotations

import json
from datetime import datetime
from itertools import product

import pytest
from toys import byte_tokenizer
from transformers import AutoTokenizer

from playground.engine.checkpoint.catalogue import BUNDLED_MODELS
from playground.engine.loading.read_tokenizer import read_tokenizer
from playground.engine.text.chat_prompt import written
from playground.engine.text.chat_template import Chat, has_template, render
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.request_limits import MARK

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
NO_SYSTEM = PLAIN.replace("<{{", "{% if m.role == 'system' %}{% continue %}{% endif %}<{{")
PARTS = PLAIN.replace("{{ m.content }}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
                      "{% endfor %}")
FIRST_PART = PLAIN.replace("{{ m.content }}", "{{ m.content[0]['text'] }}")
LAST_ONLY = PLAIN.replace("in messages", "in messages[-1:]")
TOOLS = [{"type": "function", "function": {"name": f"add_{n}", "parameters": {"type": "object"}}} for n in "ab"]
SYSTEM = {"role": "system", "content": "  Be brief, \"please\".\n"}
TURNS = [
    {"role": "user", "content": "One {{ x }}?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."},
    {"role": "user", "content": "naïve 日本 <b>?"},
]
CHATS = ([TURNS[0]], [SYSTEM, TURNS[0]], TURNS, [SYSTEM, *TURNS])
FEATURES = {
    "blocks": "{% for m in messages %}\n    {% if loop.first %}\n{{ bos_token }}{% endif %}\n  {{- m.content | trim }}"
              "\n{% endfor %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
            "{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}"
            "{{ tools | tojson(separators=(',', ':'), ensure_ascii=true) if tools }}",
    "dict": "{{ dict(a=1, b=2)['b'] }}{{ dict.fromkeys([1, 2], 3)[2] }}{{ dict.__class__ is defined }}",
    "date": "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}",
    "macros": "{% macro say(m) %}{{ m.role | upper }}: {{ m.content }}{% endmacro %}"
              "{% for m in messages %}{{ say(m) }}{% endfor %}",
    "undefined": "{{ unknown }}{{ messages[0].unknown }}{{ 'x' if tools is none }}{{ documents is none }}",
}


def tokens_of(template) -> Tokens:
    tokenizer = byte_tokenizer(merges=0, template=template)
    return Tokens(tokenizer, len(tokenizer))


def theirs(tokenizer, messages, tools=None, answer=True) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=answer, tokenize=False)


# --- the same as the library ---

@pytest.mark.parametrize("template", FEATURES.values(), ids=FEATURES)
def test_a_template_writes_what_the_library_writes(template):
    tokenizer = byte_tokenizer(merges=0, template=template)
    for messages, tools, answer in product(CHATS, (None, TOOLS), (True, False)):
        (ours,) = render(tokenizer, Chat(messages, tools, answer))
        assert ours.text == theirs(tokenizer, messages, tools, answer) and not ours.reason


@pytest.mark.parametrize("folder", sorted(path.parent for path in BUNDLED_MODELS.glob("*/chat_template.jinja")),
                         ids=lambda folder: folder.name)
def test_the_bundled_models_read_what_the_library_writes(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for messages in CHATS:
        system = [messages[0]["content"]] if messages[0] is SYSTEM else [""]
        turns = [message["content"] for message in messages[messages[0] is SYSTEM:]]
        ids = Tokens(tokenizer, len(tokenizer)).encode_chat(turns[-1], *system, zip(turns[:-1:2], turns[1:-1:2]))
        assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_template_sees_the_local_date():
    (ours,) = render(byte_tokenizer(merges=0, template="{{ strftime_now('%Y-%m-%d %H') }}"), Chat(CHATS[0]))
    assert ours.text == datetime.now().strftime("%Y-%m-%d %H")


def test_a_byte_order_mark_is_no_part_of_a_template():
    assert tokens_of(MARK + PLAIN).encode_chat("Hi") == tokens_of(PLAIN).encode_chat("Hi")


@pytest.mark.parametrize("mark", ["", MARK])
def test_the_template_that_was_stored_for_a_processor_is_read(tmp_path, mark):
    """Multimodal models of older releases have none with their tokenizer, so that the library's own has none either."""
    byte_tokenizer(merges=0, template=None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(mark + json.dumps({"chat_template": PARTS}), encoding="utf-8")
    tokenizer = read_tokenizer("model", tmp_path)
    assert written(tokenizer, CHATS[1]) == theirs(byte_tokenizer(merges=0, template=PLAIN), CHATS[1])


@pytest.mark.parametrize("held", ["[]", "{", '{"chat_template": null}', '{"chat_template": []}'])
def test_a_file_that_holds_no_template_is_as_none(tmp_path, held):
    byte_tokenizer(merges=0, template=None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(held, encoding="utf-8")
    assert not has_template(read_tokenizer("model", tmp_path))


# --- errors of templates ---

@pytest.mark.parametrize("template, said", [
    ("{{ 1 / 0 }}", "does not work .ZeroDivisionError: division by zero.: turn chat off"),
    ("{{ 'a' + none }}", "TypeError"),
    ("{{ messages[0].content.encode('ascii').hex(1, 2, 3) }}", "TypeError"),
    ("{{ [1, 2] | join(3) | int(4, 5, 6, 7) }}", "TypeError"),
    ("{{ 'x' | unknown_filter }}", "No filter named"),
    ("{% for m in messages %}", "TemplateSyntaxError"),
    ("{{ messages.pop() }}", "SecurityError"),
    ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{% set ns = namespace(_x=1) %}", "SecurityError"),
    ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "calls itself without end"),
    ("{{ strftime_now(3) }}", "TypeError"),
    ("{{ '{:q}'.format(3) }}", "ValueError"),
    ("{{ messages[0]['content']['x'].y }}", "UndefinedError"),
    ({"rag": PLAIN, "tool_use": PLAIN}, "several chat templates .rag, tool_use. and none is the default"),
    ("{{ raise_exception('Only friends.') }}", r"does not accept these messages \(Only friends\): turn chat off"),
])
def test_any_error_of_a_template_is_a_sentence(template, said):
    with pytest.raises(Refusal, match=said) as refused:
        tokens_of(template).encode_chat("Hello")
    assert refused.value.about == "chat"


def test_the_advice_names_what_the_template_may_not_like():
    strict = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}" + PLAIN
    for arguments, advice in (
        (("Hi", "Be brief."), "leave the system message empty"),
        (("Hi", "", [("a", "b")]), "remove the earlier turns"),
    ):
        with pytest.raises(Refusal, match=advice):
            tokens_of(strict).encode_chat(*arguments)


def test_named_templates_are_chosen_as_the_library_does():
    named = {"default": PLAIN, "tool_use": "{{ tools | tojson }}" + PLAIN}
    tokenizer = byte_tokenizer(merges=0, template=named)
    assert written(tokenizer, CHATS[0]) == theirs(tokenizer, CHATS[0])
    assert written(tokenizer, CHATS[0], TOOLS) == theirs(tokenizer, CHATS[0], TOOLS)


# --- nothing is left out ---

@pytest.mark.parametrize("template, arguments, said, about", [
    (NO_SYSTEM, ("Who?", "Answer in French."), "no place for a system message: leave it empty", "system"),
    (NO_SYSTEM, ("Who?", "e"), "no place for a system message", "system"),
    (LAST_ONLY, ("Who?", "", [("One?", "Two.")]), "leaves out the message 'One\\?' of an earlier turn", "before"),
    (PLAIN.replace("<{{", "{% if m.role == 'assistant' %}{% continue %}{% endif %}<{{"),
     ("Who?", "", [("One?", "Two.")]), "leaves out the answer 'Two.'", "before"),
    (PLAIN.replace("m.content", "m.content[:5]"), ("Who wrote it?",), "leaves out the prompt", "chat"),
    ("assistant says a: ", ("a",), "leaves out the prompt", "chat"),
    (PLAIN.replace("m.content", "m.text"), ("Who?",), "leaves out the prompt", "chat"),
])
def test_a_message_that_the_template_leaves_out_is_named(template, arguments, said, about):
    with pytest.raises(Refusal, match=said) as refused:
        tokens_of(template).encode_chat(*arguments)
    assert refused.value.about == about


@pytest.mark.parametrize("template", [PARTS, FIRST_PART], ids=["loop", "first"])
def test_a_template_that_expects_parts_gets_parts(template):
    tokens = tokens_of(template)
    expected = tokens_of(PLAIN).encode_chat("Who?", "Be brief.", [("One?", "Two.")])
    assert tokens.encode_chat("Who?", "Be brief.", [("One?", "Two.")]) == expected


@pytest.mark.parametrize("template", [
    PLAIN.replace("m.content", "m.content | trim"),
    PLAIN.replace("m.content", "m.content | tojson"),
    PLAIN.replace("m.content", "m.content.split('</think>')[-1].lstrip('\\n')"),
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
])
def test_messages_may_be_stripped_escaped_reordered_and_freed_of_thoughts(template):
    tokenizer = byte_tokenizer(merges=0, template=template)
    assert written(tokenizer, CHATS[3]) == theirs(tokenizer, CHATS[3])


def test_a_tool_that_the_template_leaves_out_is_named():
    with pytest.raises(Refusal, match="leaves out the tool 'add_b'") as refused:
        tokens_of("{{ tools[0].function.name if tools }}" + PLAIN).encode_chat("Hi", tools=json.dumps(TOOLS))
    assert refused.value.about == "tools"


def test_a_parameter_of_a_tool_that_the_template_leaves_out_is_named():
    parameters = {"type": "object", "properties": {"city_name": {"type": "string"}}}
    tools = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": parameters}}])
    with pytest.raises(Refusal, match="leaves out the parameter 'city_name' of the tool 'weather'") as refused:
        tokens_of("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + PLAIN).encode_chat("Hi", tools=tools)
    assert refused.value.about == "tools"
    assert tokens_of("{{ tools | tojson if tools }}" + PLAIN).encode_chat("Hi", tools=tools)


def test_a_template_that_raises_describes_no_tools_and_no_calls():
    broken = tokens_of("{{ 1 / 0 }}")
    assert broken.call_format() is None
    with pytest.raises(Refusal, match="no place for tools"):
        broken.check_tools()
