"""Routing of experts against the library's router logits in plain loops, and identities of the figures."""
from __future__ import annotations

import math

import pytest
import torch
from pairs import network, pair

from playground.contract import RoutedRows, find
from support.overlay_runs import named, read_by, shades

MoERouting = find("moe_routing")
TOKENS = [70, 71, 72, 70, 71, 90, 70, 71, 72, 91, 70, 33, 40, 41]
START = 5


def library_logits(tokens: list[int]) -> list[list[list[float]]]:
    """[routers][tokens][experts], by the transformers library."""
    model = network("mixtral")
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens]), output_router_logits=True, use_cache=False).router_logits
    return [layer.tolist() for layer in found]


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(logit - max(row)) for logit in row]
    return [weight / sum(weights) for weight in weights]


def by_hand(channel: str, row: list[float], used: int) -> float:
    p = sorted(softmax(row), reverse=True)
    if channel == "gate":
        return p[0] / sum(p[:used])
    if channel == "entropy":
        return -sum(q * math.log(q) for q in p) / math.log(len(p))
    return p[used - 1] - p[used]


def check(cls: type[MoERouting]) -> None:
    model, logits = pair("mixtral").target, library_logits(TOKENS)
    used = model.network.config.num_experts_per_tok
    for layer, rows in enumerate(logits):
        for channel in ("gate", "entropy", "margin"):
            events = read_by(cls(channel=channel, layer=layer), model, TOKENS, START)
            assert shades(events) == pytest.approx([by_hand(channel, row, used) for row in rows[START:]], abs=1e-4)
        best = [sorted(range(len(row)), key=row.__getitem__)[-used:] for row in rows]
        loads = [sum(expert in own for own in best) / len(rows) for expert in range(len(rows[0]))]
        assert named(events, "load")["values"][layer] == pytest.approx(loads, abs=1e-4)
        assert sum(named(events, "load")["values"][layer]) == pytest.approx(used, abs=1e-3)
        tops = [float(max(range(len(row)), key=row.__getitem__)) for row in rows[START:]]
        assert named(events, "first expert")["values"][layer] == tops


class OfTheTokenBefore(MoERouting):
    """Wrong: painted on the token that the row predicts, although the router saw the one that it read."""

    def read_experts(self, number, first, rows):
        super().read_experts(number, first, RoutedRows(*(part.roll(1, 0) for part in rows)))


class OverTheSoftmaxOfTheChosen(MoERouting):
    """Wrong: entropy and margin over the chosen experts alone, as if no other had been possible."""

    def measure(self, rows):
        return super().measure(RoutedRows(rows.logits.gather(1, rows.chosen), rows.gates, rows.chosen[:, :1] * 0))


@pytest.mark.oracle("moe_routing")
def test_channels_loads_and_experts_are_those_of_the_librarys_router_logits():
    check(MoERouting)


@pytest.mark.refuses("moe_routing")
@pytest.mark.parametrize("wrong", [OfTheTokenBefore, OverTheSoftmaxOfTheChosen])
def test_another_row_or_another_softmax_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.strategy("moe_routing")
@torch.inference_mode()
def test_the_gates_are_those_the_block_was_computed_with():
    """Their sum over the experts' own outputs is the output of the block."""
    model, seen = pair("mixtral").target, {}
    block = next(module for module in model.network.modules() if hasattr(module, "experts") and hasattr(module, "gate"))
    handle = block.register_forward_hook(lambda module, given, out: seen.update(given=given[0], out=out))
    overlay = MoERouting()
    try:
        read_by(overlay, model, TOKENS, START)
    finally:
        handle.remove()
    hidden, rows = seen["given"].flatten(0, 1), overlay._routed[0][0]
    mixed = torch.zeros_like(hidden)
    for token in range(len(TOKENS)):
        for gate, expert in zip(rows.gates[token], rows.chosen[token].tolist()):
            gates, up = (block.experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            mixed[token] += gate * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gates) * up))
    out = seen["out"][0] if isinstance(seen["out"], tuple) else seen["out"]
    assert (out.flatten(0, 1) - mixed).abs().max() < 1e-6


def rows_of(logits: torch.Tensor, used: int) -> RoutedRows:
    gates, chosen = logits.softmax(1).topk(used, 1)
    return RoutedRows(logits, gates, chosen)


@pytest.mark.strategy("moe_routing")
def test_identities_of_loads_pairs_balance_and_lifts():
    from strategies.overlays import moe_routing as routing
    rows = rows_of(torch.randn(60, 5, generator=torch.Generator().manual_seed(1)).double(), 2)
    both = routing.together(rows)
    assert both.equal(both.T) and both.diagonal().tolist() == pytest.approx(routing.load(rows).tolist())
    members = torch.rand(3, 60, generator=torch.Generator().manual_seed(2)).argmax(0) == torch.arange(3)[:, None]
    shares = members.double().mean(1)
    assert (shares @ routing.lifts(rows, members)).tolist() == pytest.approx([1.0] * 5)
    everything = rows_of(torch.randn(9, 4).double(), 4)
    assert routing.load(everything).tolist() == [1.0] * 4 and routing.switch_rate(everything) == 0
    assert routing.balance(rows_of(torch.zeros(9, 4).double(), 4)) == pytest.approx(1)
    assert MoERouting(channel="entropy").measure(rows_of(torch.zeros(3, 4), 2)).tolist() == pytest.approx([1.0] * 3)
    assert MoERouting(channel="margin").measure(rows_of(torch.zeros(3, 4), 2)).tolist() == [0.0] * 3
