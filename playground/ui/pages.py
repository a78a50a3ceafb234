"""The whole site: the playground at its root and the pages beside it, all under one head that leads from each to the
others.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import gradio as gr

from playground.ui import benchmark_page as benchmark
from playground.ui import game_page as game
from playground.ui import library_page as library
from playground.ui import playground_page as page
from playground.ui.api import publish
from playground.ui.sessions import Events, guard_queue
from playground.ui.site import Site
from playground.ui.theme import read


@dataclass(frozen=True)
class PageRoute:
    """A page: its address after the root, its name, and what lays it out, given the site, its Blocks and the row at its
    head.
    """

    path: str
    name: str
    fill: Callable[[Site, gr.Blocks, gr.Row], None]


UPLOADS = 60, 600  # seconds between two looks for old files of visitors, and the age at which they go
MOST_EVENTS = 200  # that wait for a thread of the server; runs wait in the admission queue, which has shares
PLAY = PageRoute("", "Play", page.fill)
PLACES = (
    PLAY,
    PageRoute("library", "Library", library.fill),
    PageRoute("game", "Game", game.fill),
    PageRoute("benchmark", "Benchmark", benchmark.fill),
)


def build(site: Site) -> gr.Blocks:
    """Every page over one site."""
    with gr.Blocks(
        title="Decoding playground", analytics_enabled=False, fill_width=True, delete_cache=UPLOADS
    ) as blocks:
        publish(site)  # first, or a private listener takes a name
        _lay_out(PLAY, site, blocks)
    for place in PLACES[1:]:
        with blocks.route(place.name, f"/{place.path}") as beside:
            _lay_out(place, site, beside)
    blocks.queue(max_size=MOST_EVENTS)
    guard_queue(blocks._queue, Events.for_visitors() if site.rules.public else Events(), site.proxies)
    return blocks


def _lay_out(place: PageRoute, site: Site, blocks: gr.Blocks) -> None:
    with gr.Row(elem_classes="top") as head:
        gr.HTML(html_template=_masthead(place), elem_classes="head", apply_default_css=False)
    blocks.load(None, None, None, js="() => { window.keepTheme(); window.keepProjector(); }", api_visibility="private")
    place.fill(site, blocks, head)


def _masthead(here: PageRoute) -> str:
    """Large type is for lanes, and these are on one page."""
    projector = read("projector.html") if here is PLAY else ""
    return read("masthead.html").replace("{links}", _links(here)).replace("{projector}", projector)


def _links(here: PageRoute) -> str:
    """Relative, so that they hold wherever the site is mounted."""
    marks = {here: " aria-current='page'"}
    return "".join(f"<a href='./{place.path}'{marks.get(place, '')}>{escape(place.name)}</a>" for place in PLACES)
