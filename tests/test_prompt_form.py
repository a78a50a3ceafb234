"""How passage and prompt become one text, and the tools that a chat template describes."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pairs import pair
from toys import byte_tokenizer

from playground import run
from playground.cli import main
from playground.decoding.prompt import Prompt
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
ASKED = Prompt("Who {context}?", context="A {prompt}.")


def test_the_form_is_filled_at_once_whatever_passage_and_prompt_contain():
    assert replace(ASKED, form="Q: {prompt} / {context}").whole() == "Q: Who {context}? / A {prompt}."
    assert ASKED.whole() == "A {prompt}.\nWho {context}?"
    assert replace(ASKED, chat=True).whole() == "Read this: A {prompt}. Now answer: Who {context}?"
    assert replace(ASKED, context="", form="Q: {prompt} / {context}").whole() == ASKED.text


@pytest.mark.parametrize("form", ["{prompt}", "{context}", "{prompt} {prompt} {context}", "plain"])
def test_a_form_without_both_places_is_refused(form):
    with pytest.raises(Refusal, match="once each") as refused:
        replace(ASKED, form=form).check()
    assert refused.value.about == "form"


def test_the_template_gets_the_tools_as_the_library_passes_them():
    tokenizer = byte_tokenizer(merges=0, template=TEMPLATE)
    messages = [{"role": "user", "content": "Hi."}]
    theirs = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    tokens = Tokens(tokenizer, len(tokenizer))
    assert tokens.encode_chat("Hi.", tools=json.dumps(TOOLS)) == theirs
    assert tokens.decode(theirs).startswith("[add]user: Hi.")


@pytest.mark.parametrize("tools, chat, said", [
    ("[", True, "not valid JSON .* at line 1, column 2"),
    ("[]", True, "must be a list in JSON"),
    ('{"name": "add"}', True, "must be a list in JSON"),
    ("[1]", True, "Tool 1 is no JSON object with a name"),
    ('[{"name": "add"}, {"function": {}}]', True, "Tool 2 is no JSON object with a name"),
    ('[{"name": "\\ud800"}]', True, "surrogate"),
    ("[" * 100_000, True, "nested too deeply"),
    ("[" + "1" * 5000 + "]", True, "too large"),
    (json.dumps(TOOLS), False, "require a chat"),
])
def test_unusable_tools_are_refused(tools, chat, said):
    with pytest.raises(Refusal, match=said) as refused:
        Prompt("Hi.", chat, tools=tools).check()
    assert refused.value.about == "tools"


def test_tools_that_the_template_cannot_read_are_refused():
    template = TEMPLATE.replace("}}]", "}}{% for one in tool.function.parameters %}{% endfor %}]")
    tokenizer = byte_tokenizer(merges=0, template=template)
    with pytest.raises(Refusal, match="does not accept these messages and tools") as refused:
        Tokens(tokenizer, len(tokenizer)).encode_chat("Hi.", tools='[{"function": {"name": "add", "parameters": 3}}]')
    assert refused.value.about == "tools"


def test_the_header_of_a_run_has_the_form_and_its_prompt_is_in_it():
    result = run("greedy", "Who?", models=pair(), context="Mia.", form="{prompt} {context}", max_new_tokens=2)
    assert result.header.form == "{prompt} {context}"
    assert "".join(result.header.prompt_pieces) == "Who? Mia."


def test_tools_given_to_a_template_without_a_place_for_them_are_refused_from_python():
    with pytest.raises(Refusal, match="no place for tools"):
        run("greedy", "Hi.", models=pair(), chat=True, tools=TOOLS, max_new_tokens=2)


def test_a_lane_whose_constraint_describes_its_tools_has_a_prompt_of_its_own():
    models = pair()
    models.target.tokens.tokenizer.chat_template, old = TEMPLATE, models.target.tokens.tokenizer.chat_template
    try:
        knobs = {"tools": json.dumps(TOOLS), "describe": True, "begin_tag": "(", "end_tag": ")"}
        result = run("greedy", "Hi.", models=models, chat=True, extras=[("tool_calls", knobs)], max_new_tokens=2)
    finally:
        models.target.tokens.tokenizer.chat_template = old
    assert "".join(result.header.prompt_pieces).startswith("[add]user: Hi.")
    assert json.loads(result.header.tools)[0]["function"]["name"] == "add"


def test_the_command_line_refuses_a_form_before_a_model_is_loaded(capsys):
    assert main(["run", "greedy", "--prompt", "Who?", "--context", "Mia.", "--form", "{prompt}"]) != 0
    assert "once each" in capsys.readouterr().err
