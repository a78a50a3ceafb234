"""What is said beside a prompt that runs and yet may not be what was meant."""
from __future__ import annotations

import json
from unittest.mock import MagicMock

import pytest
from counting import Counting, counting_site
from tokenizers import processors
from toys import ASSISTANT, END, USER, byte_tokenizer, network

from playground import run, score
from playground.cli import main
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.engine.model import Model
from playground.ui.components.settings import Settings
from playground.ui.play.run_handlers import RunHandlers

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}"
    "{% if m.role == 'assistant' %}ENDING{% endif %}\n{% endfor %}"
)
QUIET = ("idle", "show_memory", "busy", "stoppable")
CHATML = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|user|>\n{% endfor %}"


def models_with(template: str | None = None, begin: str = "", adds_begin: bool = False) -> Models:
    tokenizer = byte_tokenizer(merges=0, **({"template": template} if template else {}))
    if begin:
        tokenizer.bos_token = begin
    if adds_begin:
        number = tokenizer.convert_tokens_to_ids(begin)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, number)]
        )
    net = network(vocabulary=len(tokenizer))
    net.generation_config.eos_token_id = tokenizer.eos_token_id
    return Models(Model(net, tokenizer, "small"), None)


def remarks(models: Models, prompt: str, **how) -> list[str]:
    return run("greedy", prompt, models=models, max_new_tokens=2, **how).header.remarks


def test_an_ordinary_prompt_has_no_remark():
    assert remarks(models_with(), "The red fox") == remarks(models_with(), "The red fox", chat=True, system="s") == []


@pytest.mark.parametrize("how", [
    {"prompt": f"a {END} b"},
    {"prompt": f"a {END} b", "chat": True},
    {"prompt": "a", "context": f"{END}"},
    {"prompt": "a", "chat": True, "system": END},
    {"prompt": "a", "chat": True, "before": [(END, "b")]},
    {"prompt": "a", "chat": True, "before": [("b", END)]},
], ids=lambda how: " ".join(how))
def test_names_of_special_tokens_in_a_text_are_remarked(how):
    assert remarks(models_with(), **how) == [
        f"The text holds {END}, which the model reads as a special token, not as text."
    ]


def test_the_special_tokens_of_the_template_are_no_remark_and_several_are_listed_once():
    (said,) = remarks(models_with(), f"{USER}{USER}{ASSISTANT}")
    assert said.startswith(f"The text holds {USER}, {ASSISTANT}, which the model reads as special tokens")


def test_a_begin_token_that_is_there_twice_is_remarked():
    models = models_with(begin=USER, adds_begin=True)
    assert remarks(models, "a") == []
    said = f"The prompt begins with two begin tokens, {USER * 2}; the tokenizer adds one: leave it out of the text."
    assert said in remarks(models, f"{USER}a")
    twice = models_with("<|user|><|user|>{{ messages[0].content }}", begin=USER)
    (said,) = remarks(twice, "a", chat=True)
    assert said == f"The prompt begins with two begin tokens, {USER * 2}; the chat template writes one as well."


def test_an_end_token_that_nobody_wrote_at_the_end_of_the_prompt_is_remarked():
    """As tokenizers that were saved for training have it, and templates that do not begin an answer."""
    models = models_with()
    backend = models.target.tokenizer.backend_tokenizer
    ids = [(END, models.target.tokenizer.eos_token_id)]
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=ids)
    said = f"ends the prompt with {END}, which ends a text: the model may begin another one after it."
    assert remarks(models, "a") == [f"The tokenizer {said}"]
    template = TEMPLATE.replace("ENDING", "").replace("\n", "") + END
    assert remarks(models_with(template), "a", chat=True) == [f"The chat template {said}"]
    assert not any("ends the prompt" in each for each in remarks(models_with(), f"a {END}"))


def test_a_base_model_whose_answers_end_otherwise_is_remarked():
    models = models_with(CHATML)
    assert remarks(models, "a") == []
    (said,) = remarks(models, "a", chat=True)
    assert said.startswith(f"The chat template ends an answer with {USER}, and a text of small ends with {END}")
    assert f"Set {USER} as a stop string" in said


@pytest.mark.parametrize("ending", [END, f"\n{END}", "", "."])
def test_an_answer_that_ends_as_texts_do_or_without_a_special_token_is_no_remark(ending):
    assert remarks(models_with(TEMPLATE.replace("ENDING", ending)), "a", chat=True) == []


def test_a_template_that_takes_no_answers_is_no_remark():
    first_only = "{{ messages[0].content }}{{ raise_exception('no') if messages | length > 1 }}"
    assert remarks(models_with(first_only), "a", chat=True) == []


def test_scoring_and_the_trace_have_the_remarks_too(tmp_path):
    (result, *_) = score(f"a {END} b", models=models_with())
    assert len(result.header.remarks) == 1
    result.trace.save(tmp_path / "t.jsonl")
    assert json.loads((tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()[0])["lanes"][0]["remarks"]


def test_the_shell_says_it_beside_the_text(capsys):
    assert main(["run", "greedy", "--prompt", "a <|end|> b", "--max-new-tokens", "2"]) == 0
    assert "The text holds <|end|>" in capsys.readouterr().err


def test_remarks_are_of_the_text_and_not_of_the_form():
    assert Prompt("a", True).remarks(models_with().target, [0, 1]) == []


def test_the_page_shows_them_while_the_run_goes_on_and_clears_them_with_the_next():
    def prepare(models, settings, memory):
        session = Counting([], length=3)
        session.headers[0].remarks = ["Mind this."] if settings.prompt == "one" else []
        return session

    page = MagicMock(**{f"{name}.return_value": {} for name in QUIET})
    page.show_remarks.side_effect = lambda remarks: {"remarks": list(remarks)}
    handlers = RunHandlers(counting_site(prepare), page)
    shown = {prompt: [change["remarks"] for change in handlers.run(None, *values(prompt)) if "remarks" in change]
             for prompt in ("one", "two")}
    assert shown["one"][0] == [] and shown["one"][1] == shown["one"][-1] == ["Mind this."]
    assert not any(shown["two"])


def values(prompt: str) -> list:
    settings = Settings(prompt=prompt)
    return [getattr(settings, name) for name in Settings.names()]
