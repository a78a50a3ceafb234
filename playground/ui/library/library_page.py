"""The library: every strategy on one page, with its declarations and a link that runs it.

The page is rendered here as HTML, once; scripts/library/library.js searches and filters it. `#name` links to an entry.
"""
from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Any

import gradio as gr

from playground.bench.speculation.speed_summary import sentence
from playground.contract import KINDS, ReadsAttention, Strategy, discover
from playground.contract.lane_config import DRAWN
from playground.contract.metadata import citation, description, facts, link
from playground.page_scripts import joined
from playground.player.guarantee_labels import LIMIT, PROMISES, labelled
from playground.ui.components import glossary
from playground.ui.library.demo_lanes import settings_for
from playground.ui.library.recorded_runs import recorded_run
from playground.ui.server.site import Site

Class = type[Strategy]
Terms = dict[str, str]  # term -> description
TYPES = {"int": "whole number", "float": "number", "bool": "yes or no", "str": "text"}
ANY_DRAFT = "a draft model with any vocabulary"
NEEDS = {
    "draft": "a draft model with the target's vocabulary",
    "constraint": "a constraint",
    "context": "a passage as context",
    "labels": "labelled examples",
    "tests": "tests to run",
    "corpus": "a corpus to learn from",
    "trained": "weights trained for it",
    "hidden_states": "the model's hidden states",
    "attention_scores": "the model's attention weights",
    "experts": "a mixture-of-experts model",
    "state_space": "a model with Mamba layers",
    "encoder": "a model with an encoder and a decoder",
}
DRAFTS_WITH = {
    "nothing": "drafts from the text or from the target's own layers, without a second model or trained weights",
    "a draft model": "drafts with a second, smaller model",
    "a trained head": "drafts with weights that `fit` trained for the target",
}
TAKEN_UP = "engines took it up, or asked for it, in this year"
PLURALS = {
    "cache_policy": "cache policies",
    "compute_policy": "compute policies",
    "drawing": "samplers that draw at random",
}
LOOSE = ("heuristic", "plain limit")  # guarantees that do not fix the text or its distribution
SURE = {
    "high": "High: the source describes the method, and this follows it",
    "medium": "Medium: parts are our interpretation of the source",
    "low": "Low: the source says little about the method",
}
REBUILT = "The paper leaves details open, and this is one interpretation; it may differ from the authors' code."
COMMANDS = {
    "variant": ("Makes a modified model, on the command line:", "python -m playground variant {}"),
    "study": (
        "Draws figures of recorded runs on the command line, and of suitable runs on the page:",
        "python -m playground study {} run.jsonl",
    ),
}
SHORT = 44  # characters of a default that are shown


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the page; it is the same for all visitors and has no event handlers."""
    entries, script = page(list(discover().values())), joined("library/library.js")
    gr.HTML(entries, js_on_load=script, elem_id="library", apply_default_css=False)


def page(classes: list[Class]) -> str:
    """The whole page as HTML: search, filters, and a section for each family, the largest first."""
    sizes = Counter(cls.family() for cls in classes)
    guarantees = labelled(PROMISES | LIMIT)
    families = sorted(sizes, key=lambda family: (-sizes[family], family))
    sections = "".join(_section(family, [cls for cls in classes if cls.family() == family]) for family in families)
    return (f"<div class='strategies'>{_head(len(classes))}"
            f"{_chips('family', 'Family', {family: (family_name(family), '') for family in families})}"
            f"{_chips('promise', 'Guarantee', {label: (label, meaning) for label, meaning in guarantees.items()})}"
            f"{_chips('new', 'New', {year: (f'in {year}', TAKEN_UP) for year in years(classes)})}"
            f"{_chips('drafts', 'Drafters', {need: (f'need {need}', means) for need, means in DRAFTS_WITH.items()})}"
            f"<p class='found' role='status'></p>{NAMED}{sections}{NOTHING}{glossary.section()}</div>")


NAMED = ("<section class='named-so' aria-labelledby='named-so' hidden><h3 id='named-so'>By name</h3>"
         "<div class='entries'></div></section>")  # filled by a search
NOTHING = "<div class='none' hidden><p></p><button type='button' class='clear'>Show all</button></div>"


# by the first attention that a canvas decoder runs on
CANVAS_MODELS = {
    "full": "a model that fills masked positions", "block": "a block-diffusion model", "known_first": "a WeDLM model",
    "noise": "a DiffusionGemma model",
}


def years(classes: list[Class]) -> list[str]:
    """The years in which strategies are new, the latest first."""
    return sorted({cls.new_in for cls in classes if cls.new_in}, reverse=True)


def drafts_with(cls: Class) -> str:
    """What a drafter needs, one of DRAFTS_WITH; empty for other kinds."""
    if cls.kind != "drafter":
        return ""
    return "a trained head" if "trained" in cls.needs else "a draft model" if "draft" in cls.needs else "nothing"


def family_name(family: str) -> str:
    """The display name of a family's folder, such as "KV cache"."""
    name = family.replace("_", " ")
    return name.replace("kv", "KV", 1) if name.startswith("kv") else name.capitalize()


def needs(cls: Class) -> list[str]:
    """Requirements of a strategy."""
    declared = [ANY_DRAFT if need == "draft" and cls.translates else NEEDS[need] for need in cls.needs]
    fills = [CANVAS_MODELS[cls.attention[0]]] if cls.kind == "canvas_decoder" else []
    attention = [NEEDS["attention_scores"]] if issubclass(cls, ReadsAttention) else []
    return [*declared, *fills, *attention]


def refuses(cls: Class) -> list[str]:
    """What cannot be combined with it in a lane, by the rules of lane_config."""
    declared = [
        PLURALS.get(name, f"{name.replace('_', ' ')}s" if name in KINDS else name)
        for name in getattr(cls, "refuses", ())
    ]
    inexact = [
        f"draft tokens that are {DRAWN[way]}" for way in DRAWN if cls.kind == "verifier" and way not in cls.exact_for
    ]
    chance = [PLURALS["drawing"]] if getattr(cls, "greedy_only", False) else []
    ordered = ["constraints, unless it fills one position after the other"] if cls.kind == "canvas_decoder" else []
    return [*declared, *ordered, *inexact, *chance]


# --- the parts of the page ---

def _head(count: int) -> str:
    return (
        f"<h2>Library</h2><p class='lead'>All {count} strategies and parts, as declared in their files. The tests "
        "check the guarantees of each.</p><input type='search' spellcheck='false' autocomplete='off' "
        "placeholder='Search: name, author, knob, word' aria-label='Search the library'>"
    )


def _chips(name: str, title: str, values: dict[str, tuple[str, str]]) -> str:
    """A row of filter buttons. values: {value: (label, meaning)}."""
    buttons = "".join(
        f"<button type='button' aria-pressed='false' data-{name}='{escape(value)}' title='{escape(meaning)}'>"
        f"{escape(label)} <span class='count'></span></button>"
        for value, (label, meaning) in values.items()
    )
    return (f"<div class='chips' role='group' aria-label='{title}'><span aria-hidden='true'>{title}</span>"
            f"{buttons}</div>")


def _section(family: str, classes: list[Class]) -> str:
    entries = "".join(map(entry, sorted(classes, key=lambda cls: (KINDS.index(cls.kind), cls.title))))
    return (f"<section aria-labelledby='family-{family}'><h3 id='family-{family}'>{family_name(family)}</h3>"
            f"<div class='entries'>{entries}</div></section>")


def entry(cls: Class) -> str:
    """The entry of one strategy as HTML."""
    found = facts(cls)
    name, labels = escape(cls.name), ",".join(labelled(cls.guarantee))
    return (
        f"<article class='entry' id='{name}' tabindex='-1' data-family='{cls.family()}' data-promise='{labels}' "
        f"data-new='{cls.new_in}' data-drafts='{drafts_with(cls)}' "
        f"data-name='{escape(f'{cls.title} {cls.name}'.lower())}' data-words='{escape(_words(cls, found))}'>"
        f"<header><h4><a href='#{name}' title='Link to this entry'>{escape(cls.title)}</a></h4><code>{name}</code>"
        f"{_kind(cls)}</header>"
        f"<p class='summary'>{escape(cls.summary())}</p>{_marks(cls)}{_source(cls)}{_terms(_facts(cls, found))}"
        f"{recorded_run(cls)}{_how(cls)}{_knobs(found['knobs'])}<footer>{_way_in(cls)}</footer></article>"
    )


def _words(cls: Class, found: dict[str, Any]) -> str:
    """All text that a search matches, in lower case."""
    knobs = [text for knob in found["knobs"] for text in (knob["name"], knob["name"].replace("_", " "), knob["help"])]
    texts = [
        cls.name,
        cls.name.replace("_", " "),
        cls.title,
        cls.kind.replace("_", " "),
        family_name(cls.family()),
        cls.paper,
        f"new in {cls.new_in}" if cls.new_in else "",
        citation(cls),
        cls.summary(),
        *description(cls),
        *_facts(cls, found).values(),
        *knobs,
    ]
    return " ".join(dict.fromkeys(texts)).lower()


def _kind(cls: Class) -> str:
    base = next(base for base in cls.__mro__ if base.__dict__.get("kind") == cls.kind)
    return f"<span class='kind' title='{escape(base.summary())}'>{cls.kind.replace('_', ' ')}</span>"


def _marks(cls: Class) -> str:
    guarantees = [
        (label, "loose" if label in LOOSE else "firm", sentence) for label, sentence in labelled(cls.guarantee).items()
    ]
    rebuilt = [("reconstruction", "open", REBUILT)] if cls.reconstruction else []
    marks = "".join(
        f"<li class='{look}' title='{escape(sentence)}'>{label}</li>" for label, look, sentence in guarantees + rebuilt
    )
    return f"<ul class='marks' aria-label='Guarantees'>{marks}</ul>"


def _source(cls: Class) -> str:
    text, address = escape(citation(cls)) or "A baseline", link(cls)
    linked = f"<a href='{address}' target='_blank' rel='noopener'>{text}</a>" if address else text
    return f"<p class='source'>{linked}</p>"


def _facts(cls: Class, found: dict[str, Any]) -> Terms:
    """Requirements, slots and other facts about a strategy; empty ones are left out."""
    slots = ", ".join(f"{slot['kind']} (default {slot['default']})" for slot in found["slots"])
    terms = {
        "Needs": "; ".join(needs(cls)),
        "Slots": slots,
        "Draft tokens": DRAWN[cls.drawn] if cls.kind == "drafter" else "",
        "Not with": "; ".join(refuses(cls)),
        "Speed": sentence(cls.name),
        "Remembers": "what it learns, for the same visitor's next run" if cls.remembers else "",
        "Confidence": SURE[cls.sure],
        "Reconstruction": REBUILT if cls.reconstruction else "",
    }
    return {term: text for term, text in terms.items() if text}


def _terms(terms: Terms) -> str:
    rows = "".join(f"<div><dt>{term}</dt><dd>{escape(text)}</dd></div>" for term, text in terms.items())
    return f"<dl class='terms'>{rows}</dl>" if rows else ""


def _how(cls: Class) -> str:
    paragraphs = "".join(f"<p>{_prose(paragraph)}</p>" for paragraph in description(cls))
    return f"<details><summary>Method and source</summary>{paragraphs}</details>" if paragraphs else ""


def _prose(text: str) -> str:
    """Text of a docstring as HTML; text between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _knobs(knobs: list[dict[str, Any]]) -> str:
    if not knobs:
        return "<p class='plain'>No knobs</p>"
    names = ", ".join(knob["name"] for knob in knobs)
    rows = "".join(
        f"<dt><code>{escape(knob['name'])}</code> <span>{escape(_range(knob))}</span></dt>"
        f"<dd>{escape(knob['help'])}</dd>"
        for knob in knobs
    )
    return (f"<details class='knobs'><summary>{_count(len(knobs), 'knob')} <code>{escape(names)}</code></summary>"
            f"<dl>{rows}</dl></details>")


def _range(knob: dict[str, Any]) -> str:
    """The values a knob may have, and its default."""
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
    """A link that runs the strategy beside its plain lane on the playground, or the command for what no lane holds."""
    if settings := settings_for(cls):
        return (f"<a class='open-lane' href='./?s={settings.to_code()}&amp;run' "
                f"aria-label='Open {escape(cls.title)} in a lane'>Open in a lane</a>")
    text, command = COMMANDS[cls.kind]
    return f"<p>{text}</p><code>{escape(command.format(cls.name))}</code>"
