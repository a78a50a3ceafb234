"""A forward of one row of each text that is launched before the host knows its tokens."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.engine.graphs.graph_sizes import PLACES

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment
    from playground.engine.forward_input import ForwardInput
    from playground.engine.graphs.graph_memory import GraphBuffers


@dataclass
class Ahead:
    """A forward of one row of each text that was launched before the host knew its tokens."""

    memory: GraphBuffers
    rows: dict[int, tuple[int, int]]  # by place, the slot of the row and its position in the text
    awaited: set[int]  # places whose tokens are still to be drawn

    @classmethod
    def after(cls, memory: GraphBuffers, works: list[ForwardInput], segments: dict[int, Segment]) -> Ahead | None:
        """The forward after that of works, whose segments are given by place.

        None if it is unknown what some go on with, if they have several rows, or if the memory has no more slots.
        """
        if not all(work.expected for work in works):
            return None
        drawn = {place for place, work in zip(segments, works) if work.expected == "drawn"}
        rows = {place: (used_slots(segment), segment.positions[-1] + 1) for place, segment in segments.items()}
        alone = all(segment.rows == 1 and segment.masks.is_chain for segment in segments.values())
        fits = max(slot for slot, _ in rows.values()) + 1 < memory.slots
        return cls(memory, rows, drawn) if alone and fits else None

    def is_of(self, works: list[ForwardInput], segments: list[Segment], chosen: list[int]) -> bool:
        """Whether these works are in this forward, given the tokens that it took."""
        return len(works) == len(self.rows) and all(
            self._is_of(work, segment, chosen) for work, segment in zip(works, segments)
        )

    def _is_of(self, work: ForwardInput, segment: Segment, chosen: list[int]) -> bool:
        place = self.memory.place_of(segment.store)
        row = segment.store.slots_of(0).count + segment.first, segment.positions[0]
        return segment.rows == 1 and segment.masks.is_chain and work.given is None and self.rows.get(place) == row and (
            work.tokens == [chosen[place]]
        )


class ChosenTokens:
    """The next token of each place, on the device and, a little later, on the host."""

    def __init__(self, device: torch.device):
        pinned = device.type == "cuda"
        self._static = torch.zeros(PLACES[-1], dtype=torch.long, device=device)
        self._host = torch.zeros(PLACES[-1], dtype=torch.long, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None

    def on_device(self, places: int) -> Tensor:
        return self._static[:places]

    def take(self, logits: Tensor) -> None:
        """The most probable ones of logits [places, V]."""
        self._static[:len(logits)].copy_(logits.argmax(-1))

    def take_and_copy(self, logits: Tensor) -> None:
        self.take(logits)
        self.copy()

    def put(self, place: int, token: Tensor) -> None:
        """One that was drawn, [1]."""
        self._static[place:place + 1].copy_(token)

    def copy(self) -> None:
        """Begin to copy them to the host."""
        self._host.copy_(self._static, non_blocking=True)
        if self._copied:
            self._copied.record(torch.cuda.current_stream(self._static.device))

    def read(self) -> list[int]:
        """Waits until they are copied, which begins as soon as the logits are computed."""
        if self._copied and not self._copied.query():
            self._copied.synchronize()
        return self._host.tolist()


def used_slots(segment: Segment) -> int:
    """Slots of a segment's cache that are in use after its rows."""
    return segment.store.slots_of(0).count + segment.end
