"""Makes tests/kvpress_reference.json: scores of NVIDIA's kvpress for random keys and values.

    python tests/support/kvpress_scores.py FOLDER

FOLDER holds a checkout of NVIDIA/kvpress, which is used here only, never by the playground. Keys and values are
computed from their names, so that a test makes the same.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch

try:  # as a script of another environment, or as a module of the tests
    from public_denoisers import _rounded, _weight
except ModuleNotFoundError:
    from support.public_denoisers import _rounded, _weight

OUT = Path(__file__).parents[1] / "kvpress_reference.json"
HEADS, TOKENS, WIDTH = 3, 37, 8
CUR = {"keys": "key", "values": "value", "mean": "kv_avg", "product": "kv_product"}  # theirs, by ours
WINDOWS = (5, 16, 0)  # 0: none


def states(part: str) -> torch.Tensor:
    """Keys or values [heads, tokens, width], of very different lengths."""
    return _weight(part, [HEADS, TOKENS, WIDTH]) * (1 + 20 * _weight(f"{part} lengths", [HEADS, TOKENS, 1]).abs())


def cur(leverage: str, window: int) -> list[list[float]]:
    from kvpress.presses.cur_press import CURPress
    press = CURPress(
        leverage_type=CUR[leverage], use_local_approximation=window > 0, local_window_size=window or 1, num_sinks=4
    )
    scores = press.score(None, None, states("keys")[None], states("values")[None], None, {})[0]
    return _rounded(scores * 1000)  # so that six decimals tell them apart


# --- Compactor ---

GROUP, FIRST, LAST, SKETCH, BLENDING = 2, 8, 4, 6, 0.7
CHUNKS = (5, 256)  # the first leaves a part of a chunk over


def turned(rows: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Rows [..., tokens, width] with the rotary embedding of their positions, or rotated back."""
    cos, sin = angles()
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat([-second, first], -1) * (-sin if back else sin)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.outer(torch.arange(TOKENS).float(), 100.0 ** -(torch.arange(WIDTH // 2) / (WIDTH // 2)))
    return torch.cat([turns, turns], 1).cos(), torch.cat([turns, turns], 1).sin()


def queries() -> torch.Tensor:
    """Before the rotary embedding, [query heads, tokens, width]."""
    return _weight("queries", [HEADS * GROUP, TOKENS, WIDTH])


def projection() -> torch.Tensor:
    """The random numbers [heads, width, sketch], before they are scaled."""
    return _weight("sketch", [HEADS, WIDTH, SKETCH])


def compactor(chunk: int) -> list[list[float]]:
    """The states come in place of those that the library computes from hidden states, here the tokens' numbers."""
    from kvpress.presses import compactor_press, leverage_press, non_causal_attention_press
    cos, sin = angles()
    given = (turned(states("keys"))[None], states("values")[None], None)
    drawn = projection()[None]
    press = compactor_press.CompactorPress(
        sink_size_start=FIRST, sink_size_end=LAST, chunk_size=chunk, sketch_dimension=SKETCH, blending=BLENDING
    )
    keys, asked = states("keys")[None], queries()[None]
    leverage_press.get_prerope_key_states = lambda module, hidden: keys[:, :, hidden[0, :, 0]]
    non_causal_attention_press.get_prerope_query_states = lambda module, hidden: asked[:, :, hidden[0, :, 0]]
    with mock.patch.object(torch, "randn", lambda *size, **kind: drawn):
        scores = press.score(
            None, torch.arange(TOKENS)[None, :, None], *given, {"position_embeddings": (cos[None], sin[None])}
        )
    return _rounded(scores[0])


# --- KVCompose ---

LAYERS, KEPT = 3, 12
COMPOSED = [("layers", 0, True), ("layers", 9, True), ("layers", 5, False), ("heads", 0, True), ("heads", 9, False)]


def attention(layer: int) -> torch.Tensor:
    """Attention [query heads, rows, tokens] of rows of a text after the tokens, more even in later layers."""
    return (_weight(f"attention {layer}", [HEADS * GROUP, 5, TOKENS]) * 200 / 4**layer).softmax(-1)


def kvcompose(compete: str, least: int, agree: bool) -> list[list[list[int]]]:
    """The tokens that each head keeps, KEPT on average."""
    from kvpress.presses.kvcompose_press import KVComposePress
    ratio = 1 - (KEPT + 0.01) / TOKENS  # the library rounds down
    press = KVComposePress(compete == "layers", ratio, keep_token_lower_bound=least, add_mean_across_heads=agree)
    press.num_layers, press.num_att_heads, press.num_kv_heads, press.num_kv_groups = LAYERS, HEADS * GROUP, HEADS, GROUP
    press.device = "cpu"
    press.register_context_ids(torch.arange(TOKENS)[None])
    for layer in range(LAYERS):
        for head, rows in enumerate(attention(layer)):
            press.task_aggregators[layer][head].partial_fit(rows)
    press.prepare_important_masks()
    return [[mask.nonzero().flatten().tolist() for mask in layer] for layer in press.important_mask_per_kv_head]


# --- CaM ---

SPREADS, ROOM = (3, 32), 20  # tokens that share a value; tokens that stay


def received() -> torch.Tensor:
    """Attention that each token received, [heads, tokens]."""
    return (_weight("received", [HEADS, TOKENS]) * 100).exp()


def uniform() -> torch.Tensor:
    """The coins' random numbers, [heads, tokens]."""
    return _weight("coins", [HEADS, TOKENS]) * 997 % 1


def cam(spread: int) -> list:
    """Values of the tokens that stay in each head, which the library ranks alone here."""
    from kvpress.presses.cam_press import CAMPress
    from kvpress.presses.knorm_press import KnormPress
    found = []
    for head in range(HEADS):
        mine, given = slice(head, head + 1), received()[None, head:head + 1]
        press = CAMPress(KnormPress(), target_size=ROOM, merge_budget=spread)
        press.base_press.score = lambda *args, given=given: given
        press.layer_step_counts[0], press._running_attn_sum[0] = TOKENS, given
        gone = sorted(given[0, 0].topk(TOKENS - ROOM, largest=False).indices.tolist())
        drawn = uniform()[head, gone]
        with mock.patch.object(torch, "bernoulli", lambda p, drawn=drawn: (drawn < p).to(p)):
            _, values = press.compress(
                mock.Mock(layer_idx=0), None, states("keys")[None, mine], states("values")[None, mine], given, {}
            )
        found.append(_rounded(values[0, 0]))
    return found


# --- KVzap ---

WINDOW, READ, THRESHOLDS = 6, 20, (-0.5, 0.0, 0.5)  # tokens that always stay; tokens of the prompt


def predicted() -> torch.Tensor:
    """Scores of a map, [heads, tokens]."""
    return _weight("predicted", [HEADS, TOKENS])


def kvzap(threshold: float, decoding: bool) -> list[list[list[int]]]:
    """The tokens that each head has dropped after the prompt and after each later token."""
    from kvpress.presses import dms_press
    press = dms_press.DMSPress(mock.Mock(), threshold * scale(), WINDOW, decoding)
    module, dropped = mock.Mock(layer_idx=0, masked_key_indices=None), []
    for end in range(READ, TOKENS + 1):
        start = 0 if end == READ else end - 1
        press.press.score = lambda *given, new=slice(start, end): predicted()[None, :, new]
        dms_press.extract_keys_and_values = lambda cache, layer, end=end: 2 * (torch.zeros(1, HEADS, end, 1),)
        about = {"cache_position": torch.arange(start, end), "past_key_values": None}
        press.forward_hook(module, [], {**about, "hidden_states": torch.zeros(1, end - start, 1)}, [])
        _, heads, tokens = module.masked_key_indices or 3 * (torch.empty(0),)
        dropped.append([sorted(tokens[heads == head].tolist()) for head in range(HEADS)])
    return dropped


def scale() -> float:
    """The deviation of the scores."""
    return float(predicted().std())


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    found = {"cur": {f"{leverage} {window}": cur(leverage, window) for leverage in CUR for window in WINDOWS}}
    found["compactor"] = {chunk: compactor(chunk) for chunk in CHUNKS}
    found["kvcompose"] = [kvcompose(*knobs) for knobs in COMPOSED]
    found["cam"] = {spread: cam(spread) for spread in SPREADS}
    found["kvzap"] = [kvzap(threshold, decoding) for threshold in THRESHOLDS for decoding in (True, False)]
    OUT.write_text(json.dumps(found) + "\n")
