"""Models loaded in one process and run in another: ZeroGPU allocates a GPU to a process that it forks for a call.

The parent has no GPU. It reads the weights into its memory and runs nothing: a tensor created in inference mode cannot
be packed for another process, and threads started by a forward do not survive a fork. The forked process moves the
weights to its GPU and builds the models there, once, since it serves later calls too.
"""
from __future__ import annotations

from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.decoding.models import AnyModel, Models
from playground.engine.canvas.denoiser import CanvasNetwork
from playground.engine.loading.load import Facts
from playground.engine.loading.loaded_model import loaded_model
from playground.engine.loading.stored_weights import is_quantised
from playground.engine.model import Model
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

GPU, DTYPE = "cuda", "bfloat16"  # of ZeroGPU, whose parent process cannot look them up


class HostModel:
    """A network in the memory of a process without the device, with what a page shows of a model. Raises Refusal for
    quantised weights: their kernels are chosen when they are read.
    """

    def __init__(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, facts: Facts):
        if is_quantised(network):
            raise Refusal(
                f"The weights of {facts.name} are quantised ({facts.quantization}) and are read on a GPU, which this "
                "page has only during a run: choose a model that is not quantised.",
                "model",
            )
        self.network, self.tokenizer, self.tokens = network, tokenizer, Tokens(tokenizer, vocabulary_of(network))
        self.name, self.revision, self.quantization = facts.name, facts.revision, facts.quantization
        self.device, self.dtype, self.parameters = torch.device(GPU), network.dtype, facts.parameters

    @cached_property
    def moved(self) -> Model | CanvasNetwork:
        """The model on the device; its weights are no longer on the host. Raises Refusal if it cannot be run."""
        network: nn.Module = self.network  # whose `to` is annotated
        network.to(GPU)
        return loaded_model(self.network, self.tokenizer, self.name, self.revision, self.quantization)


def vocabulary_of(network: PreTrainedModel) -> int:
    return network.config.get_text_config().vocab_size


def moved(models: Models) -> Models:
    """The models on the device of this process; what is on one already stays where it is."""
    return Models(_moved(models.target), models.draft and _moved(models.draft))


def _moved(model: AnyModel | HostModel) -> AnyModel:
    return model.moved if isinstance(model, HostModel) else model
