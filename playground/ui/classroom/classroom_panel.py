"""The presenter's panel of a class, on the playground page."""
from __future__ import annotations

from typing import Any

from playground.asset_files import ASSETS
from playground.ui.components.scripted_component import Scripted


class ClassroomPanel(Scripted):
    def __init__(self, **kwargs: Any):
        super().__init__(
            html_template="<div class='class-panel'></div>",
            js_on_load=(ASSETS / "classroom" / "presenter.js").read_text(encoding="utf-8"),
            apply_default_css=False,
            **kwargs,
        )
