"""The presenter's panel of a class, on the playground page."""
from __future__ import annotations

from typing import Any

from playground.page_scripts import joined
from playground.ui.components.scripted_component import Scripted


class ClassroomPanel(Scripted):
    def __init__(self, **kwargs: Any):
        super().__init__(
            html_template="<div class='class-panel'></div>",
            js_on_load=joined("classroom/presenter.js"),
            apply_default_css=False,
            **kwargs,
        )
