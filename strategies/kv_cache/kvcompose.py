"""KVCompose: composite tokens of a layer, made of each head's own."""
import torch
from torch import Tensor

from playground.contract import ReadsProbeHeads, knob
from playground.errors import Refusal
from playground.events import Figure, Note

MOST = 2048  # tokens of the prompt that are read again at once


class KVCompose(ReadsProbeHeads):
    """Evict prompt tokens once: each head keeps its own best ones, equally many in all heads of a layer, and layers
    share the budget.

    The prompt is read once more after itself and discarded. A token's score is the largest attention that any of these
    rows pays to it, averaged over the query heads of a group; the mean of all heads is added. The best token of every
    head together form a layer's first composite token, the second best its second, and so on; its score is the mean of
    theirs. The best composite tokens of all layers stay, and the first layer counts as much as the strongest. So no
    head needs a length of its own, as it does if heads compete, too. It costs a second prefill; a prompt that does not
    fit twice is read again in parts. Generated tokens are not evicted. Rules of NVIDIA's kvpress; Akulov et al. 2025,
    arXiv 2509.05165.
    """

    name, title, paper, sheet = "kvcompose", "Composite tokens (KVCompose)", "2509.05165", "kv-cache/kvzap"
    guarantee, new_in = ("collapses",), "2026"
    prompt_only = True

    capacity: int = knob(64, 1, 2048, step=1, help="prompt tokens that a head holds, on average")
    least: int = knob(0, 0, 2048, step=1, help="tokens that each head holds at least")
    compete: str = knob("layers", choices=("layers", "heads"), help="what shares the budget: layers, or all heads")
    agree: bool = knob(True, help="add the mean of all heads of a layer to a token's score")

    def __post_init__(self):
        self._largest: dict[int, Tensor] = {}  # attention of any probe row, by layer, [kv_heads, group, prompt]
        self._counts: list[list[int]] = []
        self._lacks_room = self._done = False

    def check(self):
        if self.least > self.capacity:
            raise Refusal(
                f"Each head holds at least {self.least} tokens, and {self.capacity} on average: raise capacity.",
                "capacity",
            )

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"capacity": tokens, "least": tokens}

    def expected_share(self, full):
        return min(1.0, (self.capacity + full.generated) / full.length)

    def probe_texts(self, text, room):
        if len(text) <= self.capacity:
            return []
        size = min(MOST, room)
        self._lacks_room = size < 1
        return [] if self._lacks_room else [text[start:start + size] for start in range(0, len(text), size)]

    def observe_probe_heads(self, layer, weights):
        found = weights.amax(2)
        self._largest[layer] = torch.maximum(self._largest.get(layer, found), found)

    def retain_all(self, held):
        if self._done or not self._largest:
            self._done = self._done or held[0].moment == "prefill"
            return [layer.live for layer in held]
        self._done = True
        kept = self.chosen(torch.stack([self._largest[layer].mean(1) for layer in range(len(held))]))
        self._largest, self._counts = {}, kept.sum(-1).tolist()
        return list(kept)

    def chosen(self, scores: Tensor) -> Tensor:
        """Which tokens stay, bool, given the attention they received, both [layers, kv_heads, tokens]."""
        if self.agree:
            scores = scores + scores.mean(1, keepdim=True)
        ranks = scores.argsort(stable=True, dim=-1, descending=True).argsort(-1)
        return ranks < self.counts(scores.sort(-1, descending=True).values)[..., None]

    def counts(self, ranked: Tensor) -> Tensor:
        """How many tokens each head keeps, [layers, kv_heads], given its scores from the best one on."""
        layers, heads, tokens = ranked.shape
        composite = ranked.mean(1, keepdim=True) if self.compete == "layers" else ranked.clone()
        composite[..., :self.least] = torch.inf
        if self.compete == "layers":
            composite[0] = composite.amax(0)
        kept = composite.flatten().topk(min(self.capacity, tokens) * composite[..., 0].numel()).indices // tokens
        counts = kept.bincount(minlength=composite[..., 0].numel())
        return counts.view(layers, -1).expand(layers, heads)

    def explain(self, prompt, layers):
        if self._lacks_room:
            self._lacks_room = False
            yield Note("The model's context has no room to read the prompt again, so nothing was evicted.")
        if self._counts:
            labels = {"rows": [f"layer {layer}" for layer in range(len(self._counts))],
                      "columns": [f"head {head}" for head in range(len(self._counts[0]))]}
            yield Figure("matrix", "prompt tokens kept", {**labels, "values": self._counts})
        self._counts = []
