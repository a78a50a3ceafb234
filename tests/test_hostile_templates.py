"""Chat templates that would take all time, memory or output: a confined child renders them, and each is a sentence."""
from __future__ import annotations

from time import perf_counter

import psutil
import pytest
from toys import byte_tokenizer
from transformers import AutoTokenizer

from playground.engine.checkpoint.catalogue import BUNDLED_MODELS
from playground.engine.sequence_classifier import SequenceClassifier
from playground.engine.text import chat_template
from playground.engine.text.template_sandbox import LONGEST
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

LATEST = 12.0  # seconds; the limit is 5, and a loaded machine starts the child in some more
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ATTACKS = {
    "repeated text": ("{{ 'a' * 3000000000 }}", "too much memory"),
    "repeated in steps": ("{{ ('a' * 1000000) * 2000 }}", "too much memory|takes more than"),
    "doubled text": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "too much memory|takes more than",
    ),
    "wide format": ("{{ '%0999999999d' | format(1) }}", "too much memory"),
    "wide format method": ("{{ '{:>999999999}'.format('a') }}", "too much memory"),
    "justified": ("{{ 'x'.ljust(3000000000) }}", "too much memory"),
    "indented": ("{{ messages | tojson(indent=900000000) }}", "too much memory"),
    "range": ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    "nested ranges": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than"
    ),
    "deep loops": ("{% for i in range(9999) %}" * 15 + "{% endfor %}" * 15, "takes more than"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "recursion in two": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "recursive loop": ("{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}", "calls itself without end"),
    "brackets": ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "nested too deeply"),
    "blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "nested too deeply|nested blocks"),
    "long output": ("{% for a in range(30) %}{{ 'a' * 100000 }}{% endfor %}", f"more than {LONGEST:,} characters"),
    "files": ("{% include '/etc/passwd' %}", "no loader"),
}


def tokens_of(template: str) -> Tokens:
    tokenizer = byte_tokenizer(merges=0, template=template)
    return Tokens(tokenizer, len(tokenizer))


@pytest.mark.parametrize("template, said", ATTACKS.values(), ids=ATTACKS)
def test_a_hostile_template_is_refused_in_time_and_memory(template, said):
    before, start = psutil.Process().memory_info().rss, perf_counter()
    with pytest.raises(Refusal, match=f"chat template.*({said}).*: turn chat off"):
        tokens_of(template + TURNS).encode_chat("Hello")
    assert perf_counter() - start < LATEST
    assert psutil.Process().memory_info().rss - before < 200 << 20
    tokens = tokens_of(TURNS)
    assert tokens.decode(tokens.encode_chat("Hello")) == "user: Hello\n"


@pytest.mark.parametrize("template", ["{{ 'a' * 3000000000 }}", ATTACKS["deep loops"][0]], ids=["memory", "time"])
def test_tools_and_their_calls_are_asked_of_the_child_too(template):
    tokens = tokens_of(template)
    for ask in (tokens.check_tools, lambda: tokens.encode_chat("Hi", tools='[{"function": {"name": "add"}}]')):
        with pytest.raises(Refusal):
            ask()


def test_a_reward_model_with_a_hostile_template_is_refused():
    tokenizer = byte_tokenizer(merges=0, template=ATTACKS["repeated text"][0])
    judge = SequenceClassifier.__new__(SequenceClassifier)
    judge.tokenizer = tokenizer
    with pytest.raises(Refusal, match="too much memory"):
        judge._encode("Who?", "Mia.")


def test_no_template_of_others_is_rendered_in_this_process(monkeypatch):
    def rendered(order):
        raise AssertionError("rendered in this process")

    monkeypatch.setattr(chat_template, "rendered", rendered)
    assert tokens_of("never seen: " + TURNS).encode_chat("Hello")


def test_templates_of_the_bundled_models_need_no_process(monkeypatch):
    monkeypatch.setattr(chat_template, "_renderer", lambda: pytest.fail("a process for a template of our own"))
    for folder in sorted(path.parent for path in BUNDLED_MODELS.glob("*/chat_template.jinja")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert Tokens(tokenizer, len(tokenizer)).encode_chat("Who sings in this folder?")


def test_the_same_chat_is_rendered_once(monkeypatch):
    asked = []
    child = chat_template._renderer()
    monkeypatch.setattr(chat_template, "_renderer", lambda: asked.append(1) or child)
    tokens = tokens_of("once: " + TURNS)
    assert tokens.encode_chat("Hello") == tokens.encode_chat("Hello") and len(asked) == 1
