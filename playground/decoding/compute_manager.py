"""Applies a lane's compute policy to the target's forwards, and shows what ran for each committed token."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from playground.contract import ComputePolicy
from playground.engine.layer_choices import ComputePass
from playground.errors import Refusal
from playground.events import Event, Figure

if TYPE_CHECKING:
    from torch import Tensor

    from playground.decoding.requests import Feed
    from playground.decoding.sequence import Sequence
    from playground.engine.model import Model

SHOWN = 32  # newest tokens in the picture of what ran
LAYERS_PER_TOKEN = 4  # of the picture; one of a deep model is drawn every few tokens, since it has many numbers


class ComputedRow(NamedTuple):
    """One row of a forward: the tokens it follows within the scratch, itself included, and what ran for it."""

    path: list[int]
    compute: ComputePass
    row: int

    @property
    def shares(self) -> list[float]:
        """Share of each layer's weights that ran."""
        return [layer[self.row] for layer in self.compute.ran]


class ComputeManager:
    """Connects one compute policy to the target of one lane. Raises Refusal if the target always runs whole layers."""

    def __init__(self, policy: ComputePolicy, model: Model, prompt: int, weights: Mapping[str, Tensor]):
        if model.parts is None:
            raise Refusal(
                f"{policy.title} decides inside of layers what runs, which works for llama, mistral, qwen2 and qwen3 "
                f"models that are not quantised: choose another model than {model.name}, or remove {policy.title}.",
                policy.name,
            )
        self.policy, self.prompt, self._reported = policy, prompt, 0
        self._rows: dict[int, list[ComputedRow]] = defaultdict(list)  # by true position
        self._scratch: list[int] = []  # tokens of the scratch nodes
        self._columns: list[tuple[str, list[float]]] = []  # of the picture: token and shares by layer
        policy.begin(model.parts, weights)

    def new_pass(self) -> ComputePass:
        """For the plan of one forward."""
        return ComputePass(lambda positions: self.policy.choices(positions, self.prompt))

    def observe(self, feed: Feed) -> None:
        """Note what ran for the rows of a forward, before any of them is committed."""
        store, compute, tokens = feed.work.store, feed.plan.compute, feed.work.tokens
        if compute is None:
            raise RuntimeError("the forward had no plan of the compute policy: give it `new_pass`")
        first = len(store.parents) - len(tokens)
        self._scratch[first:] = tokens
        for row, node in enumerate(range(first, first + len(tokens))):
            position = store.length + store.depths[node]
            if position >= self.prompt:
                path = [self._scratch[each] for each in store.path(node)]
                self._rows[position].append(ComputedRow(path, compute, row))
            elif position == self.prompt - 1:
                self._rows[position] = [ComputedRow([], compute, row)]

    def report(self, sequence: Sequence, piece: Callable[[int], str]) -> Iterator[Event]:
        """What ran for the rows that the tokens committed since the last call were chosen from."""
        tokens, before = sequence.tokens, min(self._reported, sequence.generated)
        for number in range(before, sequence.generated):
            if found := self._row_before(tokens, self.prompt + number):
                self._columns = [*self._columns, (piece(tokens[self.prompt + number]), found.shares)][-SHOWN:]
                yield _share_figure(found, number)
                yield from self.policy.explain(found.compute.choices, found.row, number)
        if self._columns and self._is_due(before, sequence):
            yield self._picture()
        self._reported = sequence.generated
        for position in [each for each in self._rows if each < len(tokens) - 1]:
            del self._rows[position]

    def stops(self, tokens: list[int]) -> bool:
        """Whether the policy ends the text after these tokens, prompt included, which the target has just read."""
        found = self._row_before(tokens, len(tokens))
        return found is not None and self.policy.stops(found.compute.choices, found.row)

    def _is_due(self, before: int, sequence: Sequence) -> bool:
        """Whether to draw the picture after tokens were committed: at the end, and every few tokens before."""
        every = max(1, len(self._columns[0][1]) // LAYERS_PER_TOKEN)
        return sequence.generated > before and (bool(sequence.reason) or before // every < sequence.generated // every)

    def _row_before(self, tokens: list[int], position: int) -> ComputedRow | None:
        """The newest row that a committed token was chosen from; None for one that needed no forward of layers."""
        before, rows = tokens[:position], self._rows.get(position - 1, ())
        matching = [row for row in rows if row.compute.ran and before[len(before) - len(row.path):] == row.path]
        return matching[-1] if matching else None

    def _picture(self) -> Figure:
        pieces, columns = zip(*self._columns)
        values = [[round(share, 3) for share in layer] for layer in zip(*columns)]
        labels = [f"layer {layer}" for layer in range(len(values))]
        return Figure(
            "matrix",
            "share of each layer that ran for the newest tokens",
            {"rows": labels, "columns": list(pieces), "values": values},
        )


def _share_figure(computed: ComputedRow, generated: int) -> Figure:
    share = sum(computed.shares) / len(computed.shares)
    return Figure(
        "scalar",
        "share of the layers' weights that ran",
        {"x": generated, "series": {"share": round(share, 4)}, "lines": {"all layers": 1.0}},
    )
