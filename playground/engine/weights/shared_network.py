"""A second network beside a loaded one, which shares every tensor with it until one is replaced."""
from __future__ import annotations

from copy import deepcopy

from torch import nn
from transformers import PreTrainedModel

from playground.engine.loading.stored_weights import is_quantised
from playground.errors import Refusal


def sharing(name: str, network: PreTrainedModel) -> PreTrainedModel:
    """The network without the playground's hooks, on the same tensors. Raises Refusal if its weights are no plain ones.

    Whoever replaces a weight gives its module another parameter; tensors are never written to. Parameters are objects
    of their own, because the fused forward of each network lets them point into its joined matrices.
    """
    if is_quantised(network):
        raise Refusal(f"The weights of {name} are quantised already, and only others can be changed: choose no "
                      "quantization.", "weights")
    if len({weight.device for weight in network.parameters()}) > 1:
        raise Refusal(f"{name} is spread over several devices, where weights cannot be changed: choose one device.",
                      "weights")
    shared = {id(weight): nn.Parameter(weight.data, requires_grad=False) for weight in network.parameters()}
    twin = deepcopy(network, shared | {id(buffer): buffer for buffer in network.buffers()})
    for module in twin.modules():
        module.__dict__.pop("forward", None)  # a hook, which would still call the other network's layer
    twin.set_attn_implementation("sdpa" if twin._supports_sdpa else "eager")
    return twin.eval()
