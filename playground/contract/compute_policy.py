"""Compute policies: which layers, neurons or experts run?"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from playground.contract.base import Strategy
from playground.engine.layer_choices import LayerChoices

if TYPE_CHECKING:
    from torch import Tensor

    from playground.engine.layer_choices import NetworkParts
    from playground.events import Event


class ComputePolicy(Strategy):
    """Decides which attention blocks and feed-forward networks of the target run, for each row of each forward.

    What does not run is not computed. `begin` is called once per lane, `choices` once per forward; the network then
    asks the `LayerChoices` layer by layer, which may depend on the hidden states so far. A policy acts on the target
    alone, not on a draft model or on the target over another prompt.
    """

    kind = "compute_policy"
    row_wise: ClassVar[bool] = True  # False if what runs for a row depends on other rows of its forward
    # some layers get no keys and values; cache policies, which expect those of every layer, are then refused
    skips_attention: ClassVar[bool] = False

    @property
    def may_stop(self) -> bool:
        """Whether `stops` may end a text; refused for decoders that grow several, which rank them by their ends."""
        return False

    def begin(self, parts: NetworkParts, weights: Mapping[str, Tensor]) -> None:
        """Before the run: the target's parts, and the weights that `fit` stored for this strategy, if any.

        Raises Refusal if the knobs do not fit the target.
        """

    def choices(self, positions: list[int], prompt: int) -> LayerChoices:
        """The choices for one forward, with rows at these true positions; `prompt` is the prompt length in tokens."""
        raise NotImplementedError

    def stops(self, choices: LayerChoices, row: int) -> bool:
        """Whether the text ends here instead of going on with a token chosen from a row. Asked after the forward."""
        return False

    def explain(self, choices: LayerChoices, row: int, generated: int) -> Iterator[Event]:
        """Yield what to show about one row of a forward besides what ran, once its token is committed.

        `generated` is the number of tokens after the prompt.
        """
        yield from ()
