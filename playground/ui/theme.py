"""How the page looks: system fonts, quiet greys and one accent, so that nothing is fetched and colour is left to the
data.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

ASSETS = Path(__file__).parents[2] / "assets"
SANS = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace"]
COLOURS = {  # which of Gradio's own colours follow which of page.css, in light and dark alike
    "paper": ("body_background_fill",),
    "card": ("background_fill_primary", "block_background_fill", "input_background_fill"),
    "sunk": ("background_fill_secondary",),
    "line": ("border_color_primary", "block_border_color", "input_border_color"),
    "ink": ("body_text_color",),
    "soft": ("body_text_color_subdued",),
    "accent": ("link_text_color", "checkbox_background_color_selected"),
}
PRIVATE = {"api_visibility": "private", "show_progress": "hidden", "show_progress_on": []}
"""How the page listens to its own controls. Nothing shows progress, so that a message of a stream is not told to every
output, which Gradio does by copying all that the component holds. Inputs it still tells."""


def dress() -> dict[str, Any]:
    """What `launch` needs for the looks."""
    return {
        "theme": _theme(),
        "css_paths": _styles(),
        "head": f"<script>{read('page.js')}</script>",
        "footer_links": ["api", "settings"],
    }


def _styles() -> list[Path]:
    """page.css and then the files of single parts, which lean on it."""
    base = ASSETS / "page.css"
    return [base, *sorted(set(ASSETS.glob("*.css")) - {base})]


def read(name: str) -> str:
    """A file of the page, such as a piece of HTML."""
    return (ASSETS / name).read_text(encoding="utf-8")


def notice(name: str) -> gr.HTML:
    """A place beside a control where a sentence may appear. It comes into sight: on a phone the button that was pressed
    is a screen away.
    """
    seen = "watch('value', () => props.value && element.scrollIntoView({ block: 'nearest' }));"
    return gr.HTML(
        "",
        html_template="<p role='alert'>${value}</p>",
        js_on_load=seen,
        elem_classes="notice",
        elem_id=name,
        apply_default_css=False,
    )


def _theme() -> gr.themes.Base:
    plain = gr.themes.Base(
        primary_hue="blue", neutral_hue="slate", font=SANS, font_mono=MONO, radius_size="md", text_size="md"
    )
    colours = {
        f"{name}{mode}": f"var(--pg-{ours})"
        for ours, names in COLOURS.items()
        for name in names
        for mode in ("", "_dark")
    }
    return plain.set(color_accent="var(--pg-accent)", **colours)
