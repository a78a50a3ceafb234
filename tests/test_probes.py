"""Probes: rows that a forward reads with a draft tree, which nothing else sees and which are never kept."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from tables import write

from playground.contract import Drafter, make
from playground.contract.assembly import Assembly
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.draft_heads import PROMPT, WIDTH, embed, library

NODES = ((7, ROOT), (9, ROOT), (11, 0), (13, 0))
PROBES = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Fixed(Drafter):
    """Proposes the same tree in every round, with or without probes, and records the rows."""

    def __init__(self, probes: dict[int, torch.Tensor]):
        self.probes, self.seen = probes, []

    def __deepcopy__(self, memo):
        return self

    def propose(self, lm, budget):
        yield from ()
        tree = TokenTree("fixed")
        for token, parent in NODES if budget > 2 and lm.target.behind() else ():
            tree.add(token, parent)
        tree.probes = self.probes if len(tree) else {}
        return tree

    def observe(self, tree, rows, verdict):
        if len(tree):
            self.seen.append((list(rows.committed), rows.raw, rows.probes))


def lane(drafter: Drafter, policy: list | None = None):
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = drafter
    assembly = Assembly(decoder)
    if policy:
        assembly.cache_policy = make(policy[0], **policy[1])
    return write(assembly, {"target": pair().target}, PROMPT, Limits(0, 12), Draws(0))


def test_probes_change_neither_the_other_rows_nor_the_cache():
    with_probes, without = Fixed({ROOT: PROBES, 2: PROBES[:1]}), Fixed({})
    ends = [lane(drafter).target.store for drafter in (with_probes, without)]
    assert len(with_probes.seen) > 5
    for (text, raw, probes), (other, expected, none) in zip(with_probes.seen, without.seen, strict=True):
        assert text == other and none is None and probes.shape[0] == 4
        assert (raw - expected).abs().max() < 1e-9
    for ours, theirs in zip((*ends[0].keys, *ends[0].values), (*ends[1].keys, *ends[1].values)):
        assert (ours.read(ends[0].length) - theirs.read(ends[1].length)).abs().max() < 1e-9


def test_a_probe_reads_the_path_to_its_node_and_the_probes_before_it():
    drafter = Fixed({2: PROBES, ROOT: PROBES[:2]})
    lane(drafter)
    for text, _, probes in drafter.seen:
        for rows, path in ((probes[:3], [7, 11]), (probes[3:], [])):
            given = torch.cat([embed([*text, *path]), PROBES[:len(rows)]])[None]
            with torch.no_grad():
                logits = library()(inputs_embeds=given, use_cache=False).logits[0, -len(rows):]
            assert (rows - logits).abs().max() < 1e-6


@pytest.mark.parametrize("policy", [["h2o", {"heavy": 8, "recent": 4}], ["sink_window", {"window": 8}]])
def test_cache_policies_never_count_a_probe(policy):
    texts = [lane(Fixed(probes), policy).tokens for probes in ({ROOT: PROBES, 2: PROBES[:1]}, {})]
    assert texts[0] == texts[1]
