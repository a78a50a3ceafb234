"""SEC: stop a completion that goes wrong, and exit early from a token that is clear."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.events import Figure, Note

STOP, EXIT = 0, 1  # classes of the controller; the third is to continue
RANK = 32  # channels of the network that turns a state into the lm_head's input, for each layer
EPOCHS, BATCH, RATE, DECAY = 3, 512, 2e-3, 0.01
HELD_OUT = 8  # one text in this many is held out


class Controlled(LayerChoices):
    """One forward; for each row of a generated token every layer asks the controller, until it decides."""

    def __init__(self, policy: StopExit, depth: int, asks: list[bool]):
        self._policy, self._depth, self.asks = policy, depth, asks
        self.exits: dict[int, int] = {}  # layers that ran before the exit or the stop, by row
        self.stopped: set[int] = set()  # rows
        self.classes: list[dict[int, list[float]]] = []  # by layer and row: probability of stop, exit and continue

    def attends(self, layer: int, hidden: Tensor) -> list[int]:
        if layer:
            self._decide(layer, hidden)
        return self._running

    def stores(self, layer: int, hidden: Tensor) -> bool:
        return len(self.stopped) < len(hidden)

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> list[SharedFeedForward]:
        parts = [SharedFeedForward(self._running, full)] if self._running else []
        left = [row for row in self.exits if row not in self.stopped] if layer == self._depth - 1 else []
        for exit in sorted({self.exits[row] for row in left}):
            rows = sorted(row for row in left if self.exits[row] == exit)
            parts.append(SharedFeedForward(rows, self._policy.heads[exit - 1]))
        return parts

    def observe(self, layer: int, before: Tensor, after: Tensor) -> None:
        """After the last layer only stopping is left."""
        if layer == self._depth - 1:
            self._decide(self._depth, after)

    @property
    def _running(self) -> list[int]:
        return [row for row in range(len(self.asks)) if row not in self.exits]

    def _decide(self, layers: int, hidden: Tensor) -> None:
        """Ask the controller about the states [n, d] of the rows that still run, after so many layers."""
        asking = [row for row in self._running if self.asks[row]]
        if not asking:
            return
        q = linear(hidden[asking], self._policy.controller.to(hidden.device)).float().softmax(-1).tolist()
        self.classes.append(dict(zip(asking, q)))
        for row, shares in self.classes[-1].items():
            best = shares.index(max(shares))
            stops = best == STOP and shares[STOP] > self._policy.theta_stop
            if stops or best == EXIT and shares[EXIT] > self._policy.theta_exit:
                self.exits[row] = layers
            if stops:
                self.stopped.add(row)


class StopExit(ComputePolicy):
    """After each layer a small classifier looks at the hidden state of the new token and decides: exit here, stop the
    whole text, or go on to the next layer. The paper's large heads are small here, so few tokens exit at the default.

    A token exits where the classifier says that this layer already predicts it. The skipped layers get keys and values
    computed from the state at the exit, and a small network turns that state into the input of the lm_head. The text
    stops where no layer is likely to predict the token, so that a completion ends before it goes wrong. The prompt and
    the first token run whole; each row of a draft tree or of several texts decides for itself. Thresholds of 1 and more
    switch either off. The heads of the paper, full matrices on every layer, are here networks of 32 channels before the
    model's own norm and lm_head, and weaker: with the bundled ones a tenth of the tokens exits at the default, which
    changes 2 of 300 held-out answers; at 0.98 half of them exit and a quarter of the answers change. Sun et al. 2024,
    arXiv 2401.09964.
    """

    name, title, paper = "stop_exit", "Stop-and-exit controller (SEC)", "2401.09964"
    sheet = "search/dynamic-code-completion"
    guarantee = ("collapses",)
    questions_per_task = 12  # of the small world that it is trained on

    theta_exit: float = knob(
        0.998, 0.0, 1.01, step=0.001, help="probability above which a token exits; 1.01: never"
    )
    theta_stop: float = knob(1.01, 0.0, 1.01, step=0.01, help="probability above which the text stops; 1.01: never")
    weights: str = knob(
        "fitted", choices=("fitted", "random"), help="the controller trained for this model, or a random one, to test"
    )

    @property
    def prefers_trained(self) -> bool:
        return self.weights == "fitted"

    def begin(self, parts, weights):
        self.controller, self._depth = None, parts.depth
        if self.weights == "random":
            weights = untrained(parts.depth, parts.width, seed=0)
        if not weights:  # nothing is fitted to this model
            return
        self.controller = weights["controller"].to(parts.lm_head)
        heads = (weights[name].float() for name in ("gate", "up", "down"))
        self.heads = [parts.feed_forward(parts.depth - 1, *head) for head in zip(*heads)]

    @property
    def may_stop(self) -> bool:
        return self.theta_stop < 1

    def choices(self, positions, prompt):
        asks = [position >= prompt for position in positions]
        return Controlled(self, self._depth, asks) if self.controller is not None and any(asks) else LayerChoices()

    def stops(self, choices, row):
        return isinstance(choices, Controlled) and row in choices.stopped

    def explain(self, choices, row, generated):
        if self.controller is None and generated == 0:
            yield Note("No controller is fitted to this model, so all runs: `fit stop_exit` trains one.")
        if not isinstance(choices, Controlled) or not choices.asks[row]:
            return
        classes = [each[row] for each in choices.classes if row in each]
        rows = [f"layer {layer}" for layer in range(len(classes))]
        table = {"rows": rows, "columns": ["stop", "exit", "continue"], "values": classes}
        yield Figure("matrix", "what the controller says after each layer", table)
        depth = choices.exits.get(row, self._depth)
        series = {"layers before the exit": depth}
        yield Figure("scalar", "exit", {"x": generated, "series": series, "lines": {"all layers": self._depth}})
        if row in choices.stopped:
            yield Note(f"The controller stops the text after {depth} layers: no layer is likely to be right here.")

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train the heads, then the controller on the first layer that is right for each token; returns both."""
        states = [states_of(texts, ids) for ids in texts.texts]
        labels = [torch.tensor(ids[1:]) for ids in texts.texts]
        numbers = range(len(states))
        train, test = (
            (torch.cat([states[i] for i in part], 1), torch.cat([labels[i] for i in part]))
            for part in ([i for i in numbers if i % HELD_OUT], [i for i in numbers if not i % HELD_OUT])
        )
        network = untrained(texts.parts.depth, texts.parts.width, seed)
        yield from train_heads(network, texts.parts, *train, seed)
        yield from train_controller(network, *(first_right(network, texts.parts, *part) for part in (train, test)))
        return {name: tensor.detach().half() for name, tensor in network.items()}


def untrained(depth: int, width: int, seed: int) -> dict[str, Tensor]:
    """Random weights of the controller, and heads of all layers but the last that change nothing yet."""
    chance = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance) * width**-0.5

    return {
        "controller": noise(3, width),
        "gate": noise(depth - 1, RANK, width),
        "up": noise(depth - 1, RANK, width),
        "down": torch.zeros(depth - 1, width, RANK),
    }


class Watching(LayerChoices):
    """Runs everything, and keeps the hidden states after each layer."""

    def __init__(self):
        self.states: list[Tensor] = []

    def observe(self, layer, before, after):
        self.states.append(after.float().cpu().clone())


def states_of(texts, ids: list[int]) -> Tensor:
    """The states after each layer, [layers, tokens - 1, d], of all tokens but the last."""
    watching = Watching()
    with torch.inference_mode():
        texts.read(ids, watching)
    return torch.stack(watching.states)[:, :-1].clone()


def logits_of(network: dict[str, Tensor], parts, layer: int, states: Tensor) -> Tensor:
    """What the head of a layer predicts from states [n, d]: [n, V]. The last layer has none of its own."""
    depth = parts.depth
    if layer < depth - 1:
        inner = normed(parts, depth - 1, states)
        gated = silu(linear(inner, network["gate"][layer])) * linear(inner, network["up"][layer])
        states = states + linear(gated, network["down"][layer])
    return linear(normed(parts, depth, states), parts.lm_head.detach().float().cpu())


def normed(parts, layer: int, states: Tensor) -> Tensor:
    weight, epsilon = parts.norm_before(layer)
    return rms_norm(states, weight.shape, weight.detach().float().cpu(), epsilon)


def train_heads(network: dict[str, Tensor], parts, states: Tensor, labels: Tensor, seed: int) -> Iterator[Figure]:
    """Next-token cross-entropy of the heads of all layers; the model stays as it is."""
    learnt = [network[name].requires_grad_() for name in ("gate", "up", "down")]
    optimizer = torch.optim.AdamW(learnt, RATE, weight_decay=DECAY)
    torch.manual_seed(seed)
    for epoch in range(EPOCHS):
        sums = torch.zeros(parts.depth - 1)
        batches = torch.randperm(len(labels)).split(BATCH)
        for batch in batches:
            for layer in range(parts.depth - 1):
                loss = cross_entropy(logits_of(network, parts, layer, states[layer, batch]), labels[batch])
                loss.backward()
                sums[layer] += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        losses = {f"head of layer {layer}": float(loss) / len(batches) for layer, loss in enumerate(sums)}
        yield Figure("scalar", "loss in nats", {"x": epoch + 1, "axis": "epoch", "series": losses})


@torch.no_grad()
def first_right(network: dict[str, Tensor], parts, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The states [layers, n, d], and the class of each layer and token [layers, n] by the first right layer."""
    hits = torch.stack(
        [
            torch.cat(
                [
                    logits_of(network, parts, layer, states[layer, part]).argmax(-1) == labels[part]
                    for part in torch.arange(len(labels)).split(BATCH)
                ]
            )
            for layer in range(parts.depth)
        ]
    )
    return states, classes_of(hits)


def classes_of(hits: Tensor) -> Tensor:
    """Classes [layers, n] of hits [layers, n]: stop where no layer is right, exit from the first right one on, else
    continue.
    """
    reached = hits.cumsum(0) > 0
    return torch.where(hits.any(0), torch.where(reached, EXIT, 2), STOP)


def train_controller(network: dict[str, Tensor], train: tuple, test: tuple) -> Iterator[Figure | Note]:
    """Cross-entropy of the classes at every layer, weighted by the number of the layer."""
    states, classes = train
    weights = torch.arange(1, len(states) + 1).float()
    weights /= weights.sum()
    controller = network["controller"].requires_grad_()
    optimizer = torch.optim.AdamW([controller], RATE)
    for _ in range(EPOCHS * 2):
        for batch in torch.randperm(classes.shape[1]).split(BATCH):
            losses = [cross_entropy(linear(s[batch], controller), c[batch]) for s, c in zip(states, classes)]
            (torch.stack(losses) * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    states, classes = test
    found = linear(states, controller.detach()).argmax(-1)
    right = ", ".join(f"{share:.0%}" for share in (found == classes).float().mean(1).tolist())
    exits = ", ".join(f"{share:.0%}" for share in (classes == EXIT).float().mean(1).tolist())
    yield Note(f"Held-out tokens that some layer up to the first, second, ... predicts: {exits}.")
    yield Note(f"Decisions of the controller that are right, by layer: {right}.")
