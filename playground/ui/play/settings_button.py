"""The button that opens the drawer, with a summary of the settings in it, and the button that undoes the last change.
The drawing is in assets/scripts/page/page.js. The event is 'restore', with the `settings` before that change.
"""
from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from playground.player.frames import to_json
from playground.ui.components.scripted_component import Scripted
from playground.ui.components.settings import Settings
from playground.ui.play.lane_editor import context_strategies

TEMPLATE = (
    "<button type='button' class='settings-open' aria-expanded='false' aria-controls='drawer'>"
    "<b>Settings</b><span class='summary'></span></button>"
    "<button type='button' class='undo' disabled title='Undo the last change of prompt, lanes or settings, or a fork "
    "(Ctrl+Z)'>Undo</button>"
)
SCRIPT = """
const undo = element.querySelector('.undo');
if (playground.isApple) undo.title = undo.title.replace('Ctrl+Z', '⌘Z');
playground.restoreSettings = (settings) => trigger("restore", { settings });
"""


class SettingsButton(Scripted):
    """`model` is the name of the model behind the default choice."""

    def __init__(self, start: Settings, model: str, **kwargs: Any):
        begin = f"playground.settingsModel = {json.dumps(model)}; {announce(to_json(asdict(start)))};"
        super().__init__(
            html_template=TEMPLATE,
            js_on_load=begin + SCRIPT,
            apply_default_css=False,
            **kwargs,
        )


def announce(settings: str) -> str:
    """A script expression that announces the settings given by another one, and returns them."""
    return f"playground.settingsChosen({settings}, {json.dumps(context_strategies())})"
