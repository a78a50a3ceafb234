"""Sequence-classification models of the transformers library, as judges of answers.

A model with one output is read as a reward model: the sigmoid of its output is the probability that the answer is good.
With several labels it is the probability of the last one, as in sentiment models whose labels are negative, positive.
"""
from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.checkpoint.config_limits import check_raw_config
from playground.engine.checkpoint.hub_files import fetch, find_source, first_sentence, tensors, unseen
from playground.engine.device_memory import HEADROOM, free_bytes, loaded_bytes, size_text
from playground.engine.loading.read_tokenizer import read_tokenizer
from playground.engine.loading.stored_weights import StoredForm, cast_rest, stored_form
from playground.engine.loading.unused_weights import check_unused
from playground.engine.text.chat_prompt import written
from playground.errors import Refusal


class ClassifiedAnswer(NamedTuple):
    """The probability that an answer is good, and what it cost to compute it."""

    probability: float
    tokens: int
    seconds: float
    flops: float  # of the weights: two for each weight and token


class SequenceClassifier:
    """A network with its tokenizer. Texts are read one by one, so that padding cannot change a score."""

    def __init__(self, name: str, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.name, self.network, self.tokenizer = name, network.eval(), tokenizer
        self.layers = getattr(network.config, "num_hidden_layers", 0)

    @torch.inference_mode()
    def judge(self, question: str, answer: str) -> ClassifiedAnswer:
        """Judge one answer. Raises Refusal if question and answer are too long for the model."""
        ids, start = self._encode(question, answer), perf_counter()
        count = ids["input_ids"].shape[1]
        if count > (longest := getattr(self.network.config, "max_position_embeddings", count)):
            raise Refusal(
                f"Prompt and answer have {count} tokens, and {self.name} reads at most {longest}: shorten them.",
                "classifier",
            )
        logits = self.network(**ids.to(self.network.device)).logits[0].double()
        probability = logits[0].sigmoid() if len(logits) == 1 else logits.softmax(0)[-1]
        flops = 2.0 * self.network.num_parameters(exclude_embeddings=True) * count
        return ClassifiedAnswer(float(probability), count, perf_counter() - start, flops)

    def _encode(self, question: str, answer: str):
        """As a turn of a chat if the tokenizer has a template, else as a pair of texts."""
        if not self.tokenizer.chat_template:
            return self.tokenizer(question, answer, return_tensors="pt")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = written(self.tokenizer, turns, answer=False)
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt")


@lru_cache(maxsize=2)
def load_classifier(name: str, device: str) -> SequenceClassifier:
    """The model in a folder or of the Hugging Face hub, in float32; the last two loaded are kept. Raises Refusal."""
    source = find_source(name)
    needed = loaded_bytes(tensors(source), "float32", "none")
    if needed * HEADROOM > free_bytes(device):
        raise Refusal(
            f"{name} takes {size_text(needed)}, and {size_text(free_bytes(device))} are free on {device}: choose a "
            "smaller reward model.",
            "classifier",
        )
    folder = fetch(source, unseen)
    check_raw_config(name, folder / "config.json")
    return SequenceClassifier(name, _read_network(name, folder, device), read_tokenizer(name, folder))


def _read_network(name: str, folder: Path, device: str) -> PreTrainedModel:
    form = _stored_form(name, folder, device)
    try:
        network, report = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=torch.float32,
            device_map={"": device},
            **(form.arguments if form else {}),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as reason:  # a network may fail to be built in any way
        raise Refusal(
            f"{name} cannot be loaded as a reward model ({first_sentence(reason)}): choose a sequence-classification "
            "model.",
            "classifier",
        ) from None
    if report["missing_keys"]:  # the library fills gaps with random numbers, such as the classifier of a language model
        raise Refusal(
            f"{name} has no trained classifier ({sorted(report['missing_keys'])[0]} is missing): choose a "
            "sequence-classification model.",
            "classifier",
        )
    check_unused(name, network, report["unexpected_keys"], folder)
    if form and form.arguments:
        cast_rest(network, torch.float32)
    return network


def _stored_form(name: str, folder: Path, device: str) -> StoredForm | None:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # the library says why when it reads the network
        return None
    return stored_form(name, config, device)
