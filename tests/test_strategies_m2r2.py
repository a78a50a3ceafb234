"""M2R2: the accelerated residual computed anew from the library's hidden states, for every draft token."""
from __future__ import annotations

import pytest
import torch
from drafting_runs import recorded
from pairs import pair
from torch.nn.functional import silu

from playground.contract import find
from playground.events import Draft
from strategies.adaptive_compute.m2r2 import AcceleratedResidual, gate_of
from support.draft_heads import WIDTH, differing, head, log_probabilities, norm, part, random_weights, states
from support.laws import AT_ONE, EXACT, off, tables
from support.small_head_texts import SmallTexts, trained
from support.speculation import collapses, speculative_lane

NAME, LENGTH, TAU = "m2r2", 4, 0.03
BRIEF = {"m2r2": {"weights": "random", "depth": 2}}
COLLAPSES = {"m2r2": collapses("m2r2", weights="random", depth=0)}
GATE = 2  # of three layers


def row(tokens: list[int]):
    """Log-probabilities [V] at the gate after a text: p gets every step of h and that of its adapter."""
    weights, read = random_weights(NAME), [layer[-1] for layer in states(tokens)]
    p = read[0]
    for layer in range(GATE):
        c, b = (part(weights, f"acc.{layer}.{name}.")["weight"] for name in "cb")
        size = (p.square().mean() + 1e-5).sqrt()
        p = p + read[layer + 1] - read[layer] + b @ silu(c @ (p / size))
    return log_probabilities(norm(weights, "norm")(p))


def expected(proposal):
    path: list[int] = []
    for _ in range(LENGTH):
        logp = row([*proposal.tokens, *path])
        path.append(int(logp.argmax()))
        if logp.max().exp() < TAU:
            break
    return {tuple(path[:length]) for length in range(1, len(path) + 1)}


KNOBS = {"depth": LENGTH, "tau": TAU}


@pytest.mark.oracle("m2r2")
def test_the_chain_is_that_of_the_accelerated_residual():
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected)) == []


class LayersOffByOne(AcceleratedResidual):
    """Wrong: each adapter is applied after its layer, not beside it."""

    def path(self, slow):
        fast = [slow[0]]
        for adapter, before, after in zip(self.acc, slow, slow[1:]):
            step = fast[-1] + (after - before)
            fast.append(step + adapter(step))
        return fast


class StartsAtTheGate(AcceleratedResidual):
    """Wrong: all adapters act on the residual at the gate."""

    def path(self, slow):
        fast = [slow[-1]]
        for adapter in self.acc:
            fast.append(fast[-1] + adapter(fast[-1]))
        return fast


class WithoutTheNorm(AcceleratedResidual):
    """Wrong: the lm_head reads the residual without the final norm."""

    def forward(self, slow):
        return self.path(slow)[-1]


@pytest.mark.refuses("m2r2")
@pytest.mark.parametrize("wrong", [LayersOffByOne, StartsAtTheGate, WithoutTheNorm])
def test_adapters_at_other_layers_and_a_missing_norm_are_detected(wrong):
    drafter = head(NAME, random_weights(NAME), **KNOBS)
    drafter.network.__class__ = wrong
    assert list(differing(drafter, expected))


class DropsTheUncertain(find(NAME)):
    """Wrong: the token at which drafting stops is not proposed, unless it is the first."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        return tree.only(list(range(max(1, len(tree) - 1))))


@pytest.mark.refuses("m2r2")
def test_dropping_the_token_that_ends_the_draft_is_detected():
    assert list(differing(head(NAME, random_weights(NAME), DropsTheUncertain, **KNOBS), expected))


@pytest.mark.slow
@pytest.mark.strategy("m2r2")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2, tau=0.4)
    assert off(lane, tables("ab"), [0, 1, 0], 4) < EXACT


def test_adapters_of_zero_draft_as_the_first_layers_do():
    assert gate_of(3) == GATE and gate_of(8) == 4
    network = AcceleratedResidual(GATE, WIDTH, 4)
    slow = [torch.randn(5, WIDTH) for _ in range(GATE + 1)]
    assert torch.allclose(network.path(slow)[-1], slow[-1], atol=1e-6)


def test_the_residual_itself_is_never_changed():
    session, events = recorded(speculative_lane(NAME, "greedy_match", weights="random"), models=pair())
    reference, _ = recorded(speculative_lane("prompt_lookup", "greedy_match"), models=pair())
    assert session._runners[0].lane.tokens == reference._runners[0].lane.tokens
    assert [event for event in events if isinstance(event, Draft)]


def test_training_moves_the_residual_towards_its_end_and_reports_the_probe_beside_it():
    texts = SmallTexts(length=6, epoch=12)
    weights, events = trained(NAME, texts)
    network, gate = AcceleratedResidual.of(weights), gate_of(texts.depth)
    wanted = texts.lm_head[texts.follows[texts.batch.ids]] @ texts.lm_head.T
    with torch.no_grad():
        slow = [texts.batch.states[layer] for layer in range(gate + 1)]
        right, untouched = (
            ((states @ texts.lm_head.T).argmax(-1) == wanted.argmax(-1)).float().mean()
            for states in (network(slow), network.norm(slow[-1]))
        )
    assert right > untouched + 0.2
    assert "with the accelerated residual" in events[-1].text and "probe of the same size" in events[-1].text
    assert torch.equal(weights["norm.weight"], texts.first_layers(0).norm), "the final norm stays the target's"
