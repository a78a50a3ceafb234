"""What a strategy is: base class and knobs, one file for each kind, registry, lane configuration, metadata, token tree."""
from playground.contract.strategy import (
    GUARANTEES,
    KINDS,
    NEEDS,
    STAGES,
    CachePolicy,
    CanvasDecoder,
    ComputePolicy,
    Constraint,
    Decoder,
    Drafter,
    Inner,
    Knob,
    Preset,
    Sampler,
    Strategy,
    Study,
    Variant,
    Verifier,
    discover,
    find,
    knob,
    make,
    slot,
)

__all__ = ["GUARANTEES", "KINDS", "NEEDS", "STAGES", "CachePolicy", "CanvasDecoder", "ComputePolicy", "Constraint", "Decoder", "Drafter", "Inner", "Knob",
           "Preset", "Sampler", "Strategy", "Study", "Variant", "Verifier", "discover", "find", "knob", "make", "slot"]
