"""PHATGOOSE: adapters as experts, routed by a gate that each of them learned for itself."""
from collections.abc import Iterator

import torch
from torch.nn.functional import layer_norm

from playground.algorithms.adaptive_compute.adapter_experts import AdapterExperts, top_softmax
from playground.algorithms.adaptive_compute.adapter_training import train_experts
from playground.contract import knob

TASKS = ("arithmetic", "facts", "lists", "programs", "records")  # an expert each


class Phatgoose(AdapterExperts):
    """Each token goes, at each matrix, to the adapters whose learned gate fits what the matrix reads best.

    After an adapter was trained on its task, it is frozen, and a vector for each matrix is trained for some hundred
    steps on the same task, whose sigmoid of the product with the input decides how much of the input the adapter reads.
    For routing the vectors of all adapters are collected, and the sigmoid is dropped: input and vectors are normalised
    to mean 0 and variance 1, and a softmax over the `k` highest of their products, divided by the root of the width,
    weights what the adapters add. Every token of the prompt is routed as well. `python -m playground fit phatgoose`
    trains five adapters of rank 4 on five tasks of the small world, with answers in a form that the model does not
    write by itself: lists with a bullet on each line, records as name = value, programs without docstring in a fence,
    facts and sums in a sentence. On held-out questions of these tasks the answers cost 0.23 nats per token routed, 0.41
    with `arrow`, 2.09 with `merged_adapters`, 0.16 with the adapter of the task alone and 4.58 without adapters, as the
    fit prints. Only the three matrices of each feed-forward network have adapters here, in the paper
    all linear layers. Without a fit nothing is added. Muqeeth et al. 2024, arXiv 2402.05859.
    """

    name, title, paper, sheet = "phatgoose", "Routed adapters (PHATGOOSE)", "2402.05859", "weights/routing-experts"

    k: int = knob(2, 1, 16, step=1, help="adapters that a token uses at a matrix; at most as many as take part")
    temperature: float = knob(1.0, 0.01, 5.0, help="divides the scores before the softmax; small: the best adapter")

    def prepare(self):
        self._gates = [{name: normalised(own.gate.float()) for name, own in layer.items()} for layer in self.adapters]
        self.router_weights = sum(gates.numel() for gates in self._gates[0].values())

    def weigh(self, layer, name, rows):
        scores = normalised(rows.float()) @ self._gates[layer][name].T / rows.shape[-1] ** 0.5
        return top_softmax(scores, self.k, self.temperature)

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train adapters and gates; returns their weights by name."""
        torch.manual_seed(seed)
        return (yield from train_experts(texts, TASKS))


def normalised(vectors):
    """Vectors [..., d] with mean 0 and variance 1; zeros stay zeros."""
    return layer_norm(vectors, vectors.shape[-1:])
