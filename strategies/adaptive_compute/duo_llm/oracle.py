"""The oracle of Duo-LLM: for every token of a given text, the best route among all of them."""
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

from torch import Tensor

from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import TokenTree
from playground.errors import Refusal
from playground.events import Figure
from strategies.adaptive_compute.duo_llm import BIG, SMALL, DuoLlm

MOST_LAYERS = 12  # 4,096 routes
SHOWN = 32  # newest tokens in the picture


class GivenRoutes(DuoLlm):
    """The last rows of a forward take the routes in `given`, all others the large networks."""

    given: tuple[str, ...] = ()

    def begin(self, parts, weights):
        if parts.depth > MOST_LAYERS:
            raise Refusal(
                f"The oracle tries every route, which it does for at most {MOST_LAYERS} layers; the model has "
                f"{parts.depth}: choose a smaller model.",
                "duo_oracle",
            )
        super().begin(parts, weights)
        self._told = True

    def route(self, layer, hidden, positions):
        whole = len(positions) - len(self.given)
        return [BIG] * whole + [route[layer] for route in self.given]

    def explain(self, choices, row, generated):
        yield from ()


class BestRoutes(NamedTuple):
    """What the routes of one token do to the loss of the token that follows, in nats."""

    losses: list[float]  # the lowest loss with at most 0, 1, ... large networks
    small: float  # the loss with small networks alone
    large: float  # with large ones alone
    route: str  # the best of all

    @classmethod
    def of(cls, routes: tuple[str, ...], losses: list[float]) -> "BestRoutes":
        """Fewer large networks at a tie, then the earlier route."""
        ranked = sorted(zip(losses, (route.count(BIG) for route in routes), routes))
        most = [min(loss for loss, large, _ in ranked if large <= count) for count in range(len(routes[0]) + 1)]
        by_route = dict(zip(routes, losses))
        depth = len(routes[0])
        return cls(most, by_route[SMALL * depth], by_route[BIG * depth], ranked[0][2])


class DuoOracle(Decoder):
    """Write a given text, and find for each token the route through large and small FFNs that best predicts the next.

    An analysis, not a way to decode: it knows the token that follows. All 2^L routes of a token are rows of one forward
    over copies of it, whose context has run the large networks only. The lowest loss with at most b large networks, b
    from 0 to L, shows what more computation is worth for this token; its difficulty is the loss with small networks
    alone minus the lowest. The minimum over so many routes falls for any label, so the same search for a random token
    is shown as a control. The small networks are those of `duo_llm`, fitted by `python -m playground fit duo_llm`.
    Alizadeh et al. 2024, arXiv 2410.10846.
    """

    name, title, paper, sheet = "duo_oracle", "Oracle of routes (Duo-LLM)", "2410.10846", "adaptive-compute/duo-llm"
    guarantee, reconstruction, sure = ("heuristic",), True, "medium"
    refuses = ("sampler", "constraint", "cache_policy", "compute_policy")
    whole_answers = True

    text: str = knob("The red fox runs to the lake.", multiline=True, help="the text whose tokens are examined")

    _columns = ()  # token and best route of the newest tokens

    def check(self):
        if not self.text.strip():
            raise Refusal("The oracle examines a given text: enter one.", "text")

    def toggles(self):
        self._policy = GivenRoutes(mode="big")
        return [self._policy]

    def decode(self, lm: Lane) -> Iterator:
        routes = tuple(map("".join, product(BIG + SMALL, repeat=lm.depth)))
        rows = yield lm.prefill()
        label = lm.spell(self.text)
        for token, following in zip(label, [*label[1:], None]):
            if following is not None:
                tree = TokenTree(self.name)
                for _ in routes:
                    tree.add(token)
                self._policy.given = routes
                found = yield lm.extend(tree)
                self._policy.given = ()
                yield from self._shown(lm, token, routes, found.raw[-len(routes):].log_softmax(-1), following)
            yield lm.keep(lm.choose(rows, token))
            rows = (yield lm.extend()) if following is not None else rows

    def _shown(self, lm: Lane, token: int, routes: tuple[str, ...], logp: Tensor, following: int) -> Iterator:
        best = BestRoutes.of(routes, (-logp[:, following]).tolist())
        other = Random(lm.generated).randrange(logp.shape[1])
        control = -logp[:, other]
        labels = [f"at most {count} large" for count in range(len(best.losses))]
        yield Figure("bars", "lowest loss of the next token, in nats", {"labels": labels, "values": best.losses})
        series = {"difficulty": best.small - min(best.losses), "gain over all large": best.large - min(best.losses),
                  "gain for a random token": float(control[routes.index(BIG * lm.depth)] - control.min())}
        yield Figure("scalar", "what the best route gains, in nats", {"x": lm.generated, "series": series})
        self._columns = (*self._columns, (lm.piece(token), best.route))[-SHOWN:]
        pieces, taken = zip(*self._columns)
        values = [[float(route[layer] == BIG) for route in taken] for layer in range(lm.depth)]
        names = [f"layer {layer}" for layer in range(lm.depth)]
        yield Figure("matrix", "large networks of the best route",
                     {"rows": names, "columns": list(pieces), "values": values})
