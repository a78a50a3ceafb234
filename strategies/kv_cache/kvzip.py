"""KVzip: what the model needs in order to repeat its context."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.contract import ReadsProbeHeads, knob
from playground.events import Figure, Note

MOST = 2048  # tokens of the context that are repeated at once
LAST = 8  # tokens before a later part that show where it begins
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


class KVzip(ReadsProbeHeads):
    """Evict prompt tokens once, keeping those that the model attends to while it repeats the prompt.

    After the prefill, an instruction to repeat the context and the context itself are read once more and discarded. A
    token's score is the largest attention that any of these rows and any query head of its group pays to it. This does
    not depend on a question, so one compressed context answers many. A long context is repeated in parts, each of which
    counts with attention to its own tokens, the first `sinks`, and itself. With shared budgets the heads of all layers
    compete for the slots, and each takes the memory of what it keeps; while a layer is read, its heads are spread out
    to equal lengths, so reading is saved by even budgets only. It costs a second prefill. Generated tokens are not
    evicted, and the instruction is outside of the chat template. Kim et al. 2025, arXiv 2505.23416.
    """

    name, title, paper, sheet = "kvzip", "Context reproduction (KVzip)", "2505.23416", "kv-cache/kvzip"
    guarantee = ("collapses",)
    prompt_only = True

    capacity: int = knob(64, 1, 2048, step=1, help="prompt tokens that a head holds, on average")
    sinks: int = knob(4, 0, 64, step=1, help="first tokens, which always stay")
    budgets: str = knob("shared", choices=("shared", "even"), help="heads of all layers compete, or hold equally many")

    def __post_init__(self):
        self._scores: dict[int, Tensor] = {}  # by layer, [kv_heads, prompt]
        self._parts: list[tuple[int, int, int]] = []  # rows of a part; its first token and the one after its last
        self._rows: dict[int, int] = {}  # rows received, by layer
        self._counts: list[list[int]] = []
        self._lacks_room = self._done = False

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"capacity": tokens, "sinks": min(cls.sinks, tokens), "budgets": "even"}

    def expected_share(self, full):
        return min(1.0, (self.capacity + full.generated) / full.length)

    def probe_texts(self, text, room):
        if len(text) <= self.capacity:
            return []
        first, later = self.spell(FIRST), self.spell(LATER)
        size = min(MOST, room - max(len(first), len(later) + LAST))
        self._lacks_room = size < 1
        texts = []
        for start in range(0, len(text), size) if size > 0 else ():
            asked = [*later, *text[max(0, start - LAST):start]] if start else first
            texts.append([*asked, *text[start:start + size]])
            self._parts.append((len(texts[-1]), start, min(len(text), start + size)))
        return texts

    def observe_probe_heads(self, layer, weights):
        start, end = self._part_of(self._rows.get(layer, 0))
        self._rows[layer] = self._rows.get(layer, 0) + weights.shape[2]
        scores = self._scores.setdefault(layer, weights.new_zeros(len(weights), weights.shape[3]))
        found = own_attention(weights, start, end, min(self.sinks, start)).amax((1, 2))
        scores[:, start:end] = torch.maximum(scores[:, start:end], found)

    def _part_of(self, row: int) -> tuple[int, int]:
        """The first token of the part that a row repeats, and the one after its last."""
        for rows, start, end in self._parts:
            if row < rows:
                return start, end
            row -= rows
        raise IndexError(row)

    def retain_all(self, held):
        if self._done or not self._scores:
            self._done = self._done or held[0].moment == "prefill"
            return [layer.live for layer in held]
        self._done = True
        safe = torch.stack([layer.positions.expand(len(self._scores[0]), -1) < self.sinks for layer in held])
        scores = torch.stack([self._scores[layer] for layer in range(len(held))])
        kept = self.chosen(scores, safe)
        self._counts = kept.sum(-1).tolist()
        return list(kept)

    def chosen(self, scores: Tensor, safe: Tensor) -> Tensor:
        """Which slots stay, bool, given scores and slots that always stay, all [layers, kv_heads, slots]."""
        layers, heads, slots = scores.shape
        rows = (1, -1) if self.budgets == "shared" else (layers * heads, slots)
        most = self.capacity * (layers * heads if self.budgets == "shared" else 1)
        flat, always = scores.reshape(rows), safe.reshape(rows)
        stays = always | top_slots(flat, max(0, most - int(always.sum(-1).max())), ~always)
        return stays.view_as(scores)

    def explain(self, prompt, layers):
        if self._lacks_room:
            self._lacks_room = False
            yield Note("The model's context has no room to repeat the prompt, so nothing was evicted.")
        if self._counts:
            labels = {"rows": [f"layer {layer}" for layer in range(len(self._counts))],
                      "columns": [f"head {head}" for head in range(len(self._counts[0]))]}
            yield Figure("matrix", "prompt tokens kept", {**labels, "values": self._counts})
        self._counts = []


def own_attention(weights: Tensor, start: int, end: int, sinks: int) -> Tensor:
    """Attention to the tokens of a part, as if rows saw nothing but these, the first tokens, and each other.

    `weights` [..., tokens] are over all tokens of the context; what they lack to 1 is attention to each other.
    """
    others = weights[..., sinks:start].sum(-1) + weights[..., end:].sum(-1)
    return weights[..., start:end] / (1 - others).clamp(min=1e-12)[..., None]
