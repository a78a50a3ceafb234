"""UNComp: KV cache budgets by the matrix entropy of the queries."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import RecentAttention, top_slots
from playground.algorithms.kv_cache.layer_cut_figure import prompt_reading
from playground.algorithms.kv_cache.prompt_compression import POOLS, check_kernel
from playground.contract import CutsPrompt, DecidesByHead, ReadsAttention, ReadsQueries, knob
from playground.errors import Refusal
from playground.events import Figure

if TYPE_CHECKING:
    from playground.algorithms.sampling.token_readings import TokenReading

TINY = 1e-10  # lower bound of eigenvalues
# a new stage begins if the mean entropy of a layer's heads falls by more: 1 in the sum over the 32 heads of the paper
FALL = 1 / 32


class UNComp(CutsPrompt, ReadsAttention, ReadsQueries, DecidesByHead):
    """Give heads with diverse queries twice the budget of the others, and evict one token for every new one.

    Diversity is the entropy of the largest eigenvalues of the queries' covariance, after subtracting their mean and
    normalising each query. In each layer the half of the heads with the highest entropy is wide, the rest narrow. The
    halves are given by `marks` fitted on texts (`python -m playground fit uncomp` prints them, by majority over the
    chunks of the texts), or computed from the prompt. Tokens are kept by the attention of the last `window` tokens,
    pooled along the text as in SnapKV; the selection is repeated after every token among the remaining ones. If high
    and low are equal, the first eviction is that of SnapKV; if they exceed the length of the text, nothing is evicted.

    With a `floor` the prompt is read in stages of a few layers each, so the prefill costs less. A new stage begins if
    the entropy of a layer is much below that of the previous layer; `fit` prints the stages. The first stage reads the
    whole prompt, and each later one fewer tokens in equal steps, down to the floor (1536 in the released code, for
    prompts up to the model's context, which is `longest`). The attention of the last `window` tokens in the previous
    layer, over all heads, selects the tokens that the stage reads; it always reads the window, while the released code
    does not even protect the last token. With a floor of the prompt's length every stage reads all tokens, and with 0
    there are no stages.

    A head is a KV head, and the queries of its whole group count; the released code repeats keys so that every query
    head has a cache. Not implemented: more than two groups of heads. Xiong et al. 2024, arXiv 2410.03090.
    """

    name, title, paper, sheet = "uncomp", "By the entropy of queries (UNComp)", "2410.03090", "kv-cache/uncomp"
    guarantee, sure = ("budget_respected", "collapses"), "medium"

    high: int = knob(
        64, 2, 2048, step=1, help="tokens that stay in a head with diverse queries, the window included"
    )
    low: int = knob(32, 2, 2048, step=1, help="tokens that stay in any other head, the window included")
    window: int = knob(8, 1, 64, step=1, help="most recent tokens, whose attention selects; they always stay")
    kernel: int = knob(
        7, 1, 15, step=2, help="neighbouring tokens whose scores are pooled, an odd number; 1 disables pooling"
    )
    pooling: str = knob("max", choices=("avg", "max"), help="how scores of neighbours are pooled")
    eigenvalues: int = knob(32, 1, 256, step=1, help="largest eigenvalues used; at most the head dimension")
    marks: str = knob(
        "",
        help="1 for a wide head and 0 for a narrow one, layers separated by dots; empty: computed from the prompt",
    )
    stages: str = knob(
        "",
        help="number of layers of each stage, separated by dots, first stage first; used if there is a floor",
    )
    floor: int = knob(
        0, 0, 131072, step=1, help="prompt tokens that the last stage reads; 0: every layer reads all of them"
    )
    longest: int = knob(
        0,
        0,
        131072,
        step=1,
        help="prompt length from which the stages decrease evenly to the floor; 0: the length of the prompt",
    )

    def __post_init__(self):
        self.recent_attention, self._queries, self._entropies = RecentAttention(self.window), {}, None
        self._wide, self._shown = [], False  # wide heads, by layer
        self._continued = {}  # prompt tokens read from a stage on, by its first layer

    def check(self):
        if min(self.high, self.low) <= self.window:
            raise Refusal(
                f"The window takes {self.window} tokens and a head holds {min(self.high, self.low)}: "
                "raise high and low above it.",
                "low",
            )
        check_kernel(self.kernel)
        if set(self.marks) - set("01."):
            raise Refusal("marks are digits 0 and 1 with a dot between layers: run `fit` to print them.", "marks")
        self._check_stages()

    def _check_stages(self):
        if self.stages and not all(size.isdecimal() and int(size) for size in self.stages.split(".")):
            raise Refusal(
                "stages are positive numbers of layers, separated by dots: run `fit` to print them.",
                "stages",
            )
        if self.floor and not self.stages:
            raise Refusal(
                "A floor requires stages, and there are none: run `fit` to print them, or set floor to 0.", "stages"
            )
        if 0 < self.longest < self.floor:
            raise Refusal(
                f"longest is {self.longest}, below the floor of {self.floor}: raise it, or set it to 0.", "longest"
            )

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        low = max(2, round(tokens * 2 / 3))
        return {"high": 2 * tokens - low, "low": low, "window": min(cls.window, low - 1)}

    def expected_share(self, full):
        sizes = self._sizes() if self.floor else [full.layers]
        held = sum(
            size * min(self._reads(stage, full.prompt) + full.generated, budget)
            for stage, size in enumerate(sizes)
            for budget in (self.high, self.low)
        )
        return held / 2 / full.layers / full.length

    def budget(self, generated):
        return max(self.high, self.low)

    @classmethod
    def fit(cls, readings: Iterable[TokenReading]) -> dict[str, str]:
        """Fit `marks`, the heads of each layer most often among the half with the highest entropy, and `stages`.

        Raises Refusal if the texts have no chunk of at least two tokens.
        """
        found = [entropies(reading.queries, cls.eigenvalues) for reading in readings if len(reading.ids) > 1]
        if not found:
            raise Refusal("The texts have fewer than two tokens: give more text.", "texts")
        counts = sum(torch.stack([wide_half(layer) for layer in each]).long() for each in found)
        return {
            "marks": written(wide_half(layer) for layer in counts),
            "stages": staged(torch.stack(found).mean((0, 2))),
        }

    def observe_queries(self, layer, query_states):
        self._queries.setdefault(layer, []).append(query_states)

    def wants_attention(self, position, prompt):
        return position >= prompt - self.window

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.recent_attention.add(layer, weights, key_positions)

    def cut_layers(self, layers):
        if not self.floor:
            return []
        *begins, end = accumulate(self._sizes())
        if end != layers:
            raise Refusal(
                f"The stages have {end} layers and this model has {layers}: run `fit` for this model.", "stages"
            )
        return begins

    def _sizes(self):
        """Number of layers of each stage."""
        return [int(size) for size in self.stages.split(".")]

    def select_prompt(self, held):
        late = held.positions >= held.prompt - self.window
        stage = self.cut_layers(held.layers).index(held.layer + 1) + 1
        selected = late | top_slots(self._received(held), self._reads(stage, held.prompt) - self.window, ~late)
        self._continued[held.layer + 1] = int(selected.sum())
        return selected

    def _received(self, held):
        """Attention of the last tokens of a layer to each token it has read, over all heads, [1, slots]."""
        return self.recent_attention.of(held.layer, held.positions).sum(0, keepdim=True)

    def _reads(self, stage, prompt):
        """Number of prompt tokens, the window included, that a stage reads; stages count from 0."""
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
        scores = self.recent_attention.of(held.layer, held.positions).masked_fill(late, 0)
        pooled = POOLS[self.pooling](scores, self.kernel, 1, self.kernel // 2)
        budgets = self._head_budgets(held.layer, len(pooled)).to(pooled.device)
        return late | top_slots(pooled, budgets, held.live & ~late)

    def _head_budgets(self, layer, heads):
        """Budget of each head before the window, [heads]: those of a layer, once for each text."""
        budgets = torch.tensor([(self.high if wide else self.low) - self.window for wide in self._wide[layer]])
        return budgets.repeat(-(-heads // len(budgets)))[:heads]

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone.recent_attention = self.recent_attention.for_heads(layer, heads)
        return alone

    def rests(self, slots, length, prompt):
        return slots <= min(self.high, self.low)

    def _marked(self, held):
        """Which heads of each layer are wide. Raises Refusal if the marks do not fit the model."""
        if self._queries:
            self._entropies = entropies(
                {layer: torch.cat(states, 2) for layer, states in self._queries.items()}, self.eigenvalues
            )
            self._queries = {}
        else:  # a model without attention
            self._entropies = torch.zeros(held.layers, len(held.read("keys")))
        if not self.marks:
            return [wide_half(layer).tolist() for layer in self._entropies]
        wide = [[digit == "1" for digit in layer] for layer in self.marks.split(".")]
        if [len(layer) for layer in wide] != [self._entropies.shape[1]] * held.layers:
            raise Refusal(
                f"The marks are not for {held.layers} layers with {self._entropies.shape[1]} KV heads each: "
                "run `fit` for this model.",
                "marks",
            )
        return wide

    def explain(self, prompt, layers):
        if self._wide and not self._shown:
            rows = [f"layer {layer}" for layer in range(layers)]
            labels = {"rows": rows, "columns": [f"head {head}" for head in range(len(self._wide[0]))]}
            yield Figure("matrix", "entropy of the queries", {**labels, "values": self._entropies.tolist()})
            budgets = [[self.high if wide else self.low for wide in layer] for layer in self._wide]
            yield Figure("matrix", "budget of each head, tokens", {**labels, "values": budgets})
            self._shown = True
        if self._continued:
            yield from prompt_reading(prompt, layers, self._continued)
            self._continued = {}


def entropies(query_states: dict[int, Tensor], count: int) -> Tensor:
    """Truncated matrix entropy of the queries, [layers, kv_heads]; query states [kv_heads, group, n, d] by layer."""
    return torch.stack([matrix_entropy(query_states[layer].flatten(1, 2), count) for layer in sorted(query_states)])


def matrix_entropy(rows: Tensor, count: int) -> Tensor:
    """Entropy of the `count` largest eigenvalues of the covariance of rows [heads, n, d], as a share of ln d, [heads].

    0 for rows along one line, count / d for isotropic rows.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    centred = rows - rows.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=-1, keepdim=True).clamp(min=TINY)
    covariance = (unit.mT @ unit).cpu().double()
    covariance /= covariance.diagonal(dim1=1, dim2=2).sum(-1).clamp(min=TINY)[:, None, None]
    shares = torch.linalg.eigvalsh(covariance).flip(-1)[:, :count].clamp(min=TINY)
    return torch.special.entr(shares).sum(-1) / torch.tensor(float(max(2, rows.shape[2]))).log()


def wide_half(scores: Tensor) -> Tensor:
    """Mask of the half of the heads with the largest scores [heads]; rounded up, ties go to the first."""
    order = scores.argsort(descending=True, stable=True)
    return torch.zeros(len(scores), dtype=torch.long).scatter(0, order[:(len(scores) + 1) // 2].cpu(), 1).bool()


def staged(levels: Tensor) -> str:
    """Number of layers of each stage, separated by dots, from the mean entropy of each layer [layers].

    A stage begins if the entropy of a layer is more than FALL below that of the layer before.
    """
    begins = (levels.diff() < -FALL).nonzero().flatten() + 1
    return ".".join(str(end - begin) for begin, end in pairwise([0, *begins.tolist(), len(levels)]))


def written(layers: Iterable[Tensor]) -> str:
    """Masks of heads as digits, with a dot between layers."""
    return ".".join("".join(str(int(wide)) for wide in layer) for layer in layers)
