"""All pages of the site: the playground at the root and the other pages, with a common header that links them."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import gradio as gr

from playground.ui.benchmark import benchmark_page as benchmark
from playground.ui.components.theme import read
from playground.ui.game import game_page as game
from playground.ui.guard.event_inputs import guard_inputs
from playground.ui.guard.sessions import Events, charge_events, guard_queue
from playground.ui.library import library_page as library
from playground.ui.play import page_events as page
from playground.ui.server.api import publish
from playground.ui.server.site import Site
from playground.ui.studies import studies_page as studies


@dataclass(frozen=True)
class PageRoute:
    """A page: its path, its name, and the function that lays it out in its Blocks, given the header row."""

    path: str
    name: str
    fill: Callable[[Site, gr.Blocks, gr.Row], None]


MOST_EVENTS = 200  # waiting for a thread of the server; runs wait in the admission queue, which has shares
QUEUE_REST = 0.005  # seconds between two looks at an empty queue; at Gradio's 0.001 an idle page takes 5 % of a core
PLAY = PageRoute("", "Play", page.fill)
PLACES = (
    PLAY,
    PageRoute("library", "Library", library.fill),
    PageRoute("game", "Game", game.fill),
    PageRoute("benchmark", "Benchmark", benchmark.fill),
)
"""The pages that the header links."""
STUDIES = PageRoute("studies", "Studies", studies.fill)  # a run links it
ROUTES = (*PLACES, STUDIES)


def build(site: Site) -> gr.Blocks:
    """Build all pages of a site."""
    with gr.Blocks(title="Decoding playground", analytics_enabled=False, fill_width=True) as blocks:
        publish(site)  # first, so that no private listener takes the name of an endpoint
        _lay_out(PLAY, site, blocks)
    for place in ROUTES[1:]:
        with blocks.route(place.name, f"/{place.path}") as beside:
            _lay_out(place, site, beside)
    blocks.queue(max_size=MOST_EVENTS)
    blocks._queue.sleep_when_free = QUEUE_REST
    guard_inputs(blocks)
    guard_queue(blocks._queue, Events.for_visitors() if site.rules.public else Events(), site.proxies)
    charge_events(blocks._queue, site.loop_time, site.proxies)
    return blocks


def _lay_out(place: PageRoute, site: Site, blocks: gr.Blocks) -> None:
    with gr.Row(elem_classes="top") as head:
        gr.HTML(html_template=_masthead(place), elem_classes="head", apply_default_css=False)
    kept = "() => { playground.keepTheme(); playground.keepProjector(); }"
    blocks.load(None, None, None, js=kept, api_visibility="private")
    place.fill(site, blocks, head)


def _masthead(here: PageRoute) -> str:
    """The header."""
    return read("masthead.html").replace("{mark}", read("mark.svg")).replace("{links}", _links(here))


def _links(here: PageRoute) -> str:
    """Links to all pages; relative, so that they work wherever the site is mounted."""
    def mark(place: PageRoute) -> str:
        return "aria-current='page'" if place is here else f"href='./{place.path}'"  # no link to the page one is on

    return "".join(f"<a {mark(place)}>{escape(place.name)}</a>" for place in PLACES)
