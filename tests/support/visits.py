"""Visits of the page without a browser: a request from an address, and a run's stream."""
from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

from playground.ui.components.settings import Settings
from playground.ui.play.run_handlers import RunHandlers


def stream(site, prompt: str = "one"):
    methods = ("idle", "show_memory", "busy", "stoppable")
    page = MagicMock(**{f"{name}.return_value": {} for name in methods})
    settings = Settings(prompt=prompt)
    return page, RunHandlers(site, page).run(None, *(getattr(settings, name) for name in Settings.names()))


def request(forwarded: str, peer: str = "10.1.1.1"):
    return SimpleNamespace(headers={"x-forwarded-for": forwarded}, client=SimpleNamespace(host=peer))
