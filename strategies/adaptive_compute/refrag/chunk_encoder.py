"""The small networks of REFRAG: an encoder that makes one input vector of a chunk, and a policy that scores chunks."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

CHUNK = 4  # tokens
LAYERS, HEADS = 2, 4  # of both networks
POLICY_WIDTH = 64


class ChunkEncoder(nn.Module):
    """A bidirectional transformer over the tokens of one chunk, and a projection into the target's embedding space.

    It reads the target's own token embeddings. The states of all tokens enter the projection side by side, since a mean
    would have to encode their order first. What it computes is added to the mean embedding of the chunk, from which it
    starts; both are our choices.
    """

    def __init__(self, width: int, chunk: int = CHUNK, scale: float = 1.0):
        """`scale` is the root mean square of the target's token embeddings, by which the networks are scaled."""
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.place = nn.Parameter(torch.randn(chunk, width) * 0.1)
        self.layers = bidirectional(width)
        self.hidden, self.out = nn.Linear(chunk * width, width), nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, embedded: Tensor) -> Tensor:
        """Vectors [n, width] of chunks, from the embeddings [n, k, width] of their tokens."""
        states = self.layers(embedded / self.scale + self.place)
        return embedded.mean(-2) + self.out(self.hidden(states.flatten(-2)).relu()) * self.scale

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> ChunkEncoder:
        """The encoder that `stored` wrote."""
        chunk, width = weights["encoder.place"].shape
        return _loaded(cls(width, chunk), weights, "encoder.")


class ExpansionPolicy(nn.Module):
    """A transformer over the vectors of all chunks of a context, which gives one score per chunk."""

    def __init__(self, width: int, scale: float = 1.0):
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.down, self.layers = nn.Linear(width, POLICY_WIDTH), bidirectional(POLICY_WIDTH)
        self.score = nn.Linear(POLICY_WIDTH, 1)

    def forward(self, vectors: Tensor) -> Tensor:
        """Scores [n] of chunks, from their vectors [n, width]."""
        return self.score(self.layers(self.down(vectors / self.scale)[None])[0])[:, 0]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> ExpansionPolicy:
        """The policy that `stored` wrote."""
        return _loaded(cls(weights["policy.down.weight"].shape[1]), weights, "policy.")


def bidirectional(width: int) -> nn.TransformerEncoder:
    """Transformer layers without a mask, with the norm before each part and after the last layer."""
    layer = nn.TransformerEncoderLayer(
        width, HEADS, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(width), enable_nested_tensor=False)


def stored(encoder: ChunkEncoder, policy: ExpansionPolicy) -> dict[str, Tensor]:
    """The weights of both networks by name, in float16."""
    both = {"encoder.": encoder, "policy.": policy}
    return {prefix + name: tensor.detach().half() for prefix, network in both.items()
            for name, tensor in network.state_dict().items()}


def _loaded(network: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> nn.Module:
    """The network with its weights, without gradients."""
    network.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in weights.items()
                             if name.startswith(prefix)})
    return network.requires_grad_(False).eval()
