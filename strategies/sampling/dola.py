"""DoLa: decoding by contrasting layers."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling import contrastive as plausible
from playground.contract import EarlyExit, Sampler, knob
from playground.engine.sampling import jensen_shannon
from playground.events import Event, Figure

DEEP = 40  # layers; above it the buckets are the first and the last SPAN layers
SPAN = 20


class DoLa(Sampler):
    """Prefer what the model's last layers add: the last layer's log-probabilities minus those of an earlier layer.

    For every row the earlier layer is the candidate that diverges most from the last one. Only tokens at least alpha
    times as probable as the best compete. Candidates are every second layer of the lower or the upper half, or one
    fixed layer. The authors let the head read an inner layer without the final norm, and their divergence has the
    mixture in the place of the two rows; both can be changed. They add a repetition penalty of 1.2. alpha = 1 is
    greedy. It costs no forward, and helps little in shallow models, whose inner layers can hardly be read. Chuang et
    al. 2023, arXiv 2309.03883.
    """

    name, title, paper, sheet = "dola", "DoLa", "2309.03883", "sampling/lol"
    stage, draws, guarantee = "mix", False, ("collapses",)

    layers: str = knob(
        "high",
        choices=("low", "high", "one"),
        help="candidates: lower half for long reasoning, upper half for short answers, or one layer",
    )
    at: float = knob(0.5, 0.0, 1.0, step=0.05, help="where the one layer is, as a share of all; 1 is the last")
    alpha: float = knob(
        0.1, 0.0, 1.0, step=0.01, help="smallest probability of a competing token, relative to the best; 1 is greedy"
    )
    norm: bool = knob(False, help="read inner layers through the final norm")
    divergence: str = knob(
        "mixture first", choices=("mixture first", "Jensen-Shannon"), help="by which the candidate layer is chosen"
    )

    def inner(self, depth, tied):
        self.exits = [EarlyExit("target", layer, self.norm) for layer in candidates(self.layers, self.at, depth, tied)]
        return self.exits

    def mix(self, rows):
        logits, early = rows["target"], self._premature(rows)
        return plausible.among(logits.log_softmax(-1) - early.log_softmax(-1), logits, self.alpha)

    def _premature(self, rows) -> torch.Tensor:
        """Each row's earlier one, [n, V]."""
        exits, apart = torch.stack([rows[exit] for exit in self.exits]), self._divergences(rows)
        return exits[apart.argmax(0), torch.arange(exits.shape[1], device=exits.device)]

    def _divergences(self, rows) -> torch.Tensor:
        """Of each candidate from the last layer, in nats, [layers, n]."""
        measure = jensen_shannon if self.divergence == "Jensen-Shannon" else mixture_first
        return torch.stack([measure(rows["target"], rows[exit]) for exit in self.exits])

    def observe(self, rows, token, position) -> Iterator[Event]:
        single = {name: row[None] for name, row in rows.items()}
        exits, apart = self.exits, self._divergences(single)[:, 0].tolist()
        chosen = exits[apart.index(max(apart))]
        yield Figure(
            "scalar",
            "divergence from the last layer",
            {"x": position, "series": {f"layer {at.layer}": far for at, far in zip(exits, apart)}},
        )
        labels = [f"layer {at.layer}: {self.piece(int(rows[at].argmax()))}" for at in exits]
        yield Figure("bars", "first choice of each layer, by divergence", {"labels": labels, "values": apart})
        yield Figure(
            "spans", "layer contrasted with", {"spans": [[position, position + 1, f"layer {chosen.layer}", max(apart)]]}
        )
        yield from plausible.told(rows["target"], rows[chosen], self.mix(single)[0], self.alpha, position, self.piece)


def candidates(bucket: str, share: float, depth: int, tied: bool) -> list[int]:
    """Layers a model may be left after, 0 for its embeddings, which a tied head would only read as the last token
    itself.
    """
    if bucket == "one":
        return [round(share * depth)]
    first = min(2, depth - 1) if tied else 0
    if bucket == "low":
        return list(range(first, SPAN if depth > DEEP else depth // 2, 2)) or [first]
    return list(range(depth - SPAN if depth > DEEP else depth // 2, depth, 2))


def mixture_first(last: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """What the authors' code calls a Jensen-Shannon divergence, in nats, [n]: the mean divergence of the mixture from
    each row.
    """
    logq, loge = last.log_softmax(-1), early.log_softmax(-1)
    mixture = (logq.exp() + loge.exp()) / 2
    return (torch.xlogy(mixture, mixture) - mixture * (logq + loge) / 2).sum(-1)
