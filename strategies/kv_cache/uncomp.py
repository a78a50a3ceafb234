"""Heads whose queries look for many different things keep a long cache, the others a short one."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.errors import Refusal
from playground.events import Figure
from playground.parts.snapshot import POOLS, check_kernel
from playground.parts.votes import Lately, heaviest
from playground.strategy import CachePolicy, knob

if TYPE_CHECKING:
    from playground.parts.reading import Reading

TINY = 1e-10  # the smallest eigenvalue that counts


class UNComp(CachePolicy):
    """Keep twice as many tokens in the heads whose queries are various as in the others, and let every new token push one out.

    How various they are is the entropy of the largest eigenvalues of their covariance, with the mean taken away and every query
    made as long as the others. In each layer the half of the heads that has the most of it is wide, the rest narrow. Which half
    that is has been marked by texts read before (`python -m playground fit uncomp` prints the `marks`, each stretch of a text
    having a vote), or is marked by the prompt itself. Tokens stay by the attention of the last `window` rows, smoothed along the
    text as in SnapKV, and that is asked anew after every token, of those that are left. With high and low alike the first cut is
    SnapKV's; with room for the whole text nothing is evicted.

    A head is one of keys and values, to which the queries of its whole group count; the released code repeats keys so that every
    head of queries has a cache. Left out: layers are not put into stages, of which the later ones would read fewer tokens of the
    prompt, so reading it costs what it costs; and heads come in two groups, not in four or more. Xiong et al. 2024,
    arXiv 2410.03090.
    """

    name, title, paper, sheet = "uncomp", "By the entropy of queries (UNComp)", "2410.03090", "kv-cache/uncomp"
    guarantee, sure = ("budget_respected", "collapses"), "medium"
    row_wise, watches, asks = False, True, True

    high: int = knob(64, 2, 2048, step=1, help="tokens that stay in a head whose queries are various, the window included")
    low: int = knob(32, 2, 2048, step=1, help="tokens that stay in any other, the window included")
    window: int = knob(8, 1, 64, step=1, help="most recent rows, which vote and stay")
    kernel: int = knob(7, 1, 15, step=2, help="neighbouring tokens whose votes are pooled, an odd number; 1 pools nothing")
    pooling: str = knob("max", choices=("avg", "max"), help="how votes of neighbours are pooled")
    eigenvalues: int = knob(32, 1, 256, step=1, help="largest eigenvalues that count; no more than a query has numbers")
    marks: str = knob("", help="1 for a head that is wide and 0 for one that is narrow, layer by layer with dots between; empty: the prompt tells")

    def __post_init__(self):
        self.lately, self._queries, self._entropies = Lately(self.window), {}, None
        self._wide, self._shown = [], False  # wide heads, by layer

    def check(self):
        if min(self.high, self.low) <= self.window:
            raise Refusal(f"The window alone takes {self.window} tokens, and a head is to hold {min(self.high, self.low)}: raise high and low above it.", "low")
        check_kernel(self.kernel)
        if set(self.marks) - set("01."):
            raise Refusal("marks are digits 0 and 1 with a dot between layers: let `fit` print them.", "marks")

    @classmethod
    def holding(cls, tokens, prompt):
        low = max(2, round(tokens * 2 / 3))
        return {"high": 2 * tokens - low, "low": low, "window": min(cls.window, low - 1)}

    def promise(self, full):
        return (min(full.length, self.high) + min(full.length, self.low)) / 2 / full.length

    def budget(self, generated):
        return max(self.high, self.low)

    @classmethod
    def fit(cls, readings: Iterable[Reading]) -> dict[str, str]:
        """The half of the heads of each layer that was most often among the most various; every stretch of a text votes once."""
        votes = [torch.stack([wide_half(found) for found in entropies(reading.queries, cls.eigenvalues)]) for reading in readings if len(reading.ids) > 1]
        if not votes:
            raise Refusal("There is no text of two tokens, so no query tells anything: give it more text.", "texts")
        return {"marks": written(wide_half(layer) for layer in torch.stack(votes).sum(0))}

    def asked(self, layer, queries):
        self._queries.setdefault(layer, []).append(queries)

    def wants(self, position, prompt):
        return position >= prompt - self.window

    def attended(self, layer, weights, queries, keys):
        self.lately.add(layer, weights, keys)

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
            self._entropies = entropies({layer: torch.cat(told, 2) for layer, told in self._queries.items()}, self.eigenvalues)
            self._queries = {}
        else:  # a model without attention
            self._entropies = torch.zeros(held.layers, len(held.read("keys")))
        if not self.marks:
            return [wide_half(layer).tolist() for layer in self._entropies]
        wide = [[digit == "1" for digit in layer] for layer in self.marks.split(".")]
        if [len(layer) for layer in wide] != [self._entropies.shape[1]] * held.layers:
            raise Refusal(f"The marks are not for {held.layers} layers with {self._entropies.shape[1]} heads of keys each: run `fit` for this model.", "marks")
        return wide

    def explain(self, prompt, layers):
        if self._wide and not self._shown:
            rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(len(self._wide[0]))]
            yield Figure("matrix", "entropy of the queries", {"rows": rows, "columns": columns, "values": self._entropies.tolist()})
            room = [[self.high if wide else self.low for wide in layer] for layer in self._wide]
            yield Figure("matrix", "tokens a head may hold", {"rows": rows, "columns": columns, "values": room})
            self._shown = True


def entropies(queries: dict[int, Tensor], count: int) -> Tensor:
    """Truncated matrix entropy of what each head looks for, [layers, kv_heads]; queries [kv_heads, group, n, d] by layer."""
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
    """Which half of some heads has the largest scores [heads]; of an odd number the larger half, of equals the first."""
    order = scores.argsort(descending=True, stable=True)
    return torch.zeros(len(scores), dtype=torch.long).scatter(0, order[:(len(scores) + 1) // 2].cpu(), 1).bool()


def written(layers: Iterable[Tensor]) -> str:
    """Marks of heads as digits, with a dot between layers."""
    return ".".join("".join(str(int(wide)) for wide in layer) for layer in layers)
