"""Heads whose queries look for many different things keep a long cache, the others a short one."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import Lately, heaviest
from playground.algorithms.kv_cache.layer_cut_figure import staircase
from playground.algorithms.kv_cache.prompt_compression import POOLS, check_kernel
from playground.contract import CachePolicy, knob
from playground.errors import Refusal
from playground.events import Figure

if TYPE_CHECKING:
    from playground.algorithms.sampling.token_readings import TokenReading

TINY = 1e-10  # the smallest eigenvalue that counts
# of the mean entropy of a layer's heads, more than which begins a stage: a fall of 1 in the sum over the 32 heads of
# the paper's models
FALL = 1 / 32


class UNComp(CachePolicy):
    """Keep twice as many tokens in the heads whose queries are various as in the others, and let every new token push
    one out.

    How various they are is the entropy of the largest eigenvalues of their covariance, with the mean taken away and
    every query made as long as the others. In each layer the half of the heads that has the most of it is wide, the
    rest narrow. Which half that is has been marked by texts read before (`python -m playground fit uncomp` prints the
    `marks`, each stretch of a text having a vote), or is marked by the prompt itself. Tokens stay by the attention of
    the last `window` rows, smoothed along the text as in SnapKV, and that is asked anew after every token, of those
    that are left. With high and low alike the first cut is SnapKV's; with room for the whole text nothing is evicted.

    With a `floor` the prompt is read in stages, and costs less to read. A stage is a few layers; a new one begins where
    the entropy of a layer falls much below that of the layer before, and `fit` prints that too. The first stage reads
    the whole prompt and each later one as many tokens less, down to the floor (1536 in the released code, for prompts
    up to the model's context: that is `longest`). Who goes on is said by the last `window` rows of the layer before,
    over all heads; those rows always go on, where the released code protects not even the last. With a floor as long as
    the prompt all go on, with 0 there are no stages.

    A head is one of keys and values, to which the queries of its whole group count; the released code repeats keys so
    that every head of queries has a cache. Left out: heads come in two groups, not in four or more. Xiong et al. 2024,
    arXiv 2410.03090.
    """

    name, title, paper, sheet = "uncomp", "By the entropy of queries (UNComp)", "2410.03090", "kv-cache/uncomp"
    guarantee, sure = ("budget_respected", "collapses"), "medium"
    row_wise, watches, asks = False, True, True

    high: int = knob(
        64, 2, 2048, step=1, help="tokens that stay in a head whose queries are various, the window included"
    )
    low: int = knob(32, 2, 2048, step=1, help="tokens that stay in any other, the window included")
    window: int = knob(8, 1, 64, step=1, help="most recent rows, which vote and stay")
    kernel: int = knob(
        7, 1, 15, step=2, help="neighbouring tokens whose votes are pooled, an odd number; 1 pools nothing"
    )
    pooling: str = knob("max", choices=("avg", "max"), help="how votes of neighbours are pooled")
    eigenvalues: int = knob(32, 1, 256, step=1, help="largest eigenvalues that count; no more than a query has numbers")
    marks: str = knob(
        "",
        help="1 for a head that is wide and 0 for one that is narrow, layer by layer with dots between; empty: the prompt tells",
    )
    stages: str = knob(
        "",
        help="layers of each stage that reads the prompt, with dots between, from the first stage to the last; read where there is a floor",
    )
    floor: int = knob(
        0, 0, 131072, step=1, help="tokens of the prompt that the last stage reads; 0: every layer reads all of it"
    )
    longest: int = knob(
        0,
        0,
        131072,
        step=1,
        help="tokens from which stages go down evenly to the floor; of a shorter prompt some read all; 0: its length",
    )

    def __post_init__(self):
        self.lately, self._queries, self._entropies = Lately(self.window), {}, None
        self._wide, self._shown = [], False  # wide heads, by layer
        self._went_on = {}  # tokens of the prompt, by the first layer of the stage that read no others

    def check(self):
        if min(self.high, self.low) <= self.window:
            raise Refusal(
                f"The window alone takes {self.window} tokens, and a head is to hold {min(self.high, self.low)}: raise high and low above it.",
                "low",
            )
        check_kernel(self.kernel)
        if set(self.marks) - set("01."):
            raise Refusal("marks are digits 0 and 1 with a dot between layers: let `fit` print them.", "marks")
        self._check_stages()

    def _check_stages(self):
        if self.stages and not all(size.isdecimal() and int(size) for size in self.stages.split(".")):
            raise Refusal(
                "stages are numbers of layers, none of them 0, with a dot between stages: let `fit` print them.",
                "stages",
            )
        if self.floor and not self.stages:
            raise Refusal(
                "A floor is reached in stages, and there are none: let `fit` print them, or set floor to 0.", "stages"
            )
        if 0 < self.longest < self.floor:
            raise Refusal(
                f"longest is {self.longest}, below the floor of {self.floor}: raise it, or set it to 0.", "longest"
            )

    @classmethod
    def holding(cls, tokens, prompt):
        low = max(2, round(tokens * 2 / 3))
        return {"high": 2 * tokens - low, "low": low, "window": min(cls.window, low - 1)}

    def promise(self, full):
        sizes = self._sizes() if self.floor else [full.layers]
        held = sum(
            size * min(self._reads(stage, full.prompt) + full.generated, room)
            for stage, size in enumerate(sizes)
            for room in (self.high, self.low)
        )
        return held / 2 / full.layers / full.length

    def budget(self, generated):
        return max(self.high, self.low)

    @classmethod
    def fit(cls, readings: Iterable[TokenReading]) -> dict[str, str]:
        """The half of the heads of each layer that was most often among the most various, every stretch of a text
        having a vote; and the stages.
        """
        found = [entropies(reading.queries, cls.eigenvalues) for reading in readings if len(reading.ids) > 1]
        if not found:
            raise Refusal("There is no text of two tokens, so no query tells anything: give it more text.", "texts")
        votes = sum(torch.stack([wide_half(layer) for layer in each]).long() for each in found)
        return {
            "marks": written(wide_half(layer) for layer in votes),
            "stages": staged(torch.stack(found).mean((0, 2))),
        }

    def asked(self, layer, queries):
        self._queries.setdefault(layer, []).append(queries)

    def wants(self, position, prompt):
        return position >= prompt - self.window

    def attended(self, layer, weights, queries, keys):
        self.lately.add(layer, weights, keys)

    def cuts(self, layers):
        if not self.floor:
            return []
        *begins, end = accumulate(self._sizes())
        if end != layers:
            raise Refusal(
                f"The stages have {end} layers and this model has {layers}: run `fit` for this model.", "stages"
            )
        return begins

    def _sizes(self):
        """Layers of each stage."""
        return [int(size) for size in self.stages.split(".")]

    def onward(self, held):
        late = held.positions >= held.prompt - self.window
        stage = self.cuts(held.layers).index(held.layer + 1) + 1
        chosen = late | heaviest(self._received(held), self._reads(stage, held.prompt) - self.window, ~late)
        self._went_on[held.layer + 1] = int(chosen.sum())
        return chosen

    def _received(self, held):
        """What each token a layer has read received of its last rows, over all heads, [1, slots]."""
        return self.lately.of(held.layer, held.positions).sum(0, keepdim=True)

    def _reads(self, stage, prompt):
        """Tokens of a prompt that a stage reads, counted from 0, the window among them."""
        last = self.stages.count(".")
        if not stage:
            return prompt
        more = max(0, (self.longest or prompt) - self.floor) * (last - stage) // last
        return min(prompt, max(self.window, self.floor + more))

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        if not self._wide:
            self._wide = self._marked(held)
        late = held.positions >= held.next - self.window
        votes = self.lately.of(held.layer, held.positions).masked_fill(late, 0)
        pooled = POOLS[self.pooling](votes, self.kernel, 1, self.kernel // 2)
        return late | heaviest(pooled, self._rooms(held.layer, len(pooled)).to(pooled.device), held.live & ~late)

    def _rooms(self, layer, heads):
        """Tokens before the window that each head of a layer may hold, [heads]."""
        return torch.tensor([(self.high if wide else self.low) - self.window for wide in self._wide[layer]][:heads])

    def _marked(self, held):
        """Which heads of each layer are wide; raises Refusal where the marks were made for another model."""
        if self._queries:
            self._entropies = entropies(
                {layer: torch.cat(told, 2) for layer, told in self._queries.items()}, self.eigenvalues
            )
            self._queries = {}
        else:  # a model without attention
            self._entropies = torch.zeros(held.layers, len(held.read("keys")))
        if not self.marks:
            return [wide_half(layer).tolist() for layer in self._entropies]
        wide = [[digit == "1" for digit in layer] for layer in self.marks.split(".")]
        if [len(layer) for layer in wide] != [self._entropies.shape[1]] * held.layers:
            raise Refusal(
                f"The marks are not for {held.layers} layers with {self._entropies.shape[1]} heads of keys each: run `fit` for this model.",
                "marks",
            )
        return wide

    def explain(self, prompt, layers):
        if self._wide and not self._shown:
            rows, columns = (
                [f"layer {layer}" for layer in range(layers)],
                [f"head {head}" for head in range(len(self._wide[0]))],
            )
            yield Figure(
                "matrix",
                "entropy of the queries",
                {"rows": rows, "columns": columns, "values": self._entropies.tolist()},
            )
            room = [[self.high if wide else self.low for wide in layer] for layer in self._wide]
            yield Figure("matrix", "tokens a head may hold", {"rows": rows, "columns": columns, "values": room})
            self._shown = True
        if self._went_on:
            yield from staircase(prompt, layers, self._went_on)
            self._went_on = {}


def entropies(queries: dict[int, Tensor], count: int) -> Tensor:
    """Truncated matrix entropy of what each head looks for, [layers, kv_heads]; queries [kv_heads, group, n, d] by
    layer.
    """
    return torch.stack([matrix_entropy(queries[layer].flatten(1, 2), count) for layer in sorted(queries)])


def matrix_entropy(rows: Tensor, count: int) -> Tensor:
    """Entropy of the `count` largest eigenvalues of the covariance of rows [heads, n, d], as a share of ln d, [heads].

    0 for rows along one line, count / d for rows that point everywhere alike.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    centred = rows - rows.mean(1, keepdim=True)
    even = centred / centred.norm(dim=-1, keepdim=True).clamp(min=TINY)
    covariance = (even.mT @ even).cpu().double()
    covariance /= covariance.diagonal(dim1=1, dim2=2).sum(-1).clamp(min=TINY)[:, None, None]
    shares = torch.linalg.eigvalsh(covariance).flip(-1)[:, :count].clamp(min=TINY)
    return torch.special.entr(shares).sum(-1) / torch.tensor(float(max(2, rows.shape[2]))).log()


def wide_half(scores: Tensor) -> Tensor:
    """Which half of some heads has the largest scores [heads]; of an odd number the larger half, of equals the first.
    """
    order = scores.argsort(descending=True, stable=True)
    return torch.zeros(len(scores), dtype=torch.long).scatter(0, order[:(len(scores) + 1) // 2].cpu(), 1).bool()


def staged(levels: Tensor) -> str:
    """Layers of each stage, with dots between: one begins where the entropy of a layer [layers] lies more than FALL
    below that of the layer before.
    """
    begins = (levels.diff() < -FALL).nonzero().flatten() + 1
    return ".".join(str(end - begin) for begin, end in pairwise([0, *begins.tolist(), len(levels)]))


def written(layers: Iterable[Tensor]) -> str:
    """Marks of heads as digits, with a dot between layers."""
    return ".".join("".join(str(int(wide)) for wide in layer) for layer in layers)
