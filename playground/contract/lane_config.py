"""The configuration of a lane, and the strategies assembled from it.

A LaneConfig names one decoder and what is added to it: strategies for its slots (drafter, verifier) and toggles
(samplers, a constraint, policies). `assemble` instantiates them and raises Refusal for a combination that cannot work.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from playground.contract import (
    STAGES,
    CanvasDecoder,
    CutsPrompt,
    Decoder,
    Overlay,
    Sampler,
    Strategy,
    WatchesBeams,
    discover,
    find,
    lookup,
    make,
)
from playground.contract.assembly import Assembly
from playground.errors import Refusal
from playground.lane_fields import LaneConfig, check_some_lane
from playground.request_limits import quoted

MAIN_KINDS = ("decoder", "canvas_decoder", "preset")
DRAWN = {
    "independent": "drawn independently",
    "without_replacement": "drawn without replacement",
    "deterministic": "not drawn at all",
}
SINGLE_KINDS = ("constraint", "cache_policy", "compute_policy")  # at most one of each in a lane


def program_runners(lane: LaneConfig) -> list[str]:
    """Titles of a lane's strategies that execute programs the model wrote. Unknown ones are skipped; `assemble` rejects
    them.
    """
    found = map(lookup, (lane.strategy, *(name for name, _ in lane.extras)))
    return [cls.title for cls in found if cls and cls.runs_programs]


def title_of(strategy: str) -> str:
    """The title of a strategy, which names a lane that cannot be assembled; its name if it is unknown."""
    cls = lookup(strategy)
    return cls.title if cls else strategy


def share(
    lanes: list[LaneConfig], knobs: Mapping[str, Any], extras: Iterable[tuple[str, dict[str, Any]]]
) -> list[LaneConfig]:
    """The lanes with the settings that are given for all of them.

    Knobs apply to the lanes that have them and do not set them, drafters and verifiers to those with a slot, toggles to
    all. Raises Refusal for a knob that no lane has; a lane reports what else it cannot take itself.
    """
    for name in knobs:
        if not any(name in _knobs_of(lane) for lane in lanes):
            strategies = ", ".join(lane.strategy for lane in lanes)
            raise Refusal(f"None of {strategies} has a knob {quoted(name)}: remove it, or add one that has.", name)
    kinds = [(extra, find(extra[0]).kind) for extra in extras]
    slots = set().union(*map(_slots_of, lanes))
    return [
        replace(
            lane,
            knobs={name: value for name, value in knobs.items() if name in _knobs_of(lane)} | lane.knobs,
            extras=[*lane.extras, *(extra for extra, kind in kinds if kind not in slots - _slots_of(lane))],
        )
        for lane in lanes
    ]


def _knobs_of(lane: LaneConfig) -> set[str]:
    """Names of the knobs of a lane's decoder; none for an unknown one, which `assemble` rejects."""
    cls = lookup(lane.strategy)
    return {knob.name for knob in cls.knobs()} if cls else set()


def _slots_of(lane: LaneConfig) -> set[str]:
    """Kinds of strategies that a lane's decoder has slots for."""
    cls = lookup(lane.strategy)
    return set(cls.slots().values()) if cls else set()


def check_startable(lanes: list[LaneConfig], context: str = "") -> set[str]:
    """What the lanes need besides the target. Raises Refusal if there are none, or if not one of them can be assembled
    and has the context it needs.
    """
    check_some_lane(lanes)
    needs, refusals = set(), []
    for lane in lanes:
        try:
            assembly = assemble(lane)
            check_context(assembly, context)
            needs |= assembly.needs()
        except Refusal as refusal:
            refusals.append(refusal)
    if len(refusals) == len(lanes):
        raise refusals[0]
    return needs


def check_context(assembly: Assembly, context: str) -> None:
    """Raise Refusal if a strategy needs a passage and there is none."""
    if "context" in assembly.needs() and not context.strip():
        needing = find(assembly.needing("context")).title
        raise Refusal(f"{needing} needs a context and there is none: enter a passage as context.", "context")


def check_draft(assembly: Assembly, drafted: bool) -> None:
    """Raise Refusal if a strategy needs a draft model and there is none."""
    if "draft" in assembly.needs() and not drafted:
        part = find(assembly.needing("draft"))
        needing = assembly.decoder.title if part.kind == "drafter" else part.title
        raise Refusal(f"{needing} needs a draft model and there is none: choose one for this target.", "draft")


def translating() -> list[str]:
    """Titles of the strategies that can use a draft model with another vocabulary."""
    return [cls.title for cls in discover().values() if cls.translates]


def assemble(config: LaneConfig) -> Assembly:
    """The strategies of a configuration with their knobs set. Raises Refusal for a combination that cannot work."""
    main = find(config.strategy)
    if main.kind not in MAIN_KINDS:
        raise Refusal(
            f"{main.title} is {_named(main.kind)}, not a decoder: {_place_of(main)}.", config.strategy,
        )
    extras = [(find(name), knobs) for name, knobs in config.extras]
    slots = {kind: name for name, kind in main.slots().items()}
    filled = _fill_slots(config, [(cls, knobs) for cls, knobs in extras if cls.kind in slots], slots)
    decoder = cast(Decoder, make(config.strategy, **{**config.knobs, **filled}))
    assembly = Assembly(decoder)
    added = [make(cls.name, **knobs) for cls, knobs in extras if cls.kind not in slots]
    _check_refuses(decoder, added)
    for toggle in [*decoder.toggles(), *added]:
        add_toggle(assembly, toggle)
    assembly.samplers.sort(key=lambda sampler: (STAGES.index(sampler.stage), sampler.rank))
    _check_exactness(assembly)
    _check_compute(assembly)
    _check_overlays(assembly)
    if "constraint" in decoder.needs and not assembly.constraint:
        raise Refusal(
            f"{decoder.title} needs a constraint: add one, such as JSON Schema or Regular expression.", "constraint"
        )
    return assembly


def decoder_for(kind: str) -> str:
    """Name of a decoder that takes a strategy of this kind; empty if none does."""
    if kind in MAIN_KINDS:
        return ""
    return {"drafter": "speculative", "verifier": "speculative", "variant": "", "study": ""}.get(kind, "greedy")


def _named(kind: str) -> str:
    """A kind with its article: "a cache policy", "an overlay"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind.replace('_', ' ')}"


def _place_of(cls: type[Strategy]) -> str:
    """What to do with a strategy that was chosen as a decoder, or added to one that does not take it."""
    if cls.kind in MAIN_KINDS:
        return "choose it as the decoder of a lane"
    if cls.kind == "variant":
        return "make the new model first and choose that"
    if cls.kind == "study":
        return "it analyses recorded runs"
    return f"add it to one that takes it, such as {find(decoder_for(cls.kind)).title}"


def _fill_slots(config: LaneConfig, extras: list, slots: dict[str, str]) -> dict[str, Any]:
    """The strategies in the slots, by field: from a knob of that name, or added as an extra."""
    filled = {slot: config.knobs[slot] for slot in slots.values() if slot in config.knobs}
    for cls, knobs in extras:
        if slots[cls.kind] in filled:
            taking = find(config.strategy).title
            raise Refusal(f"{taking} takes one {cls.kind}; {cls.title} is one too many: remove one.", cls.name)
        filled[slots[cls.kind]] = make(cls.name, **knobs)
    return filled


def _check_refuses(decoder: Decoder, toggles: list[Strategy]) -> None:
    """Raise Refusal for an added toggle that the decoder excludes. Toggles of its own are not checked."""
    for toggle in toggles:
        drawing = "drawing" in decoder.refuses and getattr(toggle, "draws", False)
        if drawing or toggle.kind in decoder.refuses or toggle.name in decoder.refuses:
            raise Refusal(
                f"{decoder.title} does not work with {_named(toggle.kind)} such as {toggle.title}: "
                f"remove {toggle.title}.",
                toggle.name,
            )


def add_toggle(assembly: Assembly, toggle: Strategy) -> None:
    """Add a sampler, a constraint or a policy to a lane. Raises Refusal if the lane cannot take it."""
    decoder = assembly.decoder
    if toggle.kind == "constraint" and isinstance(decoder, CanvasDecoder) and not decoder.left_to_right:
        raise Refusal(
            f"{toggle.title} judges a text from its beginning, and {decoder.title} fills positions while others to "
            "their left are masked: use Masked diffusion with order left_to_right, rule steps and steps 0, or blocks "
            "of one position.",
            toggle.name,
        )
    if isinstance(toggle, Sampler | Overlay):
        if toggle.name in [part.name for part in (*assembly.samplers, *assembly.overlays)]:
            raise Refusal(
                f"{toggle.title} is in this lane already, added or included by {decoder.title}: remove one.",
                toggle.name,
            )
        if isinstance(toggle, Sampler):
            assembly.samplers.append(toggle)
        else:
            assembly.overlays.append(toggle)
    elif toggle.kind in SINGLE_KINDS:
        taken = getattr(assembly, toggle.kind)
        if taken:
            raise Refusal(
                f"A lane has one {toggle.kind.replace('_', ' ')}: choose {taken.title} or {toggle.title}.", toggle.name
            )
        setattr(assembly, toggle.kind, toggle)
    else:
        raise Refusal(
            f"{decoder.title} has no slot for {toggle.title}, {_named(toggle.kind)}: "
            f"{_place_of(type(toggle))}.",
            toggle.name,
        )


def _check_compute(assembly: Assembly) -> None:
    """Raise Refusal for a compute policy beside parts that need whole layers, or keys and values of every layer."""
    policy, cache_policy = assembly.compute_policy, assembly.cache_policy
    if policy is None:
        return
    early = next((part for part in assembly.strategies() if part.exits_early), None)
    if early:
        raise Refusal(
            f"{early.title} runs some layers alone, and {policy.title} decides in one pass through all of them: "
            f"remove {policy.title}.",
            policy.name,
        )
    if policy.may_stop and assembly.decoder.several:
        raise Refusal(
            f"{policy.title} may end a text by itself, and {assembly.decoder.title} compares several texts that end as "
            f"the model ends them: switch stopping off, or remove {policy.title}.",
            policy.name,
        )
    reader = next((part for part in assembly.strategies() if part.reads_keys), None)
    if reader and policy.skips_attention:
        raise Refusal(
            f"{reader.title} reads the keys and values of the last layer, and {policy.title} may leave them out: "
            "remove one.",
            policy.name,
        )
    if cache_policy and assembly.decoder.several and not (cache_policy.row_wise or cache_policy.prompt_only):
        raise Refusal(
            f"{cache_policy.title} depends on the path of one text, {assembly.decoder.title} grows several, and "
            f"{policy.title} decides for all their rows at once: remove one of them.",
            cache_policy.name,
        )
    if cache_policy and (policy.skips_attention or isinstance(cache_policy, CutsPrompt)):
        raise Refusal(
            f"{cache_policy.title} needs the keys and values of every layer, and {policy.title} leaves layers out: "
            "remove one.",
            policy.name,
        )


def _check_overlays(assembly: Assembly) -> None:
    """Raise Refusal for an overlay beside what the whole model, which reads the text for it, does not do."""
    for overlay in assembly.overlays:
        if isinstance(overlay, WatchesBeams) and assembly.decoder.name not in overlay.decoders:
            raise Refusal(
                f"{overlay.title} watches {' or '.join(find(name).title for name in overlay.decoders)}, and this "
                f"lane's decoder is {assembly.decoder.title}: choose the former, or remove {overlay.title}.",
                overlay.name,
            )
    part: Strategy | None = assembly.cache_policy or assembly.compute_policy
    part = part or next((sampler for sampler in assembly.samplers if "target" in sampler.routings()), None)
    if part is None and assembly.decoder.replaces_prompt:
        part = assembly.decoder
    if assembly.overlays and part:
        overlay = assembly.overlays[0]
        raise Refusal(
            f"{overlay.title} lets the whole model read the text with a full KV cache, which is not what {part.title} "
            f"runs: remove {overlay.title}, or add it to a lane without {part.title}.",
            overlay.name,
        )


def _check_exactness(assembly: Assembly) -> None:
    """Raise Refusal unless the verifier is exact for the way its draft tokens and the lane's tokens are drawn."""
    drafter, verifier = (getattr(assembly.decoder, name, None) for name in ("drafter", "verifier"))
    if verifier is None:
        return
    if drafter and drafter.drawn not in verifier.exact_for:
        exact = " or ".join(DRAWN[way] for way in verifier.exact_for)
        raise Refusal(
            f"{verifier.title} is exact for draft tokens that are {exact}, and those of {drafter.title} are "
            f"{DRAWN[drafter.drawn]}: choose another verifier.",
            verifier.name,
        )
    if verifier.greedy_only and any(sampler.draws for sampler in assembly.samplers):
        raise Refusal(
            f"{verifier.title} is exact only for greedy decoding: remove the samplers, or choose "
            f"{find('rejection').title} or {find('sample_match').title}.",
            verifier.name,
        )
