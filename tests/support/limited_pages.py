"""A public page and requests to it."""
from __future__ import annotations

import gc
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import saved

from playground.request_limits import PUBLIC, Rules
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.pages import build
from playground.ui.server.serving import launch_options, protect
from playground.ui.server.site import Site
from support.launched import launched

ROOT = Path(__file__).parents[2]
STRANGERS = Rules.for_visitors()
MODELS: dict[str, str] = {}  # folders of the public page's models


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Host and port of a public page over small random models."""
    gc.freeze()  # scanning the objects of thousands of tests takes seconds, and Gradio gives a page three to answer
    pair = saved.save_models(tmp_path_factory.mktemp("models"))
    MODELS.update(target=pair.target, draft=pair.draft)
    site = Site(ModelRequest(pair.target, pair.draft), STRANGERS)
    demo = build(site)
    with launched(demo, max_file_size=PUBLIC.upload_bytes, **launch_options(site, demo, "127.0.0.1")) as address:
        protect(demo, site)
        yield urlsplit(address).netloc
