"""Which experts of a mixture each token used, and how close the choice was."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.special import entr

from playground.algorithms.overlays.token_figures import by_token, matrix, numbered, shaded
from playground.contract import ReadsExperts, RoutedRows, knob
from playground.events import Note

CHANNELS = ("gate", "entropy", "margin")
MEANS = {
    "gate": "share of the first expert",
    "entropy": "entropy of the router, 1 is uniform",
    "margin": "margin of the last chosen expert",
}
LEAST = 12  # tokens of a class for which a lift is drawn


class MoERouting(ReadsExperts):
    """Show which experts of a mixture each token used, how evenly they are used, and how close each choice was.

    Indices and gates are those that the router itself handed to the experts, whether it normalises them or not. A token
    has the colour of the row that read it: the share of its first expert among its gates, the normalised entropy of the
    router's probabilities, or their margin between the last chosen and the first expert left out. The balance is the
    number of experts times the sum of load and mean probability; 1 is even. The lift of an expert for a class of tokens
    (digits, punctuation, new words, parts of words) is how much more often it runs for them; beside it stands the
    largest lift among shuffled tokens. It correlates: `scmoe` runs other experts. The view of Yang et al. 2025, arXiv
    2503.07639, without their MoE-X models, whose experts are made sparse by training.
    """

    name, title, paper, sheet = "moe_routing", "Routing of experts", "2503.07639", "overlays/moe-routing"

    channel: str = knob("gate", choices=CHANNELS, help="what colours the text")
    layer: int = knob(-1, -1, 255, step=1, help="router that colours the text, from 0; -1 is the middle one")

    _text = None

    def begin(self, text, model):
        self._text, self._routed = text, {}

    def read_experts(self, number, first, rows):
        exact = RoutedRows(rows.logits.double().cpu(), rows.gates.double().cpu(), rows.chosen.cpu())
        self._routed.setdefault(number, []).append(exact)

    def draw(self):
        if not self._routed or self._text.generated < 1:
            return
        layers = [RoutedRows(*map(torch.cat, zip(*pieces))) for _, pieces in sorted(self._routed.items())]
        painted = min(self.layer, len(layers) - 1) if self.layer >= 0 else len(layers) // 2
        rows, own = layers[painted], slice(self._text.start, None)
        yield shaded(f"{MEANS[self.channel]}, router {painted}", self.measure(rows)[own].tolist(), labels(rows)[own])
        experts, routers = numbered("expert", rows.logits.shape[1]), numbered("router", len(layers))
        yield matrix("load: share of tokens by expert", routers, experts, [load(each).tolist() for each in layers])
        first = [each.chosen.gather(1, each.gates.argmax(1, keepdim=True))[own, 0].double().tolist() for each in layers]
        yield by_token("first expert by router and token", routers, self._text.pieces(), first)
        yield matrix(f"experts that ran together, router {painted}", experts, experts, together(rows).tolist())
        yield from self._lifts(rows, experts, painted)
        yield Note(f"Experts of router {painted}: the set differs from that of the token before at "
                   f"{100 * switch_rate(rows):.0f} % of the tokens; balance {balance(rows):.2f} (1 is even).")

    def measure(self, rows: RoutedRows) -> Tensor:
        """The channel of each row, [n], from 0 to 1; NaN where no expert is left out."""
        if self.channel == "gate":
            return rows.gates.amax(1) / rows.gates.sum(1)
        p = rows.logits.softmax(1)
        if self.channel == "entropy":
            return entr(p).sum(1) / torch.tensor(float(p.shape[1])).log()
        ordered, used = p.sort(1, descending=True).values, rows.chosen.shape[1]
        return ordered[:, used - 1] - ordered[:, used] if used < p.shape[1] else p.new_full((len(p),), torch.nan)

    def _lifts(self, rows: RoutedRows, experts: list[str], painted: int):
        """The lift of each expert for each class of tokens that is frequent enough, and of shuffled tokens."""
        names = [token_class(self._text.piece(token)) for token in self._text.tokens]
        frequent = [name for name in dict.fromkeys(names) if names.count(name) >= LEAST]
        if len(frequent) < 2:
            return
        members = torch.tensor([[name == each for name in names] for each in frequent])
        found = lifts(rows, members)
        yield matrix(f"lift by class of tokens, router {painted}", frequent, experts, found.tolist())
        shuffled = members[:, torch.randperm(len(names), generator=torch.Generator().manual_seed(0))]
        yield Note(
            f"The largest lift is {found.max():.2f}, and {lifts(rows, shuffled).max():.2f} with shuffled tokens: an "
            "expert stands for a class of tokens only as far as the first exceeds the second."
        )


def ran(rows: RoutedRows) -> Tensor:
    """Whether each expert ran for each row, [n, experts] of 0 and 1."""
    return torch.zeros_like(rows.logits).scatter_(1, rows.chosen, 1.0)


def load(rows: RoutedRows) -> Tensor:
    """Share of rows that each expert ran for, [experts]; together as many as run for a row."""
    return ran(rows).mean(0)


def together(rows: RoutedRows) -> Tensor:
    """Share of rows for which both of two experts ran, [experts, experts]; the diagonal is the load."""
    return ran(rows).T @ ran(rows) / len(rows.chosen)


def balance(rows: RoutedRows) -> float:
    """The number of experts times the sum over experts of their share of all choices and their mean probability."""
    shares = load(rows) / rows.chosen.shape[1]
    return float(rows.logits.shape[1] * (shares * rows.logits.softmax(1).mean(0)).sum())


def switch_rate(rows: RoutedRows) -> float:
    """Share of rows whose experts are not those of the row before; 0 for a single row."""
    sets = ran(rows)
    return float((sets[1:] != sets[:-1]).any(1).double().mean()) if len(sets) > 1 else 0.0


def lifts(rows: RoutedRows, members: Tensor) -> Tensor:
    """How often each expert runs for the rows of each class, over how often it runs, [classes, experts].

    `members` says which rows belong to a class, bool [classes, n]. 1 where an expert never runs.
    """
    weights = members.double()
    inside, everywhere = weights @ ran(rows) / weights.sum(1, keepdim=True), load(rows)
    return torch.where(everywhere > 0, inside / everywhere.clamp(min=1e-12), 1.0)


def token_class(piece: str) -> str:
    bare = piece.strip()
    if not bare or not any(map(str.isalnum, bare)):
        return "punctuation, space"
    if bare.isdigit():
        return "digits"
    return "new word" if piece[0].isspace() else "part of a word"


def labels(rows: RoutedRows) -> list[str]:
    """For each row its experts with their gates, and the one that was nearly chosen."""
    left_out = rows.logits.masked_fill(ran(rows) > 0, -torch.inf)
    nearly = left_out.argmax(1).tolist() if rows.chosen.shape[1] < rows.logits.shape[1] else None
    named = []
    for at, (chosen, gates) in enumerate(zip(rows.chosen.tolist(), rows.gates.tolist())):
        used = ", ".join(f"{expert} ({gate:.2f})" for gate, expert in sorted(zip(gates, chosen), reverse=True))
        named.append(f"experts {used}" + (f"; next would be {nearly[at]}" if nearly else ""))
    return named
