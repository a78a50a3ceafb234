"""What a strategy is. Read this first.

A strategy is a class in a file of its own under `strategies/`. Its annotated fields are its knobs; its docstring says
what it does, how, and where it comes from. Giving it a `name` registers it; no other file has to be edited.

    class TopP(Sampler):
        \"\"\"Sample from the smallest set of tokens whose probabilities reach p. ... arXiv 1904.09751.\"\"\"

        name, title, paper, sheet = "top_p", "Top-p (nucleus)", "1904.09751", "sampling/sampling-baselines"
        p: float = knob(0.9, 0.0, 1.0, help="probability mass that is kept")

It knows nothing about pages, JSON, timing, devices or other lanes. There is one file for each kind of strategy;
`lane.py` describes `lm`, all that a strategy can access of its run.
"""
from playground.contract.base import GUARANTEES, NEEDS, Strategy
from playground.contract.cache_policy import (
    AddsMemory,
    CachePolicy,
    CutsPrompt,
    DecidesByHead,
    Full,
    Held,
    Merge,
    Merges,
    Quantises,
    ReadsAttention,
    ReadsInChunks,
    ReadsLayerInputs,
    ReadsParts,
    ReadsProbeHeads,
    ReadsProbes,
    ReadsQueries,
    ReadsQueryHeads,
    RenumbersPositions,
    RestrictsPrompt,
    SelectsByStates,
    SelectsLines,
    SelectsPerRow,
)
from playground.contract.compute_policy import ComputePolicy
from playground.contract.constraint import Constraint
from playground.contract.decoder import CanvasDecoder, Decoder, Preset
from playground.contract.drafter import Drafter
from playground.contract.early_exit import EarlyExit
from playground.contract.knobs import Knob, knob, slot
from playground.contract.lane import Lane
from playground.contract.overlay import (
    LooksAhead,
    OverlaidText,
    Overlay,
    ReadsAnotherText,
    ReadsChannels,
    ReadsExperts,
    ReadsHeads,
    ReadsLoadedWeights,
    ReadsLogits,
    ReadsSource,
    ReadsStates,
    RoutedRows,
    WatchesBeams,
)
from playground.contract.registry import KINDS, discover, find, lookup, make
from playground.contract.reward import Reward, RewardedText
from playground.contract.sampler import STAGES, Sampler
from playground.contract.study import Study
from playground.contract.variant import Variant
from playground.contract.verifier import Verifier
from playground.contract.weight_change import CalibratedChange, ChangedWeight, WeightChange
from playground.engine.attention.line_attention import AttentionLines
from playground.engine.layer_choices import LayerChoices, LayerSteps, SharedFeedForward
from playground.engine.weights.expert_matrices import RouterReading

__all__ = [
    "GUARANTEES",
    "KINDS",
    "NEEDS",
    "STAGES",
    "AddsMemory",
    "AttentionLines",
    "CachePolicy",
    "CalibratedChange",
    "CanvasDecoder",
    "ChangedWeight",
    "ComputePolicy",
    "Constraint",
    "CutsPrompt",
    "DecidesByHead",
    "Decoder",
    "Drafter",
    "Full",
    "Held",
    "EarlyExit",
    "Knob",
    "Lane",
    "LayerChoices",
    "LayerSteps",
    "LooksAhead",
    "Merge",
    "Merges",
    "OverlaidText",
    "Overlay",
    "Preset",
    "Quantises",
    "ReadsAnotherText",
    "ReadsAttention",
    "ReadsChannels",
    "ReadsExperts",
    "ReadsHeads",
    "ReadsSource",
    "ReadsInChunks",
    "ReadsLoadedWeights",
    "ReadsLogits",
    "ReadsParts",
    "ReadsProbeHeads",
    "ReadsProbes",
    "ReadsQueries",
    "ReadsQueryHeads",
    "ReadsLayerInputs",
    "ReadsStates",
    "RenumbersPositions",
    "RestrictsPrompt",
    "Reward",
    "RewardedText",
    "Sampler",
    "RoutedRows",
    "RouterReading",
    "SelectsByStates",
    "SelectsLines",
    "SelectsPerRow",
    "SharedFeedForward",
    "Strategy",
    "Study",
    "Variant",
    "Verifier",
    "WatchesBeams",
    "WeightChange",
    "discover",
    "find",
    "knob",
    "lookup",
    "make",
    "slot",
]
