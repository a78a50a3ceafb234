"""The base class of cache policies: which KV slots stay?"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from playground.contract.base import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.cache_policy.held import Full, Held
    from playground.events import Event

HOOKS: dict[str, type[CachePolicy]] = {}  # by method, the capability it belongs to; read-only once they are imported


class CachePolicy(Strategy):
    """Decides which KV slots stay, after the prefill and after every commit, of committed tokens only.

    A policy implements one of two methods: `visible`, a mask that depends on positions alone, where slots that no later
    row can see are freed, or `retain`, which selects the slots of one layer. Eviction is irreversible. Tokens that may
    still be rejected are read by copies of the policy, which share its tensors: it replaces them, and changes none in
    place.

    Whatever else a policy needs or does is a capability, a small class from which it derives instead, such as
    `ReadsAttention`. A policy is asked only about the capabilities it has.
    """

    kind = "cache_policy"
    row_wise: ClassVar[bool] = True  # what a row sees depends on its position alone: the policy implements `visible`
    # acts on the prompt alone: what is generated after it stays as it is, and no copy of the policy is needed
    prompt_only: ClassVar[bool] = False
    text_length = 0  # tokens of the text, set before the policy acts or receives attention

    def __init_subclass__(cls, capability: bool = False, **kwargs: Any) -> None:
        if capability:
            HOOKS.update(dict.fromkeys(_public(cls) - _public(CachePolicy), cls))
        for name in sorted(_public(cls) & HOOKS.keys()):
            if not issubclass(cls, HOOKS[name]):
                raise TypeError(f"{cls.__name__}.{name} would never be called: derive it from {HOOKS[name].__name__}")
        cls.row_wise = cls.retain is CachePolicy.retain and cls.retain_all is CachePolicy.retain_all
        super().__init_subclass__(**kwargs)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Which key positions [m] each query position [n, 1] may attend to, bool [n, m]. Depends on positions alone."""
        raise NotImplementedError

    def retain(self, held: Held) -> Tensor:
        """Which slots of one layer stay, bool [1 or kv_heads, slots]."""
        raise NotImplementedError

    def retain_all(self, held: Sequence[Held]) -> list[Tensor]:
        """`retain` for each layer; override it if processing all layers at once is cheaper."""
        return [self.retain(layer) for layer in held]

    def rests(self, slots: int, length: int, prompt: int) -> bool:
        """Whether it changes nothing once the text has `length` tokens and the fullest head holds `slots` slots.

        Tokens of one forward that it would not act between are read together, without copies of the cache. False if it
        cannot tell beforehand.
        """
        return False

    def budget(self, generated: int) -> int:
        """Most slots a layer and KV head may hold after a commit, with `generated` tokens after the prompt."""
        raise NotImplementedError

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, Any] | None:
        """Knobs with which a layer and KV head keeps `tokens` tokens of a prompt, on average and as nearly as possible.

        None if the policy is not parametrised by a number of tokens. Comparisons at equal budget use them.
        """
        return None

    def expected_share(self, full: Full) -> float:
        """Share of a full cache's bytes it intends to hold, by default from its budget."""
        return min(1.0, self.budget(full.generated) / full.length) if "budget_respected" in self.guarantee else 1.0

    def explain(self, prompt: int, layers: int) -> Iterator[Event]:
        """Yield what to show, besides the cache's contents, about tokens committed since the last call.

        `prompt` is the prompt length in tokens, `layers` the model's depth.
        """
        yield from ()


def _public(cls: type) -> set[str]:
    """Names that a class itself defines for others."""
    return {name for name in vars(cls) if not name.startswith("_")}
