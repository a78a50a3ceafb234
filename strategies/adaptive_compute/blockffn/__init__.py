"""BlockFFN: many small experts in each layer, switched off exactly by a router of ReLU and RMS norm."""
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.events import Figure, Note
from strategies.adaptive_compute.blockffn.block_routing import BlockLayer, ChosenExperts, chunk_sparsity, gates
from strategies.adaptive_compute.blockffn.block_training import train_blocks

CHUNK = 8  # consecutive tokens of a chunk of the prompt, and of the chunk sparsity that is shown


class ActiveBlocks(LayerChoices):
    """One forward: the experts that some row of a chunk uses are computed once, for all its rows."""

    def __init__(self, policy: "BlockFfn", prompt_rows: int):
        self._policy, self._prompt_rows = policy, prompt_rows
        self.active: list[Tensor] = []  # by layer, bool [rows, experts]
        self.unions: list[float] = []  # share of the experts that the last chunk uses, by layer

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        shares = self._policy.gates(layer, hidden)
        if shares is None:
            return [SharedFeedForward(None, full)]
        self.active.append((shares != 0).cpu())
        chunks = self._chunks(len(hidden))
        used = [(shares[rows] != 0).any(0) for rows in chunks]
        self.unions.append(float(used[-1].float().mean()))
        runs = [SharedFeedForward(rows, self._part(layer, each, shares[rows])) for rows, each in zip(chunks, used)]
        return [run for run in runs if run.part.weights]

    def _chunks(self, rows: int) -> list[list[int]]:
        """Rows that are computed together: `CHUNK` tokens of the prompt, and all rows after it."""
        prompt, later = range(self._prompt_rows), range(self._prompt_rows, rows)
        chunks = [list(prompt[start:start + CHUNK]) for start in range(0, len(prompt), CHUNK)]
        return [*chunks, list(later)] if later else chunks

    def _part(self, layer: int, used: Tensor, shares: Tensor) -> ChosenExperts:
        chosen = used if self._policy.skip else torch.ones_like(used)
        return self._policy.layers[layer].of(chosen.nonzero()[:, 0], shares)

    def deciding_weights(self, layer: int) -> int:
        return self._policy.router_weights


class BlockFfn(ComputePolicy):
    """Divide each feed-forward network (FFN) into many small experts; those a token does not use are not computed. The
    paper trains a model with its experts from the start, which takes hours here; ours are parts of a finished one.

    A router's scores pass a ReLU and an RMS norm over the experts. The result is the factor of each expert's output, so
    an expert with a negative score is off exactly, and leaving it out changes nothing. Rows of one forward, such as a
    draft tree, compute the union of their experts, those of a prompt eight by eight. `python -m playground fit
    blockffn` divides the channels of a finished model into 48 groups of similar gate weights and trains the routers:
    first to reproduce each FFN, then the model's distributions, with the paper's losses, by which neighbouring tokens
    use the same experts and chunks of tokens few. `theta` also drops small factors, which is not exact. Experts that
    are parts of a dense model with gated units approximate the plain two-matrix experts of the paper, and are less
    sparse. Without a fit nothing is left out. Song et al. 2025, arXiv
    2507.08771.
    """

    name, title, paper, sheet = "blockffn", "Blocks of experts (BlockFFN)", "2507.08771", "adaptive-compute/blockffn"
    guarantee, reconstruction, sure = ("collapses",), True, "medium"
    prefers_trained = True
    questions_per_task = 60

    skip: bool = knob(True, help="leave out experts that are off; without it the same result, all computed")
    theta: float = knob(0.0, 0.0, 1.0, step=0.05, help="factors of experts below this count as off; 0 is exact")

    layers: Sequence = ()
    router_weights = 0

    def begin(self, parts, weights):
        self._told, self._norm, self._seen = bool(weights), parts.ffn_input, []
        self._weights = weights
        if weights:
            orders, experts = weights["order"].long(), weights["router"].shape[1]
            self.layers = [
                BlockLayer(parts.ffn_projections(layer), order, experts) for layer, order in enumerate(orders)
            ]
            self.router_weights = weights["router"][0].numel()

    def gates(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Factor of each expert's output for each row, [n, experts], 0 if it is off; None without trained routers."""
        if not self._weights:
            return None
        router, norm = (self._weights[name][layer].float().to(hidden.device) for name in ("router", "norm"))
        found = gates(self._norm(layer, hidden).float(), router, norm)
        return found.masked_fill(found.abs() < self.theta, 0.0) if self.theta else found

    def choices(self, positions, prompt):
        return ActiveBlocks(self, sum(position < prompt for position in positions))

    def explain(self, choices, row, generated) -> Iterator:
        if not self._told:
            self._told = True
            yield Note("No routers for this model, so every FFN runs whole: `python -m playground fit blockffn` trains "
                       "them.")
        if not choices.active:
            return
        own = torch.stack([layer[row] for layer in choices.active])  # [layers, experts]
        self._seen = [*self._seen, own][-CHUNK:]
        labels = [f"layer {layer}" for layer in range(len(own))]
        used = [round(float(share), 4) for share in own.float().mean(1)]
        yield Figure("bars", "share of the experts that a token used", {"labels": labels, "values": used})
        recent = torch.stack(self._seen, 1)  # [layers, tokens, experts]
        series = {"token sparsity": float(1 - own.float().mean()),
                  "computed together": sum(choices.unions) / len(choices.unions)}
        if len(self._seen) == CHUNK:
            chunks = torch.stack([chunk_sparsity(each, CHUNK) for each in recent])
            series[f"sparsity of {CHUNK} tokens"] = float(chunks.mean())
        yield Figure("scalar", "sparsity of the experts", {"x": generated, "series": series})
        columns = [f"expert {expert}" for expert in range(own.shape[1])]
        yield Figure("matrix", "experts that were on for the newest token",
                     {"rows": labels, "columns": columns, "values": own.float().tolist()})

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Divide the channels and train the routers; returns the weights by name."""
        torch.manual_seed(seed)
        return (yield from train_blocks(texts, seed))
