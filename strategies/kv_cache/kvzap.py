"""KVzap: a linear map predicts what a repetition of the text would attend to."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from playground.algorithms.differentiable_llama import DifferentiableLlama, FrozenLayer, rotated
from playground.algorithms.kv_cache.ridge import RidgeSums
from playground.contract import DecidesByHead, ReadsLayerInputs, ReadsParts, knob
from playground.events import Figure, Note

REPEAT = "\n\nRepeat the previous context exactly."
SHORTEST, HELD_OUT = 16, 10  # tokens of a text; one text in this many is not fitted to
QUANTILES = 101  # of the predicted scores, from the lowest to the highest


class KVzap(ReadsParts, ReadsLayerInputs, DecidesByHead):
    """Drop a token from a KV head as soon as it leaves the window of recent ones, if its predicted importance there is
    below a threshold. How much stays follows from the text.

    A token's importance is what KVzip would find: the largest attention that any row of a repetition of the text pays
    to it, times the norm of what its value adds to the output, over the norm of that row's input; as a natural
    logarithm. KVzip reads the text twice for that. Here a linear map of each layer predicts it for every head, from the
    token's own state as it enters the attention, so it costs next to nothing and also applies to generated tokens.
    `python -m playground fit kvzap` solves for these maps in closed form. Without a fit nothing is dropped, and so it
    is below the lowest score; above the highest only the window stays.

    A head takes the memory of what it holds; while a layer is read, its heads are spread out to equal lengths. The
    states of drafts are not known before they are committed, so with drafts longer than the window a token is dropped
    up to one round later than without. The authors' other form, a small network in place of the linear map, is left
    out. NVIDIA's kvpress has the rule as `DMSPress(KVzapPress)`. Jegou and Jeblick 2026, arXiv 2601.07891.
    """

    name, title, paper, sheet = "kvzap", "Predicted importance (KVzap)", "2601.07891", "kv-cache/kvzap"
    guarantee, new_in = ("collapses",), "2026"
    fitted_to_target, prefers_trained = True, True
    questions_per_task = 20

    threshold: float = knob(-3.2, -30.0, 10.0, step=0.1, help="tokens whose predicted logarithm is lower are dropped")
    window: int = knob(16, 1, 1024, step=1, help="most recent tokens, which always stay")
    decoding: bool = knob(True, help="generated tokens are dropped, too, and the end of the prompt once it is old")

    def __post_init__(self):
        self._maps: dict[str, Tensor] = {}  # weight [layers, kv_heads, width] and bias [layers, kv_heads]
        self._scores: dict[int, Tensor] = {}  # by layer, of the tokens read, [kv_heads, tokens]
        self._shares: dict[int, Tensor] = {}  # by layer, of the text that each head holds, [kv_heads]
        self._next = 0  # position of the next row when these were taken
        self._shown = -1  # tokens when the matrix was shown last
        self._noted = False

    def begin(self, parts):
        self._parts = parts

    def begin_fitted(self, weights):
        self._maps = {name: tensor.float() for name, tensor in weights.items()}

    def state_layers(self, depth):
        return super().state_layers(depth) if self._maps else ()

    def expected_share(self, full):
        if not self._maps:
            return 1.0
        last = full.length if self.decoding else full.prompt
        below = float((self._maps["quantiles"] < self.threshold).float().mean())
        return 1 - below * max(0, last - self.window) / full.length

    def observe_layer_inputs(self, first, inputs):
        for layer, rows in inputs.items() if self._maps else ():
            known = self._scores.get(layer, rows.new_zeros(len(self._maps["bias"][layer]), 0, dtype=torch.float32))
            known = pad(known[:, :first], (0, max(0, first - known.shape[1])), value=torch.inf)
            self._scores[layer] = torch.cat([known, self.predicted(layer, rows)], 1)

    def predicted(self, layer: int, hidden: Tensor) -> Tensor:
        """Scores [kv_heads, n] of tokens whose states [n, width] enter a layer."""
        states = self._parts.attention_input(layer, hidden).float()
        weight, bias = (self._maps[name][layer].to(states.device) for name in ("weight", "bias"))
        return weight @ states.T + bias[:, None]

    def retain(self, held):
        if held.layer not in self._scores:
            return held.live
        drops = self.scores(held) < self.threshold
        oldest = held.next if self.decoding else held.prompt
        stays = held.live & ~(drops & (held.positions < oldest - self.window))
        self._shares[held.layer], self._next = stays.sum(1) / held.next, held.next
        return stays

    def scores(self, held) -> Tensor:
        """[kv_heads, slots]; infinite for tokens whose states are not known yet."""
        known = self._scores[held.layer]
        found = known.gather(1, held.positions.clamp(0, known.shape[1] - 1).expand(len(known), -1))
        return found.masked_fill(held.positions >= known.shape[1], torch.inf)

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone._scores = {layer: self._scores[layer][heads]} if layer in self._scores else {}
        alone._shares = {}
        return alone

    def rests(self, slots, length, prompt):
        return not self._maps

    def explain(self, prompt, layers):
        if not self._maps and not self._noted:
            self._noted = True
            yield Note("KVzap without a fit: nothing is dropped. `python -m playground fit kvzap` learns what this "
                       "model needs.")
        if len(self._shares) == layers:
            shares = torch.stack([self._shares[layer] for layer in range(layers)]).tolist()
            yield from self._figures(shares)

    def _figures(self, shares: list[list[float]]) -> Iterator[Figure]:
        """The share of the text that is held, by layer and head each time a window has passed."""
        whole = sum(map(sum, shares)) / sum(map(len, shares))
        yield Figure("scalar", "share of the text held", {"x": self._next, "series": {"all heads": whole}})
        if self._shown < 0 or self._next >= self._shown + self.window:
            self._shown = self._next
            labels = {"rows": [f"layer {layer}" for layer in range(len(shares))],
                      "columns": [f"head {head}" for head in range(len(shares[0]))]}
            yield Figure("matrix", "share of the text held, by head", {**labels, "values": shares})

    @classmethod
    def calibrate(cls, texts, seed: int):
        """Solve for the map of each layer, and report how much of the scores' variance it explains."""
        network, repeat = DifferentiableLlama(texts.parts), texts.spell(REPEAT)
        read = [ids for ids in texts.texts if len(ids) >= SHORTEST] or texts.texts
        fits = [RidgeSums(network.width, layer.kv_heads) for layer in network.layers]
        tests = [RidgeSums(network.width, layer.kv_heads) for layer in network.layers]
        for number, ids in enumerate(read):
            held_out = number % HELD_OUT == 0 and len(read) >= HELD_OUT
            for sums, (inputs, scores) in zip(tests if held_out else fits, examples(network, texts, ids, repeat)):
                sums.add(inputs, scores)
            texts.progress((number + 1) / len(read), "The model repeats texts")
        maps = [sums.solved() for sums in fits]
        for layer, (sums, each) in enumerate(zip(tests if tests[0].count else fits, maps)):
            data = {"x": layer, "axis": "layer", "series": {"explained": sums.explained(*each)}}
            yield Figure("scalar", "share of the scores' variance that the map explains", data)
        weight, bias = (torch.stack(parts) for parts in zip(*maps))
        found = torch.cat([
            (inputs @ weight[layer].T + bias[layer]).flatten()
            for ids in read[::HELD_OUT]
            for layer, (inputs, _) in enumerate(examples(network, texts, ids, repeat))
        ])
        quantiles = found.quantile(torch.linspace(0, 1, QUANTILES, dtype=found.dtype))
        return {name: part.half() for name, part in {"weight": weight, "bias": bias, "quantiles": quantiles}.items()}


def examples(network: DifferentiableLlama, texts, ids: list[int], repeat: list[int]) -> list[tuple[Tensor, Tensor]]:
    """By layer, the states of a text as they enter the attention, [n, width], and the importance, [n, kv_heads]."""
    states = texts.states([*ids, *repeat, *ids], range(network.depth))[1]
    found = []
    for index, layer in enumerate(network.layers):
        hidden = states[index].to(network.embeddings)
        scores = importance(network, layer, hidden, len(ids))
        found.append((layer.norms[0](hidden)[:len(ids)].double(), scores.T.double()))
    return found


def importance(network: DifferentiableLlama, layer: FrozenLayer, hidden: Tensor, count: int) -> Tensor:
    """Natural logarithms [kv_heads, count] of the importance of the first `count` tokens of a text whose last `count`
    repeat them, given the layer's inputs [n, width].
    """
    query, keys, values = layer.states(hidden, None)
    query, keys = (rotated(part, network.cos[:len(hidden)], network.sin[:len(hidden)]) for part in (query, keys))
    group = layer.heads // layer.kv_heads
    logits = query[:, -count:] @ keys.repeat_interleave(group, 0).transpose(1, 2) * network.scaling
    later = torch.ones_like(logits[0], dtype=torch.bool).triu(len(hidden) - count + 1)
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)[..., :count]  # [heads, rows, count]
    out = layer.out.weight.unflatten(1, (layer.heads, layer.head_dim)).transpose(0, 1)  # [heads, width, head_dim]
    added = (out @ values.repeat_interleave(group, 0)[:, :count].transpose(1, 2)).norm(dim=1)  # [heads, count]
    size = layer.norms[0](hidden)[-count:].norm(dim=-1)
    best = (weights / size[:, None]).amax(1) * added
    return best.unflatten(0, (layer.kv_heads, group)).amax(1).clamp(min=torch.finfo(best.dtype).tiny).log()
