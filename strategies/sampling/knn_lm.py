"""kNN-LM: nearest neighbours in a text."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from playground.engine.sampling import entropy
from playground.errors import Refusal
from playground.events import Event, Figure, Note
from playground.parts.tales import tales
from playground.strategy import Sampler, knob

WINDOW = 128  # tokens of the text that are read together; windows know nothing of each other
LETTERS = 8  # of a text that are looked at for each token that may be read; few tokens are longer
SHOWN = 5  # neighbours
BEFORE = 6  # tokens shown before what a neighbour stored
NEVER = -1e4  # stands for the logarithm of zero, as in the authors' code
SAMPLE = 256  # keys from which the usual distance is judged


@dataclass
class Neighbours:
    """The nearest stored places of n states, nearest first, and what they vote for."""

    distances: Tensor  # [n, k], squared
    at: Tensor  # [n, k], indices into the store
    weights: Tensor  # [n, k]
    p: Tensor  # [n, V]


@dataclass(frozen=True)
class Store:
    """States of places in a text. It does not change, so sequences that fork share it."""

    keys: Tensor  # [N, width]
    ids: list[int]  # the text
    places: Tensor  # [N], index in the text of the token a state was read from
    values: Tensor = field(init=False)  # [N], the token that follows each place
    scale: float = field(init=False)  # usual squared distance from a key to the nearest other

    def __post_init__(self):
        values = torch.tensor(self.ids)[self.places + 1].to(self.keys.device)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "scale", self._usual())

    def _usual(self) -> float:
        some = self.keys[::max(1, len(self.keys) // SAMPLE)]
        distances, _ = self.nearest(some, 2)
        return max(float(distances[:, -1].median()), torch.finfo(self.keys.dtype).tiny)

    def nearest(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Squared distances and indices [n, count] of the nearest keys, without the shortcut that makes a distance of zero inexact."""
        distances = torch.cdist(states.to(self.keys), self.keys, compute_mode="donot_use_mm_for_euclid_dist").square()
        near = distances.to(torch.promote_types(distances.dtype, torch.float32)).topk(min(count, len(self.keys)), largest=False)
        return near.values, near.indices

    def __deepcopy__(self, memo: dict) -> "Store":
        return self


class KNNLM(Sampler):
    """Mix the model's next token with what followed the most similar places of a text.

    Before the run the model reads a text and stores, for each place, what its head read there and the token that came next.
    The k stored states nearest to the present one vote with weights softmax(-distance / T), squared Euclidean distances and T
    in units of the distance between neighbours in the store; (1 - lam) p + lam p_kNN is what goes on. lam = 0 is the model.
    Khandelwal et al. 2019, arXiv 1911.00172; that it does not improve open-ended text is the finding of Wang et al. 2023, arXiv
    2305.14625, and the two entropies show it: that of the neighbours grows faster. Ours: the key is the head's input, not that
    of the last feed-forward block.
    """

    name, title, paper, sheet = "knn_lm", "kNN-LM", "1911.00172", "sampling/knn-lm"
    stage, draws, needs, guarantee = "mix", False, ("hidden_states",), ("collapses",)

    lam: float = knob(0.25, 0.0, 1.0, step=0.05, help="weight of the neighbours; 0 is the model alone, 1 the neighbours alone")
    k: int = knob(32, 1, 1024, step=1, help="neighbours that vote")
    t: float = knob(1.0, 0.05, 20.0, step=0.05, help="temperature of the votes, in units of the usual distance between neighbours of the store")
    text: str = knob("", multiline=True, file=True, help="text that is read and stored; empty: the bundled tales of the brothers Grimm")
    tokens: int = knob(256, 16, 20000, step=16, help="tokens of the text that are read, at most; they are read anew in every run")

    def prepare(self, lm) -> Iterator:
        if not self.lam:
            return
        ids = lm.spell((self.text.strip() or tales())[:self.tokens * LETTERS])[:self.tokens]
        size, keys, places = min(WINDOW, lm.context), [], []
        for start in range(0, len(ids), size):
            for request in lm.reading(ids[start:start + size]):
                piece = yield request
                keys.append(piece.hidden)
            places += range(start, min(start + size, len(ids)) - 1)  # nothing follows the last of a window
        if not places:
            raise Refusal("knn_lm needs a text of at least two tokens: give a longer one, or leave it empty.", "text")
        self.store = Store(torch.cat(keys)[places], ids, torch.tensor(places))
        yield Note(f"{len(places)} places of the text are stored, each with the token that follows it.")

    def mix(self, rows):
        logp = rows["target"].log_softmax(-1)
        if not self.lam:
            return rows["target"]
        near = self.neighbours(rows["hidden"], logp.shape[-1])
        return torch.logaddexp(_log(1 - self.lam) + logp, _log(self.lam) + near.p.to(logp).log().clamp(min=NEVER))

    def neighbours(self, states: Tensor, vocabulary: int) -> Neighbours:
        """Of states [n, width]."""
        distances, at = self.store.nearest(states, self.k)
        weights = (-distances / (self.t * self.store.scale)).softmax(-1)
        p = torch.zeros(len(states), vocabulary, dtype=weights.dtype, device=weights.device)
        return Neighbours(distances, at, weights, p.scatter_add(1, self.store.values[at], weights))

    def observe(self, rows, token, position) -> Iterator[Event]:
        if not self.lam:
            return
        near = self.neighbours(rows["hidden"][None], len(rows["target"]))
        p, mixed = rows["target"].softmax(-1), self.mix({name: row[None] for name, row in rows.items()})[0]
        sizes = {"of the model's row": float(entropy(rows["target"])), "of the neighbours": float(torch.special.entr(near.p).sum())}
        yield Figure("scalar", "entropy, nats", {"x": position, "series": sizes, "lines": {"ln k": math.log(min(self.k, len(self.store.keys)))}})
        yield Figure("scalar", "nearest distance", {"x": position, "series": {"squared distance": float(near.distances[0, 0])},
                                                    "lines": {"usual": self.store.scale}})
        chances = {"model": float(p[token]), "neighbours": float(near.p[0, token]), "mixed": float(mixed[token].exp())}
        yield Figure("scalar", "probability of the chosen token", {"x": position, "series": chances})
        labels = [self._quoted(int(at)) for at in near.at[0, :SHOWN]]
        yield Figure("bars", "nearest places, by weight", {"labels": labels, "values": near.weights[0, :SHOWN].tolist()})
        if int(p.argmax()) != int(mixed.argmax()):
            yield Note("The neighbours turn the choice: without them another token would come first.")

    def _quoted(self, at: int) -> str:
        """A stored place with the token that follows it in brackets."""
        ids, place = self.store.ids, int(self.store.places[at])
        before = "".join(map(self.piece, ids[max(0, place + 1 - BEFORE):place + 1]))
        return f"{before}[{self.piece(ids[place + 1])}]"


def _log(share: float) -> float:
    return math.log(share) if share > 0 else NEVER
