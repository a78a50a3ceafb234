"""The theme of the page: system fonts, greys and one accent colour, so that nothing is fetched."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from playground.asset_files import ASSETS
from playground.page_scripts import joined
from playground.trace.plot_style import IN_DARK
from playground.ui.components import glossary

SANS = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace"]
COLOURS = {  # colour of page.css: Gradio's theme variables that use it, in light and dark mode
    "paper": ("body_background_fill",),
    "card": (
        "background_fill_primary", "block_background_fill", "input_background_fill", "checkbox_background_color"
    ),
    "sunk": ("background_fill_secondary",),
    "line": ("border_color_primary", "block_border_color", "input_border_color"),
    "ink": ("body_text_color",),
    "soft": ("body_text_color_subdued",),
    "accent": ("link_text_color", "checkbox_background_color_selected"),
}
PRIVATE = {"api_visibility": "private", "show_progress": "hidden", "show_progress_on": []}
"""Options of the page's event listeners. They show no progress: otherwise Gradio sends the status of each message to
every output, copying all that the component holds. (It still does so for inputs.)"""


def theme_options() -> dict[str, Any]:
    """The arguments of `launch` for the theme."""
    return {
        "theme": _theme(),
        "css_paths": _styles(),
        "head": f"<script>{page_script()}</script>",
        "footer_links": ["api"],  # Gradio's settings would be a second place of that name
    }


def page_script() -> str:
    """What every page runs, before its components: shortcuts, theme, settings, links, the glossary."""
    return joined("page/page.js", {"GLOSSARY": glossary.terms(), "IN_DARK": IN_DARK})


def _styles() -> list[Path]:
    """page.css, then the styles of single parts, which depend on it."""
    base = ASSETS / "page.css"
    return [base, *sorted(set(ASSETS.glob("*.css")) - {base})]


def read(name: str) -> str:
    """The text of a file in assets."""
    return (ASSETS / name).read_text(encoding="utf-8")


def notice(name: str) -> gr.HTML:
    """A notice next to a control, which it opens. It scrolls into view: on a phone the pressed button is far away."""
    seen = """watch('value', () => {
        if (!props.value) return;
        if (element.closest('#drawer')) playground.showDrawer(true);
        playground.openPlace?.(element.querySelector('[data-about]')?.dataset.about || '');
        element.scrollIntoView({ block: 'nearest' });
    });"""
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
    return plain.set(color_accent="var(--pg-accent)", button_small_text_size="var(--type-note)", **colours)
