"""FFN-SkipLLM: feed-forward networks are skipped where the hidden state is saturated."""
from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch
from registry import Collapse
from runs import figures, run

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.engine.model import Model
from support.compute_runs import PROMPT, deep, deep_network, policy_lane

NEVER, ALWAYS = 1.01, -1.0
BRIEF = {"ffn_skip": {"warm_up": 1}}
COLLAPSES = {
    "ffn_skip": [
        Collapse(policy_lane("ffn_skip", threshold=NEVER), LaneConfig("greedy")),
        Collapse(policy_lane("ffn_skip", threshold=ALWAYS, first=16), LaneConfig("greedy")),
        Collapse(policy_lane("ffn_skip", threshold=ALWAYS, warm_up=32), LaneConfig("greedy")),
    ],
}
COSINES = "cosine of the state before and after each FFN"
FFN_SKIP = find("ffn_skip")


class ForgetsTheResidual(FFN_SKIP):
    """Takes the cosine of what an FFN reads and what it adds, without the residual."""

    def choices(self, positions, prompt):
        made = super().choices(positions, prompt)
        observe = made.observe
        made.observe = lambda layer, before, after: observe(layer, before, after - before)
        return made


class RemembersAcrossTokens(FFN_SKIP):
    """Goes on skipping in the next token where the last one ended."""

    _last = None

    def choices(self, positions, prompt):
        made = super().choices(positions, prompt)
        if self._last and len(positions) == 1:
            made._skipping = self._last._skipping[-1:]
        self._last = made
        return made


def by_hand(network, tokens: list[int], prompt: int, policy) -> torch.Tensor:
    """Logits [n, V] by the sheet's loop, token by token, over the library's own modules and a cache kept by hand."""
    inner, config = network.model, network.config
    keys, values = ([[] for _ in inner.layers] for _ in range(2))
    return torch.cat([
        _token(network, config, token, position, keys, values, policy, position >= prompt + policy.warm_up)
        for position, token in enumerate(tokens)
    ])


def _token(network, config, token, position, keys, values, policy, may_skip) -> torch.Tensor:
    x, skipping, run_length = network.model.embed_tokens(torch.tensor([token])), False, 0
    for number, layer in enumerate(network.model.layers):
        a = x + _attention(network, config, layer, x, position, keys[number], values[number])
        cold = number < policy.first or number >= config.num_hidden_layers - policy.last
        if cold or not skipping:
            y = a + layer.mlp(layer.post_attention_layernorm(a))
            if not cold:
                cosine = float((a * y).sum() / (a.norm() * y.norm()))
                skipping = may_skip and cosine >= policy.threshold
        else:
            y, run_length = a, run_length + 1
            if run_length == policy.run:
                skipping, run_length = False, 0
        x = y
    return network.lm_head(network.model.norm(x))


def _attention(network, config, layer, x, position, keys, values) -> torch.Tensor:
    attention, d = layer.self_attn, config.head_dim
    h = layer.input_layernorm(x)
    q, k, v = (getattr(attention, name)(h).view(-1, d) for name in ("q_proj", "k_proj", "v_proj"))
    cos, sin = (t[0, 0] for t in network.model.rotary_emb(h[None], torch.tensor([[position]])))
    turn = lambda rows: rows * cos + torch.cat([-rows[:, d // 2:], rows[:, :d // 2]], 1) * sin  # noqa: E731
    keys.append(turn(k))
    values.append(v)
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = (torch.stack(rows, 1).repeat_interleave(group, 0) for rows in (keys, values))
    weights = ((turn(q)[:, None] @ k.transpose(1, 2)) / math.sqrt(d)).softmax(-1)
    return attention.o_proj((weights @ v).reshape(1, -1))


def lane_rows(policy, length: int = 12) -> tuple[list[int], torch.Tensor]:
    """Tokens and the logits each was chosen from."""
    lane, _ = run(Assembly(make("greedy"), compute_policy=policy), {"target": deep()}, PROMPT, length)
    return lane.tokens, torch.tensor(lane.main.logprobs, dtype=torch.float64)


SETTINGS = dict(threshold=0.8, first=1, last=1, warm_up=2, run=1)


def agrees(policy) -> bool:
    """Whether a lane writes the text of the loop over the library's modules, with its log-probabilities."""
    tokens, logprobs = lane_rows(policy)
    with torch.inference_mode():
        rows = by_hand(deep_network(), tokens[:-1], len(PROMPT), policy)[len(PROMPT) - 1:].log_softmax(-1)
    written = torch.tensor(tokens[len(PROMPT):])
    expected = rows.gather(1, written[:, None])[:, 0]
    return rows.argmax(-1).equal(written) and bool((expected - logprobs).abs().max() < 1e-5)


@pytest.mark.oracle("ffn_skip")
@pytest.mark.parametrize("more", [{}, {"run": 0}, {"run": 2, "threshold": 0.5}, {"threshold": ALWAYS, "run": 0}],
                         ids=str)
def test_the_text_is_that_of_the_sheets_loop_over_the_librarys_modules(more):
    assert agrees(FFN_SKIP(**(SETTINGS | more)))


@pytest.mark.refuses("ffn_skip")
@pytest.mark.parametrize("cls", [ForgetsTheResidual, RemembersAcrossTokens])
def test_the_loop_refuses_a_cosine_without_the_residual_and_skipping_that_outlives_its_token(cls):
    assert not agrees(cls(**SETTINGS))


def ran(length: int = 8, **knobs) -> list[list[bool]]:
    """Whether the FFN of each layer ran, by token."""
    _, events = run(policy_lane("ffn_skip", **knobs), {"target": deep()}, PROMPT, length)
    values = figures(events, "share of each layer that ran for the newest tokens")[-1]["values"]
    return [[share == 1.0 for share in column] for column in zip(*values)]


def test_a_threshold_of_minus_one_runs_one_ffn_of_the_middle_or_every_other_one():
    one = ran(threshold=ALWAYS, first=1, last=1, warm_up=0, run=0)
    assert one[0] == [True] * 6, "the first token is chosen from the prompt, which runs whole"
    assert one[1:] == [[True, True, False, False, False, True]] * 7
    alternate = ran(threshold=ALWAYS, first=0, last=0, warm_up=0, run=1)
    assert alternate[1:] == [[True, False] * 3] * 7


def test_the_share_of_skipped_ffns_is_bounded_by_the_cold_layers():
    for first, last in [(0, 0), (2, 1), (3, 3)]:
        most = max(0, 6 - first - last - 1)
        found = ran(threshold=ALWAYS, first=first, last=last, warm_up=0, run=0)
        assert {column.count(False) for column in found[1:]} == {most}


@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_warm_up_tokens_run_every_ffn_and_the_next_one_does_not(warm_up):
    whole = [all(column) for column in ran(threshold=ALWAYS, first=1, last=1, warm_up=warm_up, run=0)]
    lengths = [(key, len(list(group))) for key, group in groupby(whole)]
    assert lengths[0] == (True, warm_up + 1) and len(lengths) == 2


def test_an_ffn_that_adds_nothing_has_cosine_one_and_can_be_skipped_for_free():
    network = deep_network()
    for layer in (2, 3):
        network.model.layers[layer].mlp.down_proj.weight.data.zero_()
    model = Model(network, deep().tokenizer, "llama")
    skipping, events = run(policy_lane("ffn_skip", threshold=0.999999, first=2, last=2, warm_up=0, run=0),
                           {"target": model}, PROMPT, 8)
    plain, _ = run(LaneConfig("greedy"), {"target": model}, PROMPT, 8)
    assert skipping.tokens == plain.tokens
    shown = figures(events, COSINES)[-1]
    assert dict(zip(shown["labels"], shown["values"])) == {"layer 2": 1.0}, "layer 3 is skipped, and not measured"
