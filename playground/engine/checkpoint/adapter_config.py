"""What the adapter_config.json of a PEFT LoRA adapter says: its base model, and how strongly each module is changed."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playground.errors import Refusal

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_BYTES = 2_000_000  # of an adapter_config.json
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # initial values that leave the base as it was
# entries for which more than W + B A is computed, and what they mean
OTHER_RULES = {
    "alora_invocation_tokens": "acts after its invocation tokens alone (aLoRA)",
    "use_qalora": "pools its inputs in groups (QALoRA)",
    "layer_replication": "repeats layers of its base",
    "use_bdlora": "is block-diagonal (BD-LoRA)",
    "arrow_config": "is routed by Arrow",
    "kasa_config": "removes singular values of its base (KaSA)",
    "monteclora_config": "is sampled (MonteCLoRA)",
    "megatron_config": "belongs to a network of Megatron",
    "target_parameters": "changes parameters of experts",
}
LONGEST_PATTERN = 200  # characters of the name of a module in a pattern
REPEATED_GROUP = re.compile(r"\)[*+{?]")  # what can take exponential time to match
MOST_REPEATS = 4


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter: each of its modules computes W x + scale B A x. `base`: the name of its model, maybe empty."""

    name: str
    base: str = ""
    alpha: float = 8.0
    alphas: dict[str, float] = field(default_factory=dict)  # of modules whose names end as a pattern says
    rank_stabilised: bool = False
    ties: bool = False  # the embeddings and a tied lm_head are changed together
    tokens: Any = None  # ids of trained embedding rows, a list, or lists by module

    def scale(self, module: str, rank: int) -> float:
        """The factor of B A for a module, alpha / rank, or alpha / sqrt(rank) in rank-stabilised LoRA."""
        pattern = next((key for key in self.alphas if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = self.alpha if pattern is None else self.alphas[pattern]
        return alpha / (rank ** 0.5 if self.rank_stabilised else rank)

    def token_ids(self, module: str) -> list[int]:
        """Rows of an embedding that were trained by themselves."""
        own = self.tokens.get(module.rsplit(".", 1)[-1], []) if isinstance(self.tokens, dict) else self.tokens
        return own if isinstance(own, list) and all(type(token) is int and token >= 0 for token in own) else []


def read_adapter_config(name: str, folder: Path) -> AdapterConfig:
    """The config in an adapter's folder; raises Refusal unless it is a LoRA that can be added to its base here."""
    fields = _read(name, folder / CONFIG)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise Refusal(f"{name} is an adapter of the kind {str(kind)[:40]}, and only LoRA is read here: merge it into "
                      "its base model with peft, and name the merged model.", "model")
    for entry, meaning in OTHER_RULES.items():
        if fields.get(entry):
            raise Refusal(f"The LoRA adapter {name} {meaning}, which is not supported: choose another adapter.",
                          "model")
    if (start := fields.get("init_lora_weights")) not in PLAIN_STARTS:
        raise Refusal(f"The LoRA adapter {name} was trained on a base that its initialisation had changed "
                      f"({str(start)[:40]}): save it once more with peft's path_initial_model_for_weight_conversion.",
                      "model")
    alphas = fields.get("alpha_pattern") or {}
    numbers = [fields.get("lora_alpha", 8), *(alphas.values() if isinstance(alphas, dict) else [None])]
    if not all(type(number) in (int, float) for number in numbers) or not all(map(_is_safe, alphas)):
        raise Refusal(f"The {CONFIG} of {name} gives no usable lora_alpha: save the adapter again.", "model")
    return AdapterConfig(name, str(fields.get("base_model_name_or_path") or ""), numbers[0], alphas,
                         bool(fields.get("use_rslora")), bool(fields.get("ensure_weight_tying")),
                         fields.get("trainable_token_indices"))


def _read(name: str, path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise Refusal(f"The {CONFIG} of {name} cannot be read: save the adapter again.", "model") from None
    return fields


def _is_safe(pattern: str) -> bool:
    """Whether a regular expression is valid and matches in time that grows with a small power of a name's length."""
    if len(pattern) > LONGEST_PATTERN or REPEATED_GROUP.search(pattern):
        return False
    if sum(pattern.count(repeat) for repeat in "*+{?") > MOST_REPEATS:
        return False
    try:
        return bool(re.compile(pattern))
    except re.error:
        return False
