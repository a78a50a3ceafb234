"""Draft heads with random weights over a random network, and their networks computed anew from the library's parts."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch
from pairs import VOCABULARY, greedy_text, network, pair
from tables import write
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from playground.contract import Drafter, find, make
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.laws import AT_ONE

WIDTH, DEPTH, LENGTH = 32, 3, 20
DEEPEST = 5  # levels that these tests draft at most
PROMPT = [54, 71, 71, 54, 9, 71, 71]
Prefixes = set[tuple[int, ...]]


@dataclass
class Proposal:
    """What a drafter proposed after a text, of which the target has not read the last tokens."""

    tokens: list[int]
    unread: int
    budget: int  # deepest level that may be drafted
    prefixes: Prefixes


class Watching(Drafter):
    """Records what another drafter proposes."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.drawn, self.proposals = drafter, drafter.drawn, []

    def __deepcopy__(self, memo):
        return self  # so that the test sees what it records

    def state_layers(self, depth):
        return self.drafter.state_layers(depth)

    def propose(self, lm, budget):
        tokens, unread = list(lm.tokens), lm.target.behind()
        tree = yield from self.drafter.propose(lm, budget)
        prefixes = {tuple(tree.prefix(node)) for node in range(len(tree))}
        self.proposals.append(Proposal(tokens, unread, budget, prefixes))
        return tree

    def observe(self, tree, rows, verdict):
        self.drafter.observe(tree, rows, verdict)


def head(name: str, weights: dict[str, Tensor], cls: type[Drafter] | None = None, **knobs) -> Drafter:
    """A draft head with these weights in float64, of a class derived from its own if one is given."""
    drafter = (cls or find(name))(weights="random", **knobs)
    drafter.network = drafter.build(weights).double().eval().requires_grad_(False)
    return drafter


def random_weights(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of a head, large enough that every input matters."""
    cls, chance = find(name), torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(tensor.shape, generator=chance).double() * 0.5
        if tensor.is_floating_point() and key != "accuracy"
        else tensor
        for key, tensor in cls.untrained(WIDTH, DEPTH).items()
    }


def proposals(drafter: Drafter, sampled: bool = False, length: int = LENGTH) -> list[Proposal]:
    """The proposals of all rounds of one text; those of rounds without a draft are left out."""
    watching = Watching(drafter)
    written(watching, sampled, length)
    return [proposal for proposal in watching.proposals if proposal.prefixes]


def written(drafter: Drafter, sampled: bool = False, length: int = LENGTH) -> list[int]:
    """The text of a speculative lane with this drafter, in float64."""
    decoder = make("speculative", verifier="sample_match")
    decoder.drafter = drafter
    samplers = [make(AT_ONE[0], **AT_ONE[1])] if sampled else []
    models = {"target": pair().target}
    return write(Assembly(decoder, samplers), models, PROMPT, Limits(3, length), Draws(3)).tokens[len(PROMPT):]


class ReadText:
    """The library's states of the tokens that the target has read."""

    start = 0

    def __init__(self, tokens: list[int]):
        self.length, self._states = len(tokens), states(tokens)

    def of(self, layer: int, start: int = 0) -> Tensor:
        return self._states[layer][start:]


def proposed(drafter: Drafter, unread: int) -> Proposal:
    """What a drafter proposes after a text whose last `unread` tokens the target has not read."""
    tokens = [*PROMPT, 108, 245, 146]
    lm = SimpleNamespace(
        tokens=tokens, generated=3, depth=DEPTH, vocabulary=VOCABULARY, lm_head_weight=library().lm_head.weight,
        target=SimpleNamespace(states=ReadText(tokens[:-unread]), behind=lambda: unread), target_model=pair().target,
        embed=embed, read_out=library().lm_head, ends=lambda token: False, piece=str,
    )  # fmt: skip
    steps = drafter.drafted(lm, DEEPEST)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        tree = end.value
    return Proposal(tokens, unread, DEEPEST, {tuple(tree.prefix(node)) for node in range(len(tree))})


def is_greedy(text: list[int]) -> bool:
    """Whether a text of several tokens is the library's greedy one."""
    return len(text) > 5 and text == greedy_text("llama", PROMPT, LENGTH)[:len(text)]


@cache
def library() -> PreTrainedModel:
    """The target's network without our hooks."""
    return network("llama").requires_grad_(False)


def states(tokens: list[int]) -> tuple[Tensor, ...]:
    """The library's hidden states [tokens, width]: the input of each layer, and that of the lm_head."""
    with torch.no_grad():
        found = library()(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return tuple(layer[0] for layer in found.hidden_states)


def embed(tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return library().get_input_embeddings()(torch.tensor(tokens))


def log_probabilities(hidden: Tensor) -> Tensor:
    """Of the target's lm_head."""
    with torch.no_grad():
        return library().lm_head(hidden).log_softmax(-1)


class LibraryAttention:
    """The library's Llama attention with a head's weights, over whole sequences."""

    def __init__(self, weights: dict[str, Tensor], layer: str, reads: int = WIDTH, bias: bool = False):
        heads = weights[f"{layer}self_attn.q_proj.weight"].shape[0] // WIDTH
        config = LlamaConfig(
            hidden_size=reads, num_attention_heads=heads, num_key_value_heads=heads, head_dim=WIDTH,
            intermediate_size=3 * WIDTH, rms_norm_eps=1e-5, attn_implementation="eager", attention_bias=bias,
        )
        self.attention, self.rotary = LlamaAttention(config, 0).double(), LlamaRotaryEmbedding(config)
        self.attention.o_proj = torch.nn.Linear(heads * WIDTH, WIDTH, bias=False).double()
        self.attention.load_state_dict(part(weights, f"{layer}self_attn."))

    @torch.no_grad()
    def __call__(self, rows: Tensor, seen: Tensor | None = None) -> Tensor:
        """`seen`, bool [rows, rows], says which rows each attends to, instead of those before it."""
        count = len(rows)
        places = self.rotary(rows[None], torch.arange(count)[None])
        seen = torch.ones(count, count, dtype=torch.bool).tril() if seen is None else seen
        mask = torch.zeros(count, count, dtype=rows.dtype).masked_fill(~seen, float("-inf"))[None, None]
        return self.attention(rows[None], places, mask)[0][0]


def norm(weights: dict[str, Tensor], name: str) -> LlamaRMSNorm:
    module = LlamaRMSNorm(WIDTH, 1e-5).double()
    module.load_state_dict(part(weights, f"{name}."))
    return module.requires_grad_(False)


def feed_forward(weights: dict[str, Tensor], layer: str) -> LlamaMLP:
    module = LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=3 * WIDTH)).double()
    module.load_state_dict(part(weights, f"{layer}mlp."))
    return module.requires_grad_(False)


def decoder_layer(weights: dict[str, Tensor], layer: str) -> Callable[[Tensor], Tensor]:
    """A Llama layer over whole sequences, made of the library's modules."""
    attention, mlp = LibraryAttention(weights, layer), feed_forward(weights, layer)
    before, after = (norm(weights, f"{layer}{name}") for name in ("input_layernorm", "post_attention_layernorm"))

    def run(rows: Tensor) -> Tensor:
        rows = rows + attention(before(rows))
        return rows + mlp(after(rows))

    return run


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor.double() for name, tensor in weights.items() if name.startswith(prefix)}


def chosen(rows: Tensor, count: int) -> list[tuple[float, int]]:
    """The `count` best tokens of a row [V] with their log-probabilities, the best first."""
    values, ids = rows.sort(descending=True)
    return list(zip(values[:count].tolist(), ids[:count].tolist()))


def most_probable_tree(row, depth: int, width: int, nodes: int) -> Prefixes:
    """The tree of EAGLE-2, by brute force: `row(path)` gives log-probabilities [V] after a path."""
    level, scores = [()], {}
    for _ in range(depth):
        grown = []
        for path in level:
            for logp, token in chosen(row(path), width):
                scores[(*path, token)] = scores.get(path, 0.0) + logp
                grown.append((*path, token))
        level = sorted(grown, key=lambda path: -scores[path])[:width]
    return set(sorted(scores, key=lambda path: (-scores[path], len(path)))[:nodes])


def differing(drafter: Drafter, expected, sampled: bool = False) -> Iterator[Proposal]:
    """The proposals that are not those expected after the same text; fails if there were no proposals.

    The last rounds, which may not draft as deep as they would, are left out.
    """
    found = [proposal for proposal in proposals(drafter, sampled) if proposal.budget >= DEEPEST]
    assert len(found) > 5, "too few rounds to prove anything"
    return (proposal for proposal in found if proposal.prefixes != expected(proposal))
