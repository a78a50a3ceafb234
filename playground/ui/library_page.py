"""The library: every strategy on one page, with what its file declares and a way to see it run.

The page is made here as HTML, once; assets/library.js searches and filters what stands there. `#name` leads to an
entry.
"""
from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Any

import gradio as gr

from playground.contract import KINDS, Strategy, discover
from playground.contract.lane_config import WAYS
from playground.contract.metadata import citation, description, facts, link
from playground.ui.demo_lanes import settings_for
from playground.ui.guarantee_labels import LIMIT, PROMISES, told
from playground.ui.site import Site
from playground.ui.theme import read

Class = type[Strategy]
Terms = dict[str, str]  # what it is called, what there is to say
TYPES = {"int": "whole number", "float": "number", "bool": "yes or no", "str": "text"}
ANY_DRAFT = "a draft model, whatever its vocabulary"
NEEDS = {
    "draft": "a draft model with the target's vocabulary",
    "constraint": "a constraint",
    "context": "a passage as context",
    "labels": "labelled examples",
    "tests": "tests to run",
    "corpus": "texts to learn from",
    "trained": "weights trained for it",
    "hidden_states": "the model's hidden states",
    "attention_scores": "the model's attention",
    "experts": "a model with experts",
}
PLURALS = {
    "cache_policy": "cache policies",
    "compute_policy": "compute policies",
    "drawing": "samplers that draw by chance",
}
LOOSE = ("heuristic", "plain limit")  # promises that leave the text open
SURE = {
    "high": "Sure: its source tells how it works, and it follows it",
    "medium": "Fairly sure: parts are our own reading of the source",
    "low": "Unsure: the source tells little of how it works",
}
REBUILT = "The paper leaves things open, and this is one reading of it; details may differ from the authors' own."
COMMANDS = {
    "variant": ("Makes a changed model, from a shell:", "python -m playground variant {}"),
    "study": (
        "Draws figures of recorded runs, and of every run it can study on the page:",
        "python -m playground study {} run.jsonl",
    ),
}
SHORT = 44  # letters of a default that are shown


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the page; it is the same for everyone and asks nothing of the server."""
    gr.HTML(page(list(discover().values())), js_on_load=read("library.js"), elem_id="library", apply_default_css=False)


def page(classes: list[Class]) -> str:
    """The whole page as HTML: search, filters, and a section for each family, the largest first."""
    sizes = Counter(cls.family() for cls in classes)
    promises = told(PROMISES | LIMIT)
    families = sorted(sizes, key=lambda family: (-sizes[family], family))
    sections = "".join(_section(family, [cls for cls in classes if cls.family() == family]) for family in families)
    return (f"<div class='strategies'>{_head(len(classes))}"
            f"{_chips('family', {family: (family_name(family), '') for family in families})}"
            f"{_chips('promise', {label: (label, meaning) for label, meaning in promises.items()})}"
            f"<p class='found' role='status'></p>{sections}{NOTHING}</div>")


NOTHING = "<div class='none' hidden><p></p><button type='button' class='clear'>Show all</button></div>"


def family_name(family: str) -> str:
    """A folder's name for people, "KV cache"."""
    said = family.replace("_", " ")
    return said.replace("kv", "KV", 1) if said.startswith("kv") else said.capitalize()


def needs(cls: Class) -> list[str]:
    """What a lane, or a program, must have for it."""
    declared = [ANY_DRAFT if need == "draft" and cls.translates else NEEDS[need] for need in cls.needs]
    fills = ["a model that fills masked positions"] if cls.kind == "canvas_decoder" else []
    attention = ["the model's attention"] if getattr(cls, "watches", False) else []
    return [*declared, *fills, *attention]


def refuses(cls: Class) -> list[str]:
    """What cannot be in a lane with it, from the rules that lanes are put together by."""
    declared = [
        PLURALS.get(name, f"{name.replace('_', ' ')}s" if name in KINDS else name)
        for name in getattr(cls, "refuses", ())
    ]
    inexact = [f"guesses that are {WAYS[way]}" for way in WAYS if cls.kind == "verifier" and way not in cls.exact_for]
    chance = [PLURALS["drawing"]] if getattr(cls, "greedy_only", False) else []
    several = (
        ["cache policies that go by the path of one text"]
        if getattr(cls, "several", False) and "cache_policy" not in cls.refuses
        else []
    )
    alone = ["decoders that grow several texts"] if cls.kind == "cache_policy" and not cls.row_wise else []
    return [*declared, *inexact, *chance, *several, *alone]


# --- the parts of the page ---

def _head(count: int) -> str:
    return (
        f"<h2>Library</h2><p class='lead'>All {count} strategies and parts, each as its own file declares it. The tests hold every one to its "
        f"promises.</p><input type='search' spellcheck='false' autocomplete='off' placeholder='Search: a name, an author, a knob, a word' "
        "aria-label='Search the library'>"
    )


def _chips(filtered: str, values: dict[str, tuple[str, str]]) -> str:
    """A row of buttons; each value with what it is called and what it means."""
    buttons = "".join(
        f"<button type='button' aria-pressed='false' data-{filtered}='{escape(value)}' title='{escape(meaning)}'>{escape(said)} "
        "<span class='count'></span></button>"
        for value, (said, meaning) in values.items()
    )
    return f"<div class='chips' role='group' aria-label='{filtered.capitalize()}'><span aria-hidden='true'>{filtered.capitalize()}</span>{buttons}</div>"


def _section(family: str, classes: list[Class]) -> str:
    entries = "".join(map(entry, sorted(classes, key=lambda cls: (KINDS.index(cls.kind), cls.title))))
    return f"<section aria-labelledby='family-{family}'><h3 id='family-{family}'>{family_name(family)}</h3><div class='entries'>{entries}</div></section>"


def entry(cls: Class) -> str:
    """Everything about one strategy."""
    found = facts(cls)
    name, labels = escape(cls.name), ",".join(told(cls.guarantee))
    return (
        f"<article class='entry' id='{name}' tabindex='-1' data-family='{cls.family()}' data-promise='{labels}' data-words='{escape(_words(cls, found))}'>"
        f"<header><h4><a href='#{name}' title='Link to this entry'>{escape(cls.title)}</a></h4><code>{name}</code>{_kind(cls)}</header>"
        f"<p class='summary'>{escape(cls.summary())}</p>{_marks(cls)}{_source(cls)}{_terms(_told(cls, found))}"
        f"{_how(cls)}{_knobs(found['knobs'])}<footer>{_way_in(cls)}</footer></article>"
    )


def _words(cls: Class, found: dict[str, Any]) -> str:
    """All that a search may find, in small letters."""
    knobs = [text for knob in found["knobs"] for text in (knob["name"], knob["name"].replace("_", " "), knob["help"])]
    texts = [
        cls.name,
        cls.name.replace("_", " "),
        cls.title,
        cls.kind.replace("_", " "),
        family_name(cls.family()),
        cls.paper,
        citation(cls),
        cls.summary(),
        *description(cls),
        *_told(cls, found).values(),
        *knobs,
    ]
    return " ".join(dict.fromkeys(texts)).lower()


def _kind(cls: Class) -> str:
    base = next(base for base in cls.__mro__ if base.__dict__.get("kind") == cls.kind)
    return f"<span class='kind' title='{escape(base.summary())}'>{cls.kind.replace('_', ' ')}</span>"


def _marks(cls: Class) -> str:
    promises = [
        (label, "loose" if label in LOOSE else "firm", sentence) for label, sentence in told(cls.guarantee).items()
    ]
    rebuilt = [("reconstruction", "open", REBUILT)] if cls.reconstruction else []
    marks = "".join(
        f"<li class='{look}' title='{escape(sentence)}'>{label}</li>" for label, look, sentence in promises + rebuilt
    )
    return f"<ul class='marks' aria-label='Promises'>{marks}</ul>"


def _source(cls: Class) -> str:
    said, address = escape(citation(cls)) or "A baseline", link(cls)
    linked = f"<a href='{address}' target='_blank' rel='noopener'>{said}</a>" if address else said
    return f"<p class='source'>{linked}</p>"


def _told(cls: Class, found: dict[str, Any]) -> Terms:
    """What a lane with it has, needs and cannot have; only what there is."""
    guesses = WAYS[cls.drawn] if cls.kind == "drafter" else ""
    slots = ", ".join(f"{slot['kind']} (by default {slot['default']})" for slot in found["slots"])
    remembers = "what it learns, for the same visitor's next run" if cls.remembers else ""
    rebuilt = REBUILT if cls.reconstruction else ""
    sure = SURE[cls.sure]
    terms = {
        "Needs": "; ".join(needs(cls)),
        "Slots": slots,
        "Its guesses are": guesses,
        "Refuses": "; ".join(refuses(cls)),
        "Remembers": remembers,
        "How sure we are": sure,
        "Rebuilt": rebuilt,
    }
    return {term: said for term, said in terms.items() if said}


def _terms(terms: Terms) -> str:
    rows = "".join(f"<div><dt>{term}</dt><dd>{escape(said)}</dd></div>" for term, said in terms.items())
    return f"<dl class='terms'>{rows}</dl>" if rows else ""


def _how(cls: Class) -> str:
    paragraphs = "".join(f"<p>{_prose(paragraph)}</p>" for paragraph in description(cls))
    return f"<details><summary>How, and where it comes from</summary>{paragraphs}</details>" if paragraphs else ""


def _prose(text: str) -> str:
    """Text of a docstring; what stands between backticks there is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _knobs(knobs: list[dict[str, Any]]) -> str:
    if not knobs:
        return "<p class='plain'>No knobs</p>"
    names = ", ".join(knob["name"] for knob in knobs)
    rows = "".join(
        f"<dt><code>{escape(knob['name'])}</code> <span>{escape(_range(knob))}</span></dt><dd>{escape(knob['help'])}</dd>"
        for knob in knobs
    )
    return f"<details class='knobs'><summary>{_count(len(knobs), 'knob')} <code>{escape(names)}</code></summary><dl>{rows}</dl></details>"


def _range(knob: dict[str, Any]) -> str:
    """The values a knob takes, and the one it has until it is set."""
    between = (
        f", {_number(knob['min'])} to {_number(knob['max'])}"
        if knob["min"] is not None and knob["max"] is not None
        else ""
    )
    kind = f"one of {', '.join(knob['choices'])}" if knob["choices"] else TYPES[knob["type"]] + between
    return f"{kind}; default {_value(knob['default'])}"


def _value(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, str):
        line = " ".join(default.split())
        return "empty" if not line else line if len(line) <= SHORT else f"{line[:SHORT]}…"
    return _number(default)


def _number(value: float) -> str:
    return f"{value:g}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _way_in(cls: Class) -> str:
    """A link to the playground with the strategy in a lane; for what no lane holds, the command that uses it."""
    if settings := settings_for(cls):
        return f"<a class='open-lane' href='./?s={settings.to_code()}' aria-label='Open {escape(cls.title)} in a lane'>Open in a lane</a>"
    said, command = COMMANDS[cls.kind]
    return f"<p>{said}</p><code>{escape(command.format(cls.name))}</code>"
