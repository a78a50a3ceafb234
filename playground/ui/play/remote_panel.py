"""The settings of the remote lane: a server with the OpenAI completions interface, its model and its key.

They are not among the settings of a run: a link, the browser's storage or a trace must never name a server or hold a
key, or a link could send prompts and key to its author.
"""
from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import gradio as gr

from playground.errors import Refusal
from playground.remote.remote_server import KEY, RemoteServer
from playground.ui.components.theme import PRIVATE, notice

HELP = f"vLLM, SGLang, llama.cpp, `transformers serve`. Without a key, {KEY} of the environment is used."


class RemotePanel:
    """A closed section of the drawer; its controls are not rendered unless `visible`."""

    def __init__(self, visible: bool):
        with gr.Accordion("Remote lane", open=False, visible=visible, elem_classes="remote", elem_id="remote"):
            with gr.Row(equal_height=False):
                self.address = gr.Textbox(label="Server", placeholder="http://127.0.0.1:8000", info=HELP,
                                          elem_id="remote-address", scale=3)
                self.model = gr.Textbox(label="Model on the server", elem_id="remote-model", scale=2)
                self.key = gr.Textbox(label="Key", type="password", elem_id="remote-key", scale=1)
            self.connect = gr.Button("Use this server", size="sm", elem_id="remote-connect", scale=0)
            self.notice = notice("remote-notice")

    def bind(self, connect: Callable[..., dict[Any, Any]], visit: gr.State) -> None:
        """`connect` gets the visit and the three fields."""
        outputs = [visit, self.key, self.notice]
        self.connect.click(connect, [visit, self.address, self.model, self.key], outputs, **PRIVATE)

    def connected(self, server: RemoteServer | None) -> dict[Any, Any]:
        """The key is cleared: the server's side of the page has it now."""
        text = f"The next run has a lane of {server.model} on {server.place}." if server else "No remote lane."
        return {self.key: "", self.notice: escape(text)}

    def refused(self, refusal: Refusal) -> dict[Any, Any]:
        return {self.notice: escape(str(refusal))}
