"""Momentum decoding."""
import math
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.repetition import repeat_lengths
from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED, ranked
from playground.errors import Refusal
from playground.events import Event, Figure, Note

LEAST = 1e-12  # below this the logarithm continues as its tangent, so that negative values keep their order


class Momentum(Sampler):
    """Decode greedily while the best token is new to the text; otherwise penalise it by the length of the repeat.

    The score of each of the k most probable tokens is its probability minus alpha times a resistance: zero for a token
    that never occurred, the first number of the list for one that did, the next numbers if it would repeat 2, 3, ...
    tokens in a row. The best is chosen; if another sampler draws, it draws by these scores. alpha = 0 or k = 1 is
    greedy. The released code also contains 1 2 3 4 5, 1 1 2 3 4 and 0 0 0 5 5; we could not check which list the paper
    uses. Lan et al. 2022, arXiv 2212.02175.
    """

    name, title, paper, sheet = "momentum", "Momentum decoding", "2212.02175", "sampling/momentum"
    rank, draws = 60, False
    guarantee, sure = ("collapses",), "medium"

    k: int = knob(5, 1, 50, step=1, help="candidates; 1 is greedy")
    alpha: float = knob(0.2, 0.0, 1.0, step=0.05, help="probability subtracted per unit of resistance; 0 is greedy")
    resistance: str = knob(
        "1 3 4 5 5",
        help="of a token that occurred, then of repeats of 2, 3, ... tokens; the last also applies to longer ones",
    )
    prompt: bool = knob(True, help="count the tokens of the prompt as visited")

    def check(self) -> None:
        try:
            valid = self.resistances() and all(map(math.isfinite, self.resistances()))
        except ValueError:
            valid = False
        if not valid:
            raise Refusal(
                f"resistance takes numbers separated by spaces, such as 1 3 4 5 5, not {self.resistance!r}.",
                "resistance",
            )

    def resistances(self) -> list[float]:
        return [float(number) for number in self.resistance.split()]

    def apply(self, scores, histories):
        return torch.stack([self._rescored(row, history) for row, history in zip(scores, histories)])

    def _rescored(self, row: torch.Tensor, history: list[int]) -> torch.Tensor:
        ids, p, depths = self.candidates(row, history)
        values = p - self.alpha * row.new_tensor(self._costs(depths))
        return torch.full_like(row, REMOVED).scatter(0, ids, logarithm(values))

    def candidates(self, row: torch.Tensor, history: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The k most probable tokens of a row [V], their probabilities, and the lengths of the repeats they would make.

        The length is 0 for a new token.
        """
        chances = row.softmax(-1)
        p, order = ranked(chances, self.k)
        count = min(self.k, int((row > REMOVED).sum()))
        seen = repeat_lengths(history if self.prompt else history[self.start:], len(self.resistances()) - 1)
        return order[:count], p[:count], [seen[token] + 1 if token in seen else 0 for token in order[:count].tolist()]

    def _costs(self, depths: list[int]) -> list[float]:
        costs = [0.0, *self.resistances()]
        return [costs[depth] for depth in depths]

    def explain(self, scores, history, token) -> Iterator[Event]:
        ids, p, depths = self.candidates(scores, history)
        tokens, place = ids.tolist(), len(history) - self.start
        if token not in tokens:  # a forced token
            return
        kind = "detour" if token != tokens[0] else "greedy, again" if depths[0] else "greedy, new"
        yield Figure("spans", "momentum", {"spans": [[place, place + 1, kind, depths[tokens.index(token)]]]})
        if token != tokens[0]:
            table = [
                [probability, depth, probability - self.alpha * cost]
                for probability, depth, cost in zip(p.tolist(), depths, self._costs(depths))
            ]
            yield Figure(
                "matrix",
                "candidates",
                {"rows": list(map(self.piece, tokens)), "columns": ["p", "repeat", "score"], "values": table},
            )
            if depths[0] > 1:
                yield Note(
                    f"{self.piece(tokens[0])!r} would repeat {depths[0]} tokens; "
                    f"{self.piece(token)!r} was chosen instead."
                )


def logarithm(values: torch.Tensor) -> torch.Tensor:
    """Natural logarithm, continued monotonically to negative values."""
    return torch.where(values > LEAST, values.clamp(min=LEAST).log(), math.log(LEAST) + (values - LEAST) / LEAST)
