"""Entropy adaptive decoding."""
from collections import deque
from collections.abc import Iterator

from playground.contract import Decoder, Lane, knob
from playground.events import Figure, Switch

LN2 = 0.6931471805599453


class EAD(Decoder):
    """Generate with the small model while the mean entropy is low, and with the large model while it is high.

    The mean entropy of the last `window` rows, in bits and before any temperature, selects the model of the next token:
    above `threshold` the large model, otherwise the small one, but never within `dwell` tokens of the last switch. A
    model that takes over first reads the other's tokens in one forward. Until the window is full the mean is over the
    rows seen. The row that raises the mean is still sampled from its own model, so the first uncertain token of the
    small model is committed; bild switches before it. Simonds 2025, arXiv 2502.06833. The dwell rule, the starting
    model and the unfilled window are our interpretation; the paper's abstract does not specify them.
    """

    name, title, paper, sheet = "ead", "Entropy Adaptive Decoding", "2502.06833", "sampling/ead"
    needs, guarantee = ("draft",), ("heuristic", "collapses")
    reconstruction, sure = True, "medium"

    threshold: float = knob(
        1.0,
        -1.0,
        8.0,
        step=0.1,
        help="mean entropy in bits above which the large model generates; at 8 almost never",
    )
    window: int = knob(5, 1, 32, step=1, help="number of rows in the mean")
    dwell: int = knob(5, 0, 64, step=1, help="minimum number of tokens between two switches")
    start: str = knob("large", choices=("large", "small"), help="model that generates first")
    clear: bool = knob(
        False,
        help="empty the window at a switch; otherwise it holds rows of both models",
    )

    def decode(self, lm: Lane) -> Iterator:
        streams = {"large": lm.target, "small": lm.stream("draft")}
        active, since, by_large, recent = self.start, 0, 0, deque(maxlen=self.window)
        yield Switch(0, active, "start")
        rows = yield streams[active].prefill()
        while True:
            recent.append(rows.entropy() / LN2)
            mean = sum(recent) / len(recent)
            yield Figure(
                "scalar",
                "mean entropy",
                {"x": lm.generated, "series": {"mean entropy, bits": mean}, "lines": {"threshold": self.threshold}},
            )
            by_large += active == "large"
            yield Figure(
                "scalar",
                "share of the large model",
                {"x": lm.generated, "series": {"share": by_large / (lm.generated + 1)}},
            )
            yield lm.keep(lm.pick(rows))
            since += 1
            wanted = "large" if mean > self.threshold else "small"
            if wanted != active and since >= self.dwell:
                active, since = wanted, 0
                yield Switch(
                    lm.generated,
                    active,
                    f"mean entropy {mean:.2f} bits; tokens to read first: {streams[active].behind()}",
                )
                if self.clear:
                    recent.clear()
            rows = yield streams[active].extend()
