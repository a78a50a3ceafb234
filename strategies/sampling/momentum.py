"""Momentum decoding."""
import math
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.repetition import echoes
from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED
from playground.errors import Refusal
from playground.events import Event, Figure, Note

LEAST = 1e-12  # below this the logarithm goes on as its tangent, so that a worth below nothing is still more or less


class Momentum(Sampler):
    """Go on greedily while the best token is new to the text; where it was there before, let it pay for the repeat it
    would make.

    The text so far is a walk among tokens. Of the k most probable, each is worth its probability, less alpha times a
    resistance: nothing for a token that never occurred, the first number of the list for one that did, the next numbers
    where it would repeat 2, 3, ... tokens in a row. The best stays; where another sampler draws, the worth of the k is
    what is drawn by. alpha = 0 or k = 1 is greedy. The released code also had 1 2 3 4 5, 1 1 2 3 4 and 0 0 0 5 5; which
    one the paper prints we could not see. Lan et al. 2022, arXiv 2212.02175.
    """

    name, title, paper, sheet = "momentum", "Momentum decoding", "2212.02175", "sampling/momentum"
    rank, draws = 60, False
    guarantee, sure = ("collapses",), "medium"

    k: int = knob(5, 1, 50, step=1, help="candidates; 1 is greedy")
    alpha: float = knob(0.2, 0.0, 1.0, step=0.05, help="what a resistance of 1 costs, as a probability; 0 is greedy")
    resistance: str = knob(
        "1 3 4 5 5",
        help="of a token that occurred, then of repeating 2, 3, ... tokens in a row; the last holds for longer ones",
    )
    prompt: bool = knob(True, help="the tokens of the prompt count as visited")

    def check(self) -> None:
        try:
            valid = self.resistances() and all(map(math.isfinite, self.resistances()))
        except ValueError:
            valid = False
        if not valid:
            raise Refusal(
                f"resistance takes numbers with spaces between them, such as 1 3 4 5 5, not {self.resistance!r}.",
                "resistance",
            )

    def resistances(self) -> list[float]:
        return [float(number) for number in self.resistance.split()]

    def apply(self, scores, histories):
        return torch.stack([self._weighed(row, history) for row, history in zip(scores, histories)])

    def _weighed(self, row: torch.Tensor, history: list[int]) -> torch.Tensor:
        ids, p, depths = self.candidates(row, history)
        worth = p - self.alpha * row.new_tensor(self._costs(depths))
        return torch.full_like(row, REMOVED).scatter(0, ids, logarithm(worth))

    def candidates(self, row: torch.Tensor, history: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The k most probable tokens of a row [V], their probabilities, and the length of the repeat each would make, 0
        for a new one.
        """
        p, order = row.softmax(-1).sort(descending=True, stable=True)
        count = min(self.k, int((row > REMOVED).sum()))
        seen = echoes(history if self.prompt else history[self.start:], len(self.resistances()) - 1)
        return order[:count], p[:count], [seen[token] + 1 if token in seen else 0 for token in order[:count].tolist()]

    def _costs(self, depths: list[int]) -> list[float]:
        costs = [0.0, *self.resistances()]
        return [costs[depth] for depth in depths]

    def explain(self, scores, history, token) -> Iterator[Event]:
        ids, p, depths = self.candidates(scores, history)
        tokens, place = ids.tolist(), len(history) - self.start
        if token not in tokens:  # it was given from outside
            return
        kind = "detour" if token != tokens[0] else "greedy, again" if depths[0] else "greedy, new"
        yield Figure("spans", "momentum", {"spans": [[place, place + 1, kind, depths[tokens.index(token)]]]})
        if token != tokens[0]:
            table = [
                [chance, depth, chance - self.alpha * cost]
                for chance, depth, cost in zip(p.tolist(), depths, self._costs(depths))
            ]
            yield Figure(
                "matrix",
                "candidates",
                {"rows": list(map(self.piece, tokens)), "columns": ["p", "repeat", "worth"], "values": table},
            )
            if depths[0] > 1:
                yield Note(
                    f"{self.piece(tokens[0])!r} would make a repeat of {depths[0]}, so the text turns to {self.piece(token)!r}."
                )


def logarithm(worth: torch.Tensor) -> torch.Tensor:
    """ln of a worth, which keeps its order below nothing too."""
    return torch.where(worth > LEAST, worth.clamp(min=LEAST).log(), math.log(LEAST) + (worth - LEAST) / LEAST)
