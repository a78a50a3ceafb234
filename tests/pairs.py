"""A random target and a draft that often agrees with it, for tests that run whole lanes."""
from __future__ import annotations

from functools import cache

import torch
from architectures import SIZES, SPECIAL
from torch import Tensor
from toys import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from playground.bench.bookkeeping.generated_model import GeneratedLayers
from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.models import Models
from playground.engine.loading.mtp_layers import MtpLayers
from playground.engine.model import Model

VOCABULARY = 320
TOKENIZER = byte_tokenizer()


@cache
def pair(architecture: str = "llama", noise: float = 0.04, dtype: torch.dtype = torch.float64) -> Models:
    """The weights are large enough that every token matters. The draft is the target with noise on its weights."""
    target, draft = network(architecture), network(architecture)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += torch.randn_like(weights) * noise * weights.std(correction=0)
    models = Models(
        Model(target.to(dtype), TOKENIZER, architecture),
        Model(draft.to(dtype), TOKENIZER, f"{architecture} with noise"),
    )
    _add_layers(models.target, target)
    models.target.lexical_units = 8  # as if it was tuned for it
    return models


def _add_layers(target: Model, network: PreTrainedModel) -> None:
    """Layers for multi-token prediction, random ones of the library where its class has any for the architecture."""
    if network.config.model_type == "llama":
        target.mtp = random_layers(network)
    else:
        target.mtp, target.mtp_count = GeneratedLayers(target), GeneratedLayers.count


def random_layers(target: PreTrainedModel, count: int = 2) -> MtpLayers:
    """Random layers for multi-token prediction, as if the checkpoint had some."""
    target.config.num_mtp_layers = count
    torch.manual_seed(5)
    return MtpLayers(MtpModel(target, count).to(target.dtype))


def pair_for(*configs: LaneConfig, dtype: torch.dtype = torch.float64) -> Models:
    """The pair, as a mixture of experts if a lane chooses among experts."""
    names = [name for config in configs for name, _ in [(config.strategy, {}), *config.extras]]
    return pair("mixtral" if any("experts" in find(name).needs for name in names) else "llama", dtype=dtype)


def network(architecture: str) -> PreTrainedModel:
    """The target's network of the library, without our hooks."""
    torch.manual_seed(0)
    sizes = SPECIAL.get(architecture, SIZES) | {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes, initializer_range=0.3))
        .double()
        .eval()
    )


def greedy_text(architecture: str, prompt: list[int], length: int) -> list[int]:
    """The library's argmax with a forward over the whole text per token; ignores end tokens."""
    ids, model = list(prompt), network(architecture)
    with torch.inference_mode():
        for _ in range(length):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt):]


def library_states(ids: list[int], architecture: str = "llama") -> tuple[Tensor, ...]:
    """Input of each layer at the last token, and finally that of the lm_head, [d] each."""
    with torch.no_grad():
        return tuple(
            states[0, -1]
            for states in network(architecture)(
                input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False
            ).hidden_states
        )
