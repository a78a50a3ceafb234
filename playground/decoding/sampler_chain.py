"""The chain that turns the logits of a sequence into scores: mixing, token mask, processors, samplers."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from playground.contract.token_tree import TokenTree
from playground.engine.sampling import REMOVED

if TYPE_CHECKING:
    from playground.contract import Constraint, EarlyExit, Sampler
    from playground.contract.interfaces import SequenceInterface
    from playground.decoding.checked_text import CheckedText
    from playground.grammar.matcher import Matcher

Coin = Callable[[float, str, Sequence[int], int], bool]  # coin(probability, purpose, history, lineage)
HIDDEN_STATES = "hidden"  # key of the lm_head's input among the tensors that samplers mix


class Stage(NamedTuple):
    """Scores [n, V] after one stage and the sampler that computed them; None for the raw logits and the mask."""

    name: str
    scores: Tensor
    sampler: Sampler | None = None


class StageInput(Protocol):
    """The part of `decoding.rows.Rows` that the chain reads."""

    stream: str
    raw: Tensor  # logits [n, V]
    others: dict[str | EarlyExit, Tensor]  # logits of the other streams samplers read, [n, V]
    masks: Tensor | None  # bool [n, V]


@dataclass
class Chain:
    """The mask and samplers of one sequence."""

    samplers: list[Sampler] = field(default_factory=list)
    matcher: Matcher | CheckedText | None = None
    end_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None  # the constraint behind the matcher, which may narrow its masks
    masking: bool = True  # False if the decoder enforces the constraint itself
    forcing: bool = True  # False if tokens without an alternative, the end token included, need a forward
    computes_masks: bool = True  # False if the decoder checks single tokens
    coin: Coin | None = None  # random numbers for samplers that need some

    def __post_init__(self) -> None:
        self.draws = any(sampler.draws for sampler in self.samplers)  # whether tokens are sampled; argmax otherwise
        self.reads_text = self.matcher is not None or any(sampler.reads_text for sampler in self.samplers)
        self.consulting = [sampler for sampler in self.samplers if sampler.consults]

    def follow(self, text: SequenceInterface) -> None:
        """Bind the samplers' own chance to the sequence that the chain belongs to."""
        if self.coin:
            for sampler in self.samplers:
                sampler.chance = flipping(self.coin, sampler.name, text)

    def fork(self) -> Chain:
        """A copy for another sequence, with its own matcher and sampler state."""
        return replace(self, samplers=deepcopy(self.samplers), matcher=self.matcher.fork() if self.matcher else None)

    def stages(self, rows: StageInput, histories: Sequence[list[int]]) -> list[Stage]:
        """Scores after each stage, the raw logits first. `histories` are the tokens before each row."""
        stages = [Stage("raw", rows.raw)]
        for sampler in self._mixing() if rows.others and rows.stream == "target" else ():
            stages.append(Stage(sampler.name, sampler.mix({**rows.others, rows.stream: stages[-1].scores}), sampler))
        if rows.masks is not None and self.masking:
            stages.append(Stage("mask", stages[-1].scores.masked_fill(~rows.masks, REMOVED)))
        for sampler in self.samplers:
            if sampler.stage != "mix":
                stages.append(Stage(sampler.name, sampler.apply(stages[-1].scores, histories), sampler))
        return stages

    def _mixing(self) -> list[Sampler]:
        return [sampler for sampler in self.samplers if sampler.stage == "mix"]


def flipping(coin: Coin, name: str, text: SequenceInterface) -> Callable[[float, Sequence[int], str], bool]:
    """The `chance` of a sampler: a plain function, so that copying the sampler does not copy the lane."""
    return lambda probability, history, purpose: coin(probability, f"{name}/{purpose}", history, text.lineage)


class Histories(Sequence[list[int]]):
    """The tokens before each row, built when a sampler reads them."""

    def __init__(self, committed: list[int], tree: TokenTree, nodes: Sequence[int]):
        self.committed, self.tree, self.nodes = committed, tree, nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, row: int) -> list[int]:  # type: ignore[override]  # no slices: samplers read row by row
        return self.committed + self.tree.prefix(self.nodes[row])
