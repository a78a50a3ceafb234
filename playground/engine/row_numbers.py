"""What the host reads of rows of logits, in one tensor."""
from __future__ import annotations

import torch
from torch import Tensor

from playground.engine.sampling import entropy_of, first_largest, largest

CANDIDATES = 10  # most probable tokens that are recorded of a row


def row_numbers(raw: Tensor, count: int) -> Tensor:
    """Of each row of logits [n, V]: entropy in nats, most probable token, then tokens, probabilities and
    log-probabilities of the `count` most probable, [n, 2 + 3 * count], in the type of the logits.

    Tokens must be below 2^24.
    """
    logp = raw.log_softmax(-1)
    p = logp.exp()
    values, ids = largest(p, count)
    parts = entropy_of(p, raw)[:, None], first_largest(raw), ids, values, logp.gather(-1, ids)
    return torch.cat([part.to(raw.dtype) for part in parts], 1)
