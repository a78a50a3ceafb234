"""A session costs a page no new description of its components, whoever begins how many."""
from __future__ import annotations

import asyncio
import json
import secrets

import gradio as gr
from gradio.state_holder import SessionState
from visitor import Visitor

from playground.ui.guard.block_configs import BlockConfigs
from support.limited_pages import public  # noqa: F401


def small_page() -> gr.Blocks:
    with gr.Blocks() as page:
        gr.Textbox("first", label="a")
        gr.Number(3)
        gr.State([])
    page.default_config = BlockConfigs.of_page(page)
    return page


def test_sessions_describe_components_as_gradio_does_and_share_no_values():
    page = small_page()
    describe = gr.blocks.BlocksConfig.config_for_block
    by_gradio = {number: describe(number, [], component) for number, component in page.blocks.items()}
    mine, other = SessionState(page), SessionState(page)
    assert mine.config_values == other.config_values == by_gradio
    text = next(number for number, one in page.blocks.items() if isinstance(one, gr.Textbox))
    mine._update_value_in_config(text, "mine")
    assert other.config_values[text]["props"]["value"] == "first" != mine.config_values[text]["props"]["value"]


def test_a_component_that_a_session_has_changed_is_described_anew():
    page = small_page()
    session = SessionState(page)
    text = next(number for number, one in page.blocks.items() if isinstance(one, gr.Textbox))
    session[text] = gr.Textbox(label="b", render=False)
    session._update_config(text)  # as Gradio does after an update
    assert session.config_values[text]["props"]["label"] == "b"
    assert SessionState(page).config_values[text]["props"]["label"] == "a"


def test_a_new_session_in_every_request_makes_no_descriptions_and_no_statistics(public, monkeypatch):
    """Described for each session, the components of this page took the event loop 20 ms; the statistics use pandas."""
    counted = {"descriptions": 0, "tables": 0}

    def counting(name: str, function):
        def counts(*given, **named):
            counted[name] += 1
            return function(*given, **named)
        return counts

    async def attack() -> None:
        async with Visitor(f"http://{public}") as visitor:
            await visitor.configure()
            for _ in range(15):
                body = {"fn_index": visitor.functions["run"], "data": [], "session_hash": secrets.token_hex(5)}
                await visitor.join_raw(json.dumps(body).encode())

    asyncio.run(attack())  # what is made once is made
    monkeypatch.setattr(gr.blocks.Block, "get_config", counting("descriptions", gr.blocks.Block.get_config))
    monkeypatch.setattr("gradio.queueing.Queue._get_df", staticmethod(counting("tables", gr.queueing.Queue._get_df)))
    asyncio.run(attack())
    assert counted == {"descriptions": 0, "tables": 0}
