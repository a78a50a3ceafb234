"""Descriptions of a page's components that are made once, for Gradio 6.31, which makes them for every new session.

Gradio inspects the signatures and schemas of all components for each session that is begun, in the event loop: for this
page 20 ms of a core, so that a client with a new name of a session in every request held up everybody.
"""
from __future__ import annotations

from copy import copy
from typing import Any

from gradio.blocks import Blocks, BlocksConfig


class BlockConfigs(BlocksConfig):
    """Gradio's components and functions of a page, or of a session, with the descriptions of the page's components."""

    def __init__(self, page: Blocks, described: dict[int, dict[str, Any]]):
        super().__init__(page)
        self._described = described

    @classmethod
    def of_page(cls, page: Blocks) -> BlockConfigs:
        """Those of a page that is complete: it gets no further components."""
        return cls(page, {})._with(page.default_config)

    def __copy__(self) -> BlockConfigs:
        return type(self)(self.root_block, self._described)._with(self)

    def _with(self, other: BlocksConfig) -> BlockConfigs:
        self.blocks, self.fns, self.fn_id = copy(other.blocks), copy(other.fns), other.fn_id
        self.renderables = copy(other.renderables)
        return self

    def config_for_block(self, _id: int, rendered_ids: list[int], block: Any, renderable: Any = None) -> dict[str, Any]:
        """The description of a component. A session writes the component's value into it, so each has a copy."""
        if renderable or block is not self.root_block.blocks.get(_id):
            return super().config_for_block(_id, rendered_ids, block, renderable)
        if _id not in self._described:
            self._described[_id] = super().config_for_block(_id, rendered_ids, block)
        known = self._described[_id]
        return {**known, "props": dict(known["props"])}
