"""FFN-SkipLLM: skip the feed-forward networks of a token once they hardly change its hidden state."""
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import cosine_similarity

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.events import Figure


class SaturationChoices(LayerChoices):
    """One forward: each row skips by itself, and starts anew in every forward."""

    def __init__(self, policy: "FfnSkip", may_skip: list[bool]):
        self._policy, self._may_skip = policy, may_skip
        self._skipped = [0] * len(may_skip)  # feed-forward networks a row has skipped in its present run; 0 outside one
        self._skipping = [False] * len(may_skip)
        self._running: list[int] = []  # rows whose feed-forward network runs in the present layer
        self.similarities: list[list[float | None]] = []  # cosine before and after, by layer and row; None if skipped

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        skips = self._policy.is_middle(layer) and any(self._skipping)
        self._running = [row for row, skipping in enumerate(self._skipping) if not (skips and skipping)]
        return [SharedFeedForward(self._running, full)] if self._running else []

    def observe(self, layer: int, before: Tensor, after: Tensor) -> None:
        self.similarities.append([None] * len(before))
        if not self._policy.is_middle(layer) or not any(self._may_skip):
            return
        cosines = cosine_similarity(before, after, dim=-1).tolist()
        for row in range(len(before)):
            self._advance(row, cosines[row], row in self._running)

    def _advance(self, row: int, cosine: float, ran: bool) -> None:
        """Begin a run of skipped networks after one that hardly turned the state, or end a run that is long enough."""
        if ran:
            self.similarities[-1][row] = cosine
            self._skipping[row] = self._may_skip[row] and cosine >= self._policy.threshold
            return
        self._skipped[row] += 1
        if self._skipped[row] == self._policy.run:
            self._skipping[row], self._skipped[row] = False, 0


class FfnSkip(ComputePolicy):
    """Skip the feed-forward networks (FFN) of the middle layers for a token, once they hardly turn its hidden state.

    Attention always runs, so every layer keeps all keys and values. Where the cosine between the hidden state before
    and after an FFN, residual included, reaches `threshold`, the FFNs of the next `run` middle layers are skipped; with
    run 0, all of them. The first and last layers, the prompt and the first `warm_up` tokens run whole, and every token
    begins anew. A threshold above 1 skips nothing. The paper gives no threshold and no number of cold layers, and `run`
    is an addition. The bundled target is small, so that skipping costs it more than the large models of the paper.
    Jaiswal et al. 2024, arXiv 2404.03865.
    """

    name, title, paper, sheet = "ffn_skip", "FFN skipping (FFN-SkipLLM)", "2404.03865", "adaptive-compute/ffn-skip"
    guarantee, reconstruction, sure = ("collapses",), True, "medium"

    threshold: float = knob(
        0.97, -1.0, 1.01, step=0.005, help="cosine before and after an FFN from which the next are skipped; 1.01: never"
    )
    first: int = knob(2, 0, 16, step=1, help="first layers whose FFN always runs")
    last: int = knob(1, 0, 16, step=1, help="last layers whose FFN always runs")
    warm_up: int = knob(4, 0, 32, step=1, help="first generated tokens that run every FFN")
    run: int = knob(1, 0, 16, step=1, help="FFNs skipped before the next one is tested again; 0: all up to the last")

    def begin(self, parts, weights):
        self._middle = range(self.first, parts.depth - self.last)

    def is_middle(self, layer: int) -> bool:
        """Whether the FFN of a layer may be skipped."""
        return layer in self._middle

    def choices(self, positions, prompt):
        return SaturationChoices(self, [position >= prompt + self.warm_up for position in positions])

    def explain(self, choices, row, generated):
        seen = [(layer, each[row]) for layer, each in enumerate(choices.similarities) if each[row] is not None]
        if seen:
            labels, values = [f"layer {layer}" for layer, _ in seen], [round(cosine, 4) for _, cosine in seen]
            yield Figure("bars", "cosine of the state before and after each FFN", {"labels": labels, "values": values})
