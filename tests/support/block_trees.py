"""Trees from a block drafter, computed anew: its marginals without a cache, and the paths through them."""
from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from playground.contract import Drafter
from support.draft_heads import Prefixes, Proposal, embed, head, library, proposals, random_weights, states

BLOCK = 8
LAYERS = (2, 3)  # of a target with three layers
Marginal = list[tuple[float, int]]
"""Log-probabilities and tokens of one depth, the best first."""


def marginals(proposal: Proposal, weights: dict[str, Tensor], depth: int, causal: bool = False) -> list[Marginal]:
    """Of each depth after a text, from one forward over its states and a block of masks. With `causal` each row is the
    last of a shorter block, which is the same for a network of one layer.
    """
    network = head("dflash", weights).network
    read = states(proposal.tokens[:-proposal.unread])
    found = []
    for row in range(proposal.unread, proposal.unread + depth):
        caches, count = network.new_caches(), len(proposal.tokens) - proposal.unread
        network.read(torch.cat([read[layer] for layer in LAYERS], -1), torch.arange(count), caches)
        size = row + 1 if causal else BLOCK
        rows = embed([*proposal.tokens[-proposal.unread:], *[0] * size][:size])
        output = network(rows, torch.arange(count, count + size), caches, 0)[row]
        values, ids = library().lm_head(output).log_softmax(-1).sort(descending=True)
        found.append(list(zip(values.tolist(), ids.tolist())))
    return found


def most_probable_prefixes(found: list[Marginal], nodes: int) -> Prefixes:
    """By brute force: all prefixes of the first `nodes` tokens of each depth, sorted by their product."""
    scores = {}
    for length in range(1, len(found) + 1):
        for path in product(*(marginal[:nodes] for marginal in found[:length])):
            scores[tuple(token for _, token in path)] = math.fsum(logp for logp, _ in path)
    return set(sorted(scores, key=lambda path: (-scores[path], len(path)))[:nodes])


def fans(found: list[Marginal], nodes: int, width: int) -> Prefixes:
    """Of all paths that are not as deep as the block, the most probable one without children gets its best ones, until
    there are `nodes`.
    """
    scores, waiting, made = {(): 0.0}, {()}, []
    while waiting and len(made) < nodes:
        path = max(waiting, key=scores.get)
        waiting.remove(path)
        for logp, token in found[len(path)][:width] if len(path) < len(found) else []:
            scores[(*path, token)] = scores[path] + logp
            waiting.add((*path, token))
            made.append((*path, token))
    return set(made[:nodes])


def differing(drafter: Drafter, expected, depth: int, causal: bool = False) -> Iterator[Proposal]:
    """The proposals that are not those `expected` of the marginals after the same text; fails if there were none."""
    weights = random_weights("dflash")
    found = [proposal for proposal in proposals(drafter) if proposal.budget >= depth]
    assert len(found) > 3, "too few rounds to prove anything"
    with torch.no_grad():
        return [each for each in found if each.prefixes != expected(marginals(each, weights, depth, causal))]
