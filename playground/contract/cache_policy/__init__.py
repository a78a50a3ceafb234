"""Cache policies: which KV slots stay, and in which form?

`CachePolicy` is what all of them implement. One that needs or does more derives from the classes of its capabilities:

| capability | a policy that |
|---|---|
| `ReadsAttention`, `ReadsQueryHeads` | reads the attention of committed rows, and that of the prompt by query head |
| `ReadsQueries` | reads the query states of the prompt |
| `ReadsLayerInputs` | reads the hidden states that enter each layer |
| `ReadsProbes`, `ReadsProbeHeads` | has further texts read after the prompt, and reads their attention |
| `ReadsParts` | computes with weights of the network |
| `SelectsPerRow`, `SelectsByStates` | selects what each row sees, by its attention or before it is computed |
| `SelectsLines` | selects columns and diagonals of the prompt's attention matrix |
| `Quantises` | stores old slots in fewer bits |
| `Merges` | merges evicted slots into live ones |
| `AddsMemory` | holds states beside the slots |
| `ReadsInChunks` | acts while the prompt is read |
| `RestrictsPrompt` | applies its mask to the prompt |
| `CutsPrompt` | shortens the prompt for later layers |
| `RenumbersPositions` | numbers rows by their index in the cache |
| `DecidesByHead` | decides for the heads of every text by themselves, so that one call acts on several texts |
"""
from playground.contract.cache_policy.base_policy import CachePolicy
from playground.contract.cache_policy.head_copies import DecidesByHead
from playground.contract.cache_policy.held import Full, Held
from playground.contract.cache_policy.kept_forms import AddsMemory, Merge, Merges, Quantises
from playground.contract.cache_policy.prompt_reading import (
    CutsPrompt,
    ReadsInChunks,
    RenumbersPositions,
    RestrictsPrompt,
)
from playground.contract.cache_policy.readings import (
    ReadsAttention,
    ReadsLayerInputs,
    ReadsParts,
    ReadsProbeHeads,
    ReadsProbes,
    ReadsQueries,
    ReadsQueryHeads,
)
from playground.contract.cache_policy.row_selection import SelectsByStates, SelectsLines, SelectsPerRow

__all__ = [
    "AddsMemory",
    "CachePolicy",
    "CutsPrompt",
    "DecidesByHead",
    "Full",
    "Held",
    "Merge",
    "Merges",
    "Quantises",
    "ReadsAttention",
    "ReadsInChunks",
    "ReadsParts",
    "ReadsProbeHeads",
    "ReadsProbes",
    "ReadsQueries",
    "ReadsQueryHeads",
    "ReadsLayerInputs",
    "RenumbersPositions",
    "RestrictsPrompt",
    "SelectsByStates",
    "SelectsLines",
    "SelectsPerRow",
]
