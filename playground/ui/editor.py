"""The lane editor: one to four cards made from what the strategies declare, drawn and changed in the browser.

Its value is a list of {"strategy", "knobs", "extras", "forced"}. The catalogue of declarations travels once, with the page; after
every change the browser asks `check`, so a combination that cannot work is explained before it is run.
"""
from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradio as gr

from playground.errors import Refusal
from playground.recipe import MAIN_KINDS, assemble
from playground.strategy import Knob, Strategy, discover, make
from playground.ui.settings import LANES, Settings

ASSETS = Path(__file__).parents[2] / "assets" / "editor"
OFFERED = (*MAIN_KINDS, "sampler", "drafter", "verifier", "constraint", "cache_policy", "compute_policy")


class LaneEditor(gr.HTML):
    """`problems` are sentences the server found, {lane: text}."""

    def __init__(self, value: list[dict[str, Any]] | None = None, problems: dict[str, str] | None = None, **kwargs: Any):
        catalogue = {"strategies": catalogue_of(discover()), "most": LANES}
        script = (ASSETS / "editor.js").read_text(encoding="utf-8").replace("__CATALOGUE__", _literal(catalogue))
        super().__init__(value, problems=problems or {}, html_template="<div class='editor'></div>", js_on_load=script,
                         apply_default_css=False, server_functions=[check], **kwargs)

    def api_info(self) -> dict[str, Any]:
        return {"type": "array"}


def reading_context() -> list[str]:
    """Names of the strategies that rest an answer on a passage."""
    return [cls.name for cls in discover().values() if "context" in cls.needs]


def check(lanes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each lane what it promises, or the sentence that says why it cannot run and which knob or part it is about."""
    return [_checked(recipe) for recipe in Settings.read({"lanes": lanes}).recipes()]


def catalogue_of(strategies: dict[str, type[Strategy]]) -> list[dict[str, Any]]:
    """What the browser needs to know of every strategy a lane can hold."""
    return [_declaration(cls) for cls in strategies.values() if cls.kind in OFFERED]


def _checked(recipe) -> dict[str, Any]:
    try:
        return {"guarantee": assemble(recipe).guarantee(), "problem": "", "about": ""}
    except Refusal as refusal:
        return {"guarantee": [], "problem": str(refusal), "about": refusal.about}


def _declaration(cls: type[Strategy]) -> dict[str, Any]:
    plain = {name: getattr(cls, name) for name in ("name", "kind", "title", "paper", "sheet", "guarantee", "needs", "reconstruction")}
    rules = {"refuses": getattr(cls, "refuses", ()), "drawn": _if_text(getattr(cls, "drawn", None)),
             "exact_for": getattr(cls, "exact_for", ()), "brings": _brings(cls)}
    slots = [{"field": field, "kind": kind, "default": cls.__dataclass_fields__[field].default} for field, kind in cls.slots().items()]
    return {**plain, **rules, "family": cls.family(), "summary": cls.summary(), "slots": slots, "knobs": [_knob(k) for k in cls.knobs()]}


def _knob(knob: Knob) -> dict[str, Any]:
    return {**asdict(knob), "type": knob.type.__name__}


def _brings(cls: type[Strategy]) -> list[str]:
    """Names of the toggles a decoder adds by itself at its default settings."""
    if not hasattr(cls, "toggles"):
        return []
    try:
        return [toggle.name for toggle in make(cls.name).toggles()]
    except Refusal:
        return []


def _if_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _literal(data: Any) -> str:
    """JSON that may stand inside a script."""
    return json.dumps(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
