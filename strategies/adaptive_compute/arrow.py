"""Arrow: adapters as experts, routed by the direction that each of them changes most."""
import torch
from torch import Tensor

from playground.algorithms.adaptive_compute.adapter_experts import AdapterExperts, top_softmax
from playground.contract import knob


class Arrow(AdapterExperts):
    """Each token goes, at each matrix, to the adapters that change most what the matrix reads. Routing needs no data.

    The vector of an adapter is the direction in which its product B A stretches inputs most, its first right singular
    vector. The score of an adapter is the size of the product of this vector and the input, so its sign does not
    matter; a softmax over the `k` highest scores weights what the adapters add. Every token of the prompt is routed as
    well. The adapters are those of `python -m playground fit phatgoose`, whose gates are not used. They act on the
    feed-forward networks alone. Without a fit nothing is added. Ostapenko et al. 2024, arXiv 2405.11157.
    """

    name, title, paper, sheet = "arrow", "Routed adapters (Arrow)", "2405.11157", "weights/routing-experts"

    k: int = knob(2, 1, 16, step=1, help="adapters that a token uses at a matrix; at most as many as take part")
    temperature: float = knob(1.0, 0.01, 5.0, help="divides the scores before the softmax; small: the best adapter")

    def prepare(self):
        self._vectors = [{name: first_directions(own.a, own.b) for name, own in layer.items()}
                         for layer in self.adapters]
        self.router_weights = sum(vectors.numel() for vectors in self._vectors[0].values())

    def weigh(self, layer, name, rows):
        return top_softmax((rows.float() @ self._vectors[layer][name].T).abs(), self.k, self.temperature)


def first_directions(a: Tensor, b: Tensor) -> Tensor:
    """First right singular vectors [experts, in] of the products of b [experts, out, rank] and a [experts, rank, in].

    They lie in the span of the rows of a, so only matrices of the rank are decomposed.
    """
    basis, triangle = torch.linalg.qr(a.float().mT)
    _, _, right = torch.linalg.svd(b.float() @ triangle.mT, full_matrices=False)
    return (basis @ right[:, 0, :, None])[..., 0]
