"""What a person asks of a lane, and what it takes to grant it.

A recipe names one decoder and whatever is added to it: slots it fills (drafter, verifier) and toggles (samplers, a
constraint, policies). `assemble` turns names into strategies and refuses, in one sentence, what cannot work together.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from playground.contract import STAGES, CachePolicy, Constraint, Decoder, Sampler, Strategy, discover, find, make
from playground.errors import Refusal
from playground.events import Part

MAIN_KINDS = ("decoder", "canvas_decoder", "preset")
WAYS = {
    "independent": "drawn independently",
    "without_replacement": "drawn without replacement",
    "deterministic": "not drawn at all",
}
SINGLE_KINDS = ("constraint", "cache_policy", "compute_policy")  # at most one of each in a lane


@dataclass
class LaneConfig:
    """One lane as it was asked for; plain data, so a page, a shell and a link can all hold it."""

    strategy: str = "greedy"
    knobs: dict[str, Any] = field(default_factory=dict)
    # [("top_p", {"p": 0.9}), ("prompt_lookup", {})]
    extras: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    # tokens the text begins with: how a fork takes another way from a shared past
    forced: list[int] = field(default_factory=list)
    seed: int | None = None  # of its own; None where it shares the run's, and with it the draws of the other lanes

    def running(self) -> list[str]:
        """Those of its strategies that run programs the model wrote; of a name there is none of the lane itself will
        say so.
        """
        known = discover()
        return [
            name
            for name in (self.strategy, *(name for name, _ in self.extras))
            if name in known and known[name].runs_programs
        ]


@dataclass
class Assembly:
    """The strategies of one lane, checked against each other."""

    decoder: Decoder
    samplers: list[Sampler] = field(default_factory=list)  # in the order they act
    constraint: Constraint | None = None
    cache_policy: CachePolicy | None = None
    compute_policy: Strategy | None = None

    def strategies(self) -> list[Strategy]:
        filled = [getattr(self.decoder, name) for name in self.decoder.slots()]
        single = [part for part in (self.constraint, self.cache_policy, self.compute_policy) if part]
        return [self.decoder, *filled, *self.samplers, *single]

    def needs(self) -> set[str]:
        return {need for part in self.strategies() for need in part.needs}

    def needing(self, need: str) -> str:
        """Name of the strategy that has a need."""
        return next(part.name for part in self.strategies() if need in part.needs)

    def streams(self) -> list[str]:
        """Streams that samplers read beside the target."""
        return list(dict.fromkeys(name for sampler in self.samplers for name in sampler.streams))

    def prompts(self) -> list[str]:
        """Streams of the target's model over another prompt, whoever reads them."""
        return list(dict.fromkeys([*self.streams(), *self.decoder.views]))

    def remembers(self) -> bool:
        return any(part.remembers for part in self.strategies())

    def guarantee(self) -> list[str]:
        """What the whole lane promises. Lossless means: same as plain decoding under the same toggles.

        It survives toggles that act row by row. One whose rows depend on the path sees another path where guesses are
        checked several at a time.
        """
        promises = list(self.decoder.guarantee)
        by_path = self.cache_policy and not self.cache_policy.row_wise
        if (
            by_path
            or "verifier" in self.decoder.slots().values()
            and not all(sampler.row_wise for sampler in self.samplers)
        ):
            promises = ["heuristic"]
        added = [part for part in (self.constraint, self.cache_policy) if part]
        return list(dict.fromkeys(promises + [g for part in added for g in part.guarantee]))

    def parts(self) -> list[Part]:
        return [Part(part.name, part.kind, part.values()) for part in self.strategies()]


def translating() -> list[str]:
    """Names of the strategies that can use a draft model whose tokens are not the target's."""
    return [name for name, cls in discover().items() if cls.translates]


def assemble(recipe: LaneConfig) -> Assembly:
    """The strategies a recipe names, with knobs set; raises Refusal for whatever cannot work."""
    main = find(recipe.strategy)
    if main.kind not in MAIN_KINDS:
        raise Refusal(
            f"{recipe.strategy} is a {main.kind.replace('_', ' ')}, not a way for text to grow: add it to a decoder, "
            f"for example greedy with {recipe.strategy}.",
            recipe.strategy,
        )
    extras = [(find(name), knobs) for name, knobs in recipe.extras]
    slots = {kind: name for name, kind in main.slots().items()}
    filling = _filling(recipe, [(cls, knobs) for cls, knobs in extras if cls.kind in slots], slots)
    decoder = make(recipe.strategy, **{**recipe.knobs, **filling})
    assembly = Assembly(decoder)
    added = [make(cls.name, **knobs) for cls, knobs in extras if cls.kind not in slots]
    _check_refused(decoder, added)
    for toggle in [*decoder.toggles(), *added]:
        _add(assembly, toggle)
    assembly.samplers.sort(key=lambda sampler: (STAGES.index(sampler.stage), sampler.rank))
    _check_exactness(assembly)
    if "constraint" in decoder.needs and not assembly.constraint:
        raise Refusal(f"{decoder.name} needs a constraint: add json_schema, regex, lark, gbnf or choice.", decoder.name)
    return assembly


def _filling(recipe: LaneConfig, extras: list, slots: dict[str, str]) -> dict[str, Any]:
    """What fills the slots, by field: a knob of that name, or a strategy that was added."""
    filling = {slot: recipe.knobs[slot] for slot in slots.values() if slot in recipe.knobs}
    for cls, knobs in extras:
        if slots[cls.kind] in filling:
            raise Refusal(f"{recipe.strategy} takes one {cls.kind}; {cls.name} is one too many.", cls.name)
        filling[slots[cls.kind]] = make(cls.name, **knobs)
    return filling


def _check_refused(decoder: Decoder, toggles: list[Strategy]) -> None:
    """What a decoder brings along itself it may refuse from others."""
    for toggle in toggles:
        drawing = "drawing" in decoder.refuses and getattr(toggle, "draws", False)
        if drawing or toggle.kind in decoder.refuses or toggle.name in decoder.refuses:
            raise Refusal(
                f"{decoder.name} does not work with a {toggle.kind.replace('_', ' ')} such as {toggle.name}: take {toggle.name} away.",
                toggle.name,
            )


def _add(assembly: Assembly, toggle: Strategy) -> None:
    decoder = assembly.decoder
    if toggle.kind == "cache_policy" and decoder.several and not toggle.row_wise:
        raise Refusal(
            f"{toggle.name} goes by the path of one text, and {decoder.name} grows several: take {toggle.name} away.",
            toggle.name,
        )
    if toggle.kind == "sampler":
        if any(sampler.name == toggle.name for sampler in assembly.samplers):
            raise Refusal(
                f"{toggle.name} is in this lane already, added or brought along by {decoder.name}: take one away.",
                toggle.name,
            )
        assembly.samplers.append(toggle)
    elif toggle.kind in SINGLE_KINDS:
        taken = getattr(assembly, toggle.kind)
        if taken:
            raise Refusal(
                f"A lane has one {toggle.kind.replace('_', ' ')}: choose {taken.name} or {toggle.name}.", toggle.name
            )
        setattr(assembly, toggle.kind, toggle)
    else:
        raise Refusal(
            f"{decoder.name} has no place for a {toggle.kind}: {toggle.name} goes with a decoder that has such a slot.",
            toggle.name,
        )


def _check_exactness(assembly: Assembly) -> None:
    """A verifier must be exact for the way its guesses are drawn and for the way the lane draws."""
    drafter, verifier = (getattr(assembly.decoder, name, None) for name in ("drafter", "verifier"))
    if verifier is None:
        return
    if drafter and drafter.drawn not in verifier.exact_for:
        exact = " or ".join(WAYS[way] for way in verifier.exact_for)
        raise Refusal(
            f"{verifier.name} is exact for guesses that are {exact}, and those of {drafter.name} are {WAYS[drafter.drawn]}: "
            "choose another verifier.",
            verifier.name,
        )
    if verifier.greedy_only and any(sampler.draws for sampler in assembly.samplers):
        raise Refusal(
            f"{verifier.name} is exact only where nothing is drawn by chance: take the samplers away, or choose rejection "
            "or sample_match.",
            verifier.name,
        )
