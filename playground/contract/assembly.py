"""The strategies of one lane, and what they need and guarantee together."""
from __future__ import annotations

from dataclasses import dataclass, field

from playground.contract import (
    CachePolicy,
    ComputePolicy,
    Constraint,
    Decoder,
    Overlay,
    Sampler,
    Strategy,
    Verifier,
)
from playground.events import Part


@dataclass
class Assembly:
    """The strategies of one lane, checked for compatibility."""

    decoder: Decoder
    samplers: list[Sampler] = field(default_factory=list)  # in the order they are applied
    constraint: Constraint | None = None
    cache_policy: CachePolicy | None = None
    compute_policy: ComputePolicy | None = None
    overlays: list[Overlay] = field(default_factory=list)  # they read the text once it is complete
    attends: bool = True  # whether the target's attention is the playground's own, as far as that is known

    def strategies(self) -> list[Strategy]:
        filled = [getattr(self.decoder, name) for name in self.decoder.slots()]
        single = [part for part in (self.constraint, self.cache_policy, self.compute_policy) if part]
        return [self.decoder, *filled, *self.samplers, *single, *self.overlays]

    def needs(self) -> set[str]:
        return {need for part in self.strategies() for need in part.needs}

    def needing(self, need: str) -> str:
        """Name of the first strategy with this need."""
        return next(part.name for part in self.strategies() if need in part.needs)

    def streams(self) -> list[str]:
        """Streams that samplers read in addition to the target."""
        return list(dict.fromkeys(name for sampler in self.samplers for name in sampler.streams))

    def prompts(self) -> list[str]:
        """Streams of the target's model over other prompts, read by samplers or by the decoder."""
        return list(dict.fromkeys([*self.streams(), *self.decoder.views]))

    def remembers(self) -> bool:
        return any(part.remembers for part in self.strategies())

    def guarantee(self) -> list[str]:
        """The guarantees of the whole lane. Lossless means: same as plain decoding under the same toggles.

        Row-wise toggles preserve it, and cache policies, which act on the prompt alone or between the rows of a
        forward. Any other toggle that depends on the path sees another one if several draft tokens are verified at
        once.
        """
        guarantees = [each for each in self.decoder.guarantee if each not in self._lost()] or ["heuristic"]
        policies = [policy for policy in (self.cache_policy, self.compute_policy) if policy]
        if (
            self.compute_policy and not self.compute_policy.row_wise
            or self._acts_late()
            or self.verifies and not all(sampler.row_wise for sampler in self.samplers)
        ):
            guarantees = ["heuristic"]
        added = [part for part in (self.constraint, *policies) if part]
        return list(dict.fromkeys(guarantees + [g for part in added for g in part.guarantee]))

    @property
    def verifies(self) -> bool:
        """Whether several draft tokens are read in one forward and verified."""
        return "verifier" in self.decoder.slots().values()

    @property
    def takes_turns(self) -> bool:
        """Whether the cache policy acts between the rows of one forward, as it would if each were read alone.

        It needs the attention of whole layers, which a compute policy may leave out, and the target's attention.
        """
        policy = self.cache_policy
        if policy is None or policy.row_wise or policy.prompt_only:
            return False
        return self.attends and not self.compute_policy

    def _acts_late(self) -> bool:
        """Whether the cache policy depends on the path and does not act between the rows of one forward."""
        policy = self.cache_policy
        return policy is not None and not (policy.row_wise or policy.prompt_only or self.takes_turns)

    def remarks(self) -> list[str]:
        """What is to know about the combination before the run."""
        policy, other = self.cache_policy, self.compute_policy
        if not (self.verifies and policy and self._acts_late()):
            return []
        beside = f"Beside {other.title}" if other else "On a model whose attention runs inside the transformers library"
        return [
            f"{beside}, {policy.title} acts once tokens are committed, so the draft tokens "
            "of one forward see the cache as it was before the first of them: the text may differ from that without "
            "drafts."
        ]

    def _lost(self) -> set[str]:
        """The guarantees of the decoder that a verifier which may accept other tokens does not give."""
        verifier = getattr(self.decoder, "verifier", None)
        if not isinstance(verifier, Verifier) or verifier.greedy_only:
            return set()
        return {"greedy_identical", "distribution_identical"} - set(verifier.guarantee)

    def claims(self) -> list[str]:
        """The guarantees that say something about this lane's text, for its badges.

        The same text as greedy decoding where nothing is drawn, the same distribution as sampling where tokens are
        drawn. Neither if samplers change plain decoding itself, since there is no reference to compare with.
        """
        draws = any(sampler.draws for sampler in self.samplers)
        changed = self.samplers and self.decoder.family() == "sampling"
        untrue = {"greedy_identical"} if draws else {"distribution_identical"}
        untrue |= {"greedy_identical", "distribution_identical"} if changed else set()
        return [guarantee for guarantee in self.guarantee() if guarantee not in untrue]

    def title(self) -> str:
        """What the lane is known for: the decoder, or the part in its slot `known_by` where that is not the default."""
        slot = self.decoder.known_by
        if not slot or getattr(self.decoder, slot).name == type(self.decoder).__dataclass_fields__[slot].default:
            return self.decoder.title
        return getattr(self.decoder, slot).title

    def parts(self) -> list[Part]:
        return [Part(part.name, part.kind, part.values(), part.title) for part in self.strategies()]
