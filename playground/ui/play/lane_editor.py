"""The lane editor: a card for each lane, built in the browser from the declarations of the strategies.

Its value is a list of {"strategy", "knobs", "extras", "forced"} with an optional "seed". The catalogue of declarations
is sent once, with the page. After every change the browser calls `judged`, so that what cannot be started is explained
before it is run. Its event is 'mend', with `what` to add: "context" or "draft".
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

from playground.contract import Knob, Strategy, discover, make
from playground.contract.lane_config import MAIN_KINDS, SINGLE_KINDS, LaneConfig, assemble
from playground.contract.model_fit import DENOISERS, SEES
from playground.decoding.lane_checks import Surroundings, judge
from playground.errors import Refusal
from playground.page_scripts import joined
from playground.player.guarantee_labels import PROMISES
from playground.request_limits import LOCAL, check_lanes
from playground.run_request import LANES
from playground.ui.components.event_fields import MAX_INDEX
from playground.ui.components.scripted_component import Fetched
from playground.ui.components.settings import WIDEST, Settings
from playground.weight_changes import layer_changes

TOGGLES = ("sampler", *SINGLE_KINDS, "overlay")
LONGEST_EDITOR = 40  # characters of the name that a browser gives its editor
OFFERED = (*MAIN_KINDS, *TOGGLES, "drafter", "verifier")


class LaneEditor(Fetched):
    """The component of the editor.

    problems: messages from the server, {lane: text}. attention: of the chosen model if it fills masked positions; empty
    if it continues text, None if that is not known yet. drafted: the chosen model has a draft model. most: maximum
    number of lanes.
    """

    def __init__(
        self,
        value: list[dict[str, Any]] | None = None,
        problems: dict[str, str] | None = None,
        attention: str | None = "",
        drafted: bool = True,
        most: int = LANES,
        **kwargs: Any,
    ):
        self.problems, self.attention, self.drafted, self.most = problems or {}, attention, drafted, most  # for Gradio
        super().__init__(
            value,
            _script(most),
            [judged],
            problems=self.problems,
            attention=attention,
            drafted=drafted,
            html_template="<div class='editor'></div>",
            apply_default_css=False,
            **kwargs,
        )

    def api_info(self) -> dict[str, Any]:
        return {"type": "array"}


@cache
def _script(most: int) -> str:
    """The script. Cached: Gradio constructs the component again for every update during a run."""
    return joined("editor/editor.js", constants(most))


def constants(most: int = LANES) -> dict[str, Any]:
    """What the script knows of the strategies, by name."""
    known = {"PROMISES": PROMISES, "DENOISERS": DENOISERS, "LAYER_CHANGES": layer_changes()}
    return {"STRATEGIES": _catalogue(), "MOST_LANES": most, **known}


@cache
def _catalogue() -> list[dict[str, Any]]:
    """The declarations of all strategies. Cached: half a second to find out what can be added to what."""
    return catalogue_of(discover())


def context_strategies() -> list[str]:
    """Names of the strategies that need a context."""
    return [cls.name for cls in discover().values() if "context" in cls.needs]


def judged(asked: Any) -> list[dict[str, Any]]:
    """The verdicts on what a browser has in its editor: {"lanes", "around", "editor"}.

    `around` is {"context", "drafted", "attention"}, or null where lanes are not run on the same page; `editor` is a
    name that the browser chose. Empty if the browser has sent something newer meanwhile.
    """
    asked = asked if isinstance(asked, dict) else {}
    around, editor = asked.get("around"), asked.get("editor")
    known = _surroundings(around) if isinstance(around, dict) else None
    return check(asked.get("lanes"), known, editor[:LONGEST_EDITOR] if isinstance(editor, str) else "")


def _surroundings(around: dict[str, Any]) -> Surroundings:
    """What a browser says that lanes have besides their own settings."""
    attention = around.get("attention")
    return Surroundings(
        str(around.get("context") or ""),
        around.get("drafted") is not False,
        "The chosen model",
        attention if attention in ("", *SEES) else None,
    )


def check(lanes: Any, around: Surroundings | None = None, editor: str = "") -> list[dict[str, Any]]:
    """For each lane its guarantees, or why it cannot start and which knob, part or control the problem is about."""
    given = lanes[:WIDEST] if isinstance(lanes, list) else []
    try:
        check_lanes(given, MAX_INDEX, LOCAL)
    except Refusal as refusal:
        return [{"guarantee": [], "problem": str(refusal), "about": ""} for _ in given]
    return judge(Settings(lanes=given).configs(), around, editor)


def catalogue_of(strategies: dict[str, type[Strategy]]) -> list[dict[str, Any]]:
    """The declarations of all strategies that a lane can hold, for the browser."""
    return [_declaration(cls) for cls in strategies.values() if cls.kind in OFFERED]


def _declaration(cls: type[Strategy]) -> dict[str, Any]:
    plain = {
        name: getattr(cls, name)
        for name in ("name", "kind", "title", "paper", "sheet", "guarantee", "needs", "reconstruction")
    }
    rules = {
        "drawn": _if_text(getattr(cls, "drawn", None)),
        "draws": getattr(cls, "draws", None) is True,
        "attention": getattr(cls, "attention", ()),
        "exact_for": getattr(cls, "exact_for", ()),
        "greedy_only": getattr(cls, "greedy_only", False),
        "known_by": getattr(cls, "known_by", ""),
        "takes": _takes(cls),
    }
    return {
        **plain,
        **rules,
        "family": cls.family(),
        "summary": cls.summary(),
        "slots": _slots(cls),
        "knobs": [_knob(k) for k in cls.knobs()],
    }


def _knob(knob: Knob) -> dict[str, Any]:
    return {**asdict(knob), "type": knob.type.__name__}


def _slots(cls: type[Strategy]) -> list[dict[str, Any]]:
    """The slots, each with the names of the parts that may fill it."""
    return [
        {
            "field": field,
            "kind": kind,
            "default": cls.__dataclass_fields__[field].default,
            "takes": [part.name for part in _of_kind(kind) if _is_accepted(make, cls.name, **{field: part.name})],
        }
        for field, kind in cls.slots().items()
    ]


def _takes(cls: type[Strategy]) -> list[str]:
    """Names of the toggles that can be added to a decoder with default settings."""
    if cls.kind not in MAIN_KINDS:
        return []
    needed = [_of_kind("constraint")[0]] if "constraint" in cls.needs else []
    return [
        toggle.name
        for kind in TOGGLES
        for toggle in _of_kind(kind)
        if _can_combine(cls, [toggle, *(part for part in needed if part.kind != kind)])
    ]


def _can_combine(main: type[Strategy], toggles: list[type[Strategy]]) -> bool:
    return _is_accepted(assemble, LaneConfig(main.name, extras=[(toggle.name, {}) for toggle in toggles]))


def _is_accepted(make_lane: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        make_lane(*args, **kwargs)
    except Refusal:
        return False
    return True


def _of_kind(kind: str) -> list[type[Strategy]]:
    return [cls for cls in discover().values() if cls.kind == kind]


def _if_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
