"""How far back each layer of a library model sees, learned from the masks that the library itself builds.

Some architectures tell their attention function of a window, others have it in their mask only. The library makes a
mask from a rule, a function of query and key position. A short forward collects the rule of every layer. Each rule is
then compared with the reaches that the config names, at positions around every boundary: no long text is needed.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from playground.engine.attention.attention_mask import Chunks, Reach
from playground.errors import Refusal

COLLECTING = "playground-collects"  # name of the attention and mask functions that collect rules
SIZE_NAMES = ("window", "chunk", "local_attention")  # parts of the names that configs give to windows and chunks
MOST_POSITIONS = 2**22  # a rule is not followed beyond this position
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""rule(batch, head, query position, key position) -> visible, all broadcast"""


def layer_reaches(network: PreTrainedModel) -> dict[int, Reach]:
    """The reach of every layer whose mask follows a rule of the library.

    Raises Refusal if a layer has a mask of another kind, or if there are windows and no rule that says how they act.
    """
    sizes, rules = sorted(set(window_sizes(network.config))), _rules(network)
    if sizes and not all(rules.values()):
        raise Refusal(f"{network.config.model_type} models make their windows in a way the playground cannot read: "
                      "choose another model.", "model")
    candidates = [None, *sizes, *map(Chunks, sizes)]
    found = {id(rule): _reach(rule, candidates, sizes, network) for rule in rules.values() if rule}
    return {layer: found[id(rule)] for layer, rule in rules.items() if rule}


def window_sizes(config: PreTrainedConfig) -> Iterator[int]:
    """Every window or chunk size in the config of a network's text decoder."""
    for name, value in config.get_text_config(decoder=True).to_dict().items():
        if any(part in name for part in SIZE_NAMES):
            values = value if isinstance(value, list) else [value]
            yield from (size for size in values if type(size) is int and 1 < size <= MOST_POSITIONS)


def _rules(network: PreTrainedModel) -> dict[int, Rule | None]:
    """The rule behind the mask of each layer; None where the mask has none."""
    rules: dict[int, Rule | None] = {}

    def collect(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **passed: Any
    ) -> tuple[Tensor, None]:
        rules[module.layer_idx] = getattr(attention_mask, "rule", None)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(COLLECTING, collect)
    AttentionMaskInterface.register(COLLECTING, _mask_with_rule)
    network.set_attn_implementation(COLLECTING)
    network(input_ids=torch.ones(1, 2, dtype=torch.long, device=network.device), use_cache=False)
    return rules


def _mask_with_rule(q_length: int, kv_length: int, mask_function: Rule, device: Any = "cpu", **_: Any) -> Tensor:
    return _ruled(torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device), mask_function)


def _ruled(mask: Tensor, rule: Rule) -> Tensor:
    """A mask that carries its rule, also when it moves to the device of another layer."""
    move = mask.to
    mask.rule, mask.to = rule, lambda *where, **how: _ruled(move(*where, **how), rule)
    return mask


def _reach(rule: Rule, candidates: list[Reach], sizes: list[int], network: PreTrainedModel) -> Reach:
    """The candidate that equals the rule around every boundary; raises Refusal if there is none."""
    around = (at for size in sizes for at in (size - 1, size, size + 1, 2 * size, 3 * size + 2))
    queries = sorted({5, 40, *around})
    for candidate in candidates:
        if all(_same(rule, candidate, query, network.device) for query in queries):
            return candidate
    raise Refusal(f"{network.config.model_type} models have an attention mask that the playground cannot build: "
                  "choose another model.", "model")


def _same(rule: Rule, reach: Reach, query: int, device: torch.device) -> bool:
    at, key = torch.tensor([query], device=device), torch.arange(query + 2, device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    expected = key <= query
    if isinstance(reach, Chunks):
        expected &= key // reach.size == query // reach.size
    elif reach:
        expected &= query - key < reach
    return bool((rule(zero, zero, at, key).expand_as(expected) == expected).all())
