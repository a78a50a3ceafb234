"""FTP: tokens of the prompt that a block does not need pass it unchanged."""
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.events import Figure, Note
from strategies.adaptive_compute.ftp.token_router import FEATURES, TokenRouter, features, kept_tokens, static_ranking
from strategies.adaptive_compute.ftp.token_training import RATES, scaled, train_ftp

COLD = 2  # first blocks, and last ones, that are never pruned without a fitted schedule


class PrunedTokens(LayerChoices):
    """The forward over a prompt: block by block, the tokens with the highest scores run, the others pass unchanged."""

    def __init__(self, policy: "TokenPruning", rows: int, total: int):
        self._policy, self._rows, self._total = policy, rows, total
        self._received: Tensor | None = None  # attention that each token received last, [rows]
        self._running: list[int] = []
        self.ran: list[list[int]] = []  # by block

    def attends(self, layer: int, hidden: Tensor) -> list[int]:
        chosen = self._policy.choose(layer, self._received, self._rows)
        self._running = [*chosen, *range(self._rows, self._total)]  # drafts of the same forward run
        self.ran.append(self._running)
        return self._running

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        return [SharedFeedForward(self._running, full)] if self._running else []

    def reads_attention(self, layer: int) -> bool:
        return self._policy.reads_attention(layer)

    def attended(self, layer: int, weights: Tensor) -> None:
        chosen = [row for row in self._running if row < self._rows]
        own = weights[:len(chosen), weights.shape[1] - self._total:][:, chosen].float().cpu()
        sees = torch.arange(len(chosen), 0, -1)  # queries that may see each of them
        received = torch.zeros(self._rows) if self._received is None else self._received.clone()
        received[chosen] = own.sum(0) / sees
        self._received = received

    def deciding_weights(self, layer: int) -> int:
        return self._policy.router_weights if self._policy.share(layer) else 0


class TokenPruning(ComputePolicy):
    """Tokens of the prompt that a block hardly needs pass it unchanged, and hold no keys and values there.

    In each block the share of skipped tokens is fixed by a schedule with mean `r`; which ones is decided by a small
    router, shared by all blocks, from a token's place, the attention it received in the block before, its rank by that,
    and the block's share. Router `static` ranks by that attention alone. The first and the last `recent` tokens of the
    prompt always run, and so do generated tokens, which the paper may skip as well. Positions stay those of the text.
    `python -m playground fit ftp` searches the schedules by a genetic algorithm and trains the router; without it the
    static one is used, with equal shares except in the first and last two blocks. r = 0 is plain decoding. A prompt of
    several forwards is pruned in the first only. The attention weights are computed a second time to read them. The
    sizes of the search and the scale of the attention are not given by the paper. The bundled target has few blocks to
    spare, so that it loses many answers. Li et al. 2024, arXiv 2412.11494.
    """

    name, title, paper, sheet = "ftp", "Token pruning by block (FTP)", "2412.11494", "adaptive-compute/fwtw-ftp-cfsp"
    guarantee, reconstruction, sure = ("collapses",), True, "medium"
    skips_attention, prefers_trained = True, True  # row by row after the prompt, which is the same for all decoders

    r: float = knob(0.2, 0.0, 0.5, step=0.05, help="mean share of the prompt's tokens that a block skips; 0 skips none")
    router: str = knob("trained", choices=("trained", "static"), help="how tokens are ranked; static needs no training")
    recent: int = knob(4, 1, 64, step=1, help="last tokens of the prompt that always run")

    def begin(self, parts, weights):
        self.depth, self._weights, self._told, self._ran = parts.depth, weights, False, None
        self.shares = self._schedule(parts.depth, weights)
        self._router = TokenRouter.of(weights) if weights and self.router == "trained" else None
        self.router_weights = FEATURES * 64 + 64 if self._router else 0

    def _schedule(self, depth: int, weights) -> list[float]:
        """Share of skipped tokens by block, with mean r as far as no block exceeds 1."""
        if weights:
            nearest = min(RATES, key=lambda rate: abs(rate - self.r))
            return scaled(weights[f"schedule.{nearest}"].float().tolist(), self.r)
        cold = min(COLD, (depth - 1) // 2)
        return scaled([float(cold <= layer < depth - cold) for layer in range(depth)], self.r)

    def share(self, layer: int) -> float:
        """Share of the prompt's tokens that a block skips."""
        return self.shares[layer]

    def reads_attention(self, layer: int) -> bool:
        """Whether some later block ranks tokens by what this one attends to."""
        return any(self.shares[layer + 1:])

    def choose(self, layer: int, received: Tensor | None, tokens: int) -> list[int]:
        """Tokens of the prompt that a block runs, ascending; all if no block before attended to them."""
        if received is None or not self.shares[layer]:
            return list(range(tokens))
        scores = static_ranking(received, self.recent)
        if self._router:
            trained = self._router(features(received, self.shares[layer]))
            scores = torch.where(scores.isinf(), scores, trained)
        return kept_tokens(scores, self.shares[layer]).nonzero()[:, 0].tolist()

    def choices(self, positions, prompt):
        rows = sum(position < prompt for position in positions)
        if positions[0] == 0 and rows and self.r:
            return PrunedTokens(self, rows, len(positions))
        return LayerChoices()

    def explain(self, choices, row, generated) -> Iterator:
        if isinstance(choices, PrunedTokens):
            yield from self._shown(choices)
        if not self._told and not self._weights and self.r:
            self._told = True
            yield Note("No schedule for this model: the middle blocks skip equally many tokens, those that receive the "
                       "least attention. `python -m playground fit ftp` searches schedules and trains the router.")

    def _shown(self, choices: PrunedTokens) -> Iterator:
        tokens = choices._rows
        values = [[float(token in set(ran)) for token in range(tokens)] for ran in choices.ran]
        names = [f"layer {layer}" for layer in range(len(values))]
        data = {"rows": names, "columns": [f"token {token}" for token in range(tokens)], "values": values}
        yield Figure("matrix", "prompt tokens that each block ran", data)
        kept = [round(sum(row) / tokens, 4) for row in values]
        yield Figure("bars", "share of the prompt that each block ran, and holds in its cache",
                     {"labels": names, "values": kept})

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Search the schedules, then train the router; returns both by name."""
        torch.manual_seed(seed)
        return (yield from train_ftp(texts, seed))
