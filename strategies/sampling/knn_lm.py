"""kNN-LM: nearest neighbours in a text."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.fairy_tales import tales
from playground.contract import Sampler, knob
from playground.engine.sampling import entropy
from playground.errors import Refusal
from playground.events import Event, Figure, Note

WINDOW = 128  # tokens of the text that are read together; windows know nothing of each other
LETTERS = 8  # of a text that are looked at for each token that may be read; few tokens are longer
SHOWN = 5  # neighbours
BEFORE = 6  # tokens shown before what a neighbour stored
NEVER = -1e4  # stands for the logarithm of zero, as in the authors' code
SAMPLE = 256  # keys from which the usual distance is judged
FEW = 0.05  # share of the tokens that gain most
GAINS = (0.0, 0.5, 1.0, 2.0, 4.0)  # nats, where the bars of what tokens gain begin
GROWN = 8  # tokens from which on a slope says something
MODEL, NEAR = "of the model's row", "of the neighbours"


@dataclass
class Neighbours:
    """The nearest stored places of n states, nearest first, and what they vote for."""

    distances: Tensor  # [n, k], squared
    at: Tensor  # [n, k], indices into the store
    weights: Tensor  # [n, k]
    p: Tensor  # [n, V]

    @property
    def entropy(self) -> Tensor:
        """Of what they vote for, in nats, [n]."""
        return torch.special.entr(self.p).sum(-1)

    @property
    def doubt(self) -> Tensor:
        """Their entropy as a share of ln k, the most it can be, [n]."""
        return self.entropy / max(math.log(self.weights.shape[-1]), torch.finfo(self.p.dtype).tiny)


@dataclass(frozen=True)
class Datastore:
    """States of places in a text. It does not change, so sequences that fork share it."""

    keys: Tensor  # [N, width]
    ids: list[int]  # the text
    places: Tensor  # [N], index in the text of the token a state was read from
    values: Tensor = field(init=False)  # [N], the token that follows each place
    scale: float = field(init=False)  # usual squared distance from a key to the nearest other

    def __post_init__(self):
        wide = torch.promote_types(self.keys.dtype, torch.float32)  # in short numbers near keys would lie equally far
        object.__setattr__(self, "keys", self.keys.to(wide))
        values = torch.tensor(self.ids)[self.places + 1].to(self.keys.device)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "scale", self._usual())

    def _usual(self) -> float:
        some = self.keys[::max(1, len(self.keys) // SAMPLE)]
        distances, _ = self.nearest(some, 2)
        return max(float(distances[:, -1].median()), torch.finfo(self.keys.dtype).tiny)

    def nearest(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Squared distances and indices [n, count] of the nearest keys, without the shortcut that makes a distance of
        zero inexact.
        """
        distances = torch.cdist(states.to(self.keys), self.keys, compute_mode="donot_use_mm_for_euclid_dist").square()
        near = distances.topk(min(count, len(self.keys)), largest=False)
        return near.values, near.indices

    def __deepcopy__(self, memo: dict) -> "Datastore":
        return self


class Read(NamedTuple):
    """A text as the model read it."""

    logits: Tensor  # [n, V], after each token
    hidden: Tensor  # [n, width]
    places: list[int]  # of the tokens that are followed by one the model was shown


@dataclass(frozen=True)
class Effects:
    """What the neighbours do to the tokens of a text, [n] each and in nats. The text is given, not drawn."""

    logps: Tensor  # of the model alone
    gains: Tensor  # log-probability with the neighbours less that without
    model: Tensor  # entropy of its rows
    near: Tensor  # entropy of the neighbours
    distances: Tensor  # squared, to the nearest

    def split(self) -> Figure:
        """Perplexity and entropy where the neighbours help and where they hurt, and where each of the two is sure and
        where not.
        """
        helped, unsure, torn = self.gains > 0, self.model > self.model.median(), self.near > self.near.median()
        parts = {"all": helped | True, "helped": helped, "hurt": ~helped, "model sure": ~unsure, "model unsure": unsure,
                 "neighbours sure": ~torn, "neighbours unsure": torn}
        rows = {name: self._row(part) for name, part in parts.items() if bool(part.any())}
        columns = ["tokens", "mean gain", "perplexity", "with neighbours", "entropy", "entropy of neighbours"]
        return Figure(
            "matrix",
            "true text: where neighbours help and hurt",
            {"rows": list(rows), "columns": columns, "values": list(rows.values())},
        )

    def _row(self, part: Tensor) -> list[float]:
        gain, surprise = float(self.gains[part].mean()), -float(self.logps[part].mean())
        return [
            int(part.sum()),
            gain,
            math.exp(surprise),
            math.exp(surprise - gain),
            float(self.model[part].mean()),
            float(self.near[part].mean()),
        ]

    def histogram(self, wall: float) -> Figure:
        """Tokens by what they gain; none loses more than `wall`, ln(1 - lam)."""
        starts = [-math.inf, wall / 2, *GAINS]
        counts = [int(((self.gains >= a) & (self.gains < b)).sum()) for a, b in zip(starts, [*starts[1:], math.inf])]
        names = [f"lose more than half of {-wall:.2f}, the most there is", "lose less"] + [
            f"gain {gain:g} or more" for gain in GAINS
        ]
        return Figure("bars", "true text: tokens by what they gain, nats", {"labels": names, "values": counts})

    def told(self) -> str:
        best = self.gains.sort(descending=True).values[:max(1, round(FEW * len(self.gains)))]
        surprise, gain = -float(self.logps.mean()), float(self.gains.mean())
        return (
            f"On {len(self.gains)} tokens of text that follows what was stored, the neighbours hurt {float((self.gains < 0).double().mean()):.0%}. "
            f"The mean gain is {gain:.3f} nats, that of the best {FEW:.0%} {float(best.mean()):.2f}; perplexity {math.exp(surprise):.1f}, "
            f"with neighbours {math.exp(surprise - gain):.1f}."
        )


def slope(places: list[int], values: list[float]) -> float:
    """Of the straight line nearest to the values in least squares, a token."""
    middle, mean = sum(places) / len(places), sum(values) / len(values)
    return sum((x - middle) * (y - mean) for x, y in zip(places, values)) / sum((x - middle) ** 2 for x in places)


class KNNLM(Sampler):
    """Mix the model's next token with what followed the most similar places of a text.

    Before the run the model reads a text and stores, for each place, what its head read there and the token that came
    next. The k stored states nearest to the present one vote with weights softmax(-distance / T), squared Euclidean
    distances and T in units of the distance between neighbours in the store; (1 - lam) p + lam p_kNN is what goes on.
    lam = 0 is the model. Khandelwal et al. 2019, arXiv 1911.00172. That it does not improve open-ended text is the
    finding of Wang et al. 2023, arXiv
    2305.14625, and two things show why. On text that the store does not know, most tokens lose a little, never more
         than
    ln(1 - lam), and a few gain much. And they found that while a model writes, the entropy of the neighbours grows
    faster than its own; both slopes are shown, beside those on text by a person, which is read beforehand. Ours: the
    key is the head's input, not that of the last feed-forward block; `adaptive`, which trusts neighbours that agree.
    """

    name, title, paper, sheet = "knn_lm", "kNN-LM", "1911.00172", "sampling/knn-lm"
    stage, draws, needs, guarantee = "mix", False, ("hidden_states",), ("collapses",)

    lam: float = knob(
        0.25, 0.0, 1.0, step=0.05, help="weight of the neighbours; 0 is the model alone, 1 the neighbours alone"
    )
    k: int = knob(32, 1, 1024, step=1, help="neighbours that vote")
    t: float = knob(
        1.0,
        0.05,
        20.0,
        step=0.05,
        help="temperature of the votes, in units of the usual distance between neighbours of the store",
    )
    text: str = knob(
        "",
        multiline=True,
        file=True,
        help="text that is read and stored; empty: the bundled tales of the brothers Grimm",
    )
    tokens: int = knob(
        256, 16, 20000, step=16, help="tokens of the text that are stored, at most; they are read anew in every run"
    )
    held: int = knob(
        64,
        0,
        2048,
        step=16,
        help="tokens of the text after those, on which the neighbours are held against the model first; 0 none",
    )
    adaptive: bool = knob(False, help="trust neighbours less the less they agree: lam times (1 - their entropy / ln k)")

    def __post_init__(self):
        self.seen = []  # (position, entropy of the model, of the neighbours) of what was written
        # lines to compare with: what the same figures say of text by a person
        self.true_slopes, self.true_distance = {}, {}

    def prepare(self, lm) -> Iterator:
        if not self.lam:
            return
        ids = lm.spell((self.text.strip() or tales())[:(self.tokens + self.held) * LETTERS])
        if len(ids) < 2:
            raise Refusal("knn_lm needs a text of at least two tokens: give a longer one, or leave it empty.", "text")
        read = yield from self._read(lm, ids[:self.tokens])
        self.store = Datastore(read.hidden[read.places], ids[:self.tokens], torch.tensor(read.places))
        yield Note(f"{len(read.places)} places of the text are stored, each with the token that follows it.")
        held = ids[self.tokens:self.tokens + self.held]
        if len(held) > 1:
            yield from self._compared(held, (yield from self._read(lm, held)))

    def _read(self, lm, ids: list[int]) -> Iterator:
        """A text as the model reads it, window by window."""
        size, pieces, places = min(WINDOW, lm.context), [], []
        for start in range(0, len(ids), size):
            for request in lm.reading(ids[start:start + size]):
                pieces.append((yield request))
            places += range(start, min(start + size, len(ids)) - 1)  # nothing follows the last of a window
        return Read(
            torch.cat([piece.logits for piece in pieces]), torch.cat([piece.hidden for piece in pieces]), places
        )

    def _compared(self, ids: list[int], read: "Read") -> Iterator[Event]:
        """What the neighbours do to a text that neither they nor the model wrote."""
        effects = self.effects(
            read.logits[read.places], read.hidden[read.places], [ids[place + 1] for place in read.places]
        )
        for place, model, near in zip(read.places, effects.model.tolist(), effects.near.tolist()):
            yield Figure(
                "scalar",
                "true text: entropy, nats",
                {"x": place, "axis": "token of the text", "series": {MODEL: model, NEAR: near}, "lines": self._most},
            )
        yield effects.histogram(_log(1 - self.lam))
        yield effects.split()
        yield Note(effects.told())
        self.true_distance = {"true text, on average": float(effects.distances.mean())}
        if len(read.places) >= GROWN:
            self.true_slopes = {
                f"{name}, true text": slope(read.places, values.tolist())
                for name, values in ((MODEL, effects.model), (NEAR, effects.near))
            }

    def effects(self, logits: Tensor, states: Tensor, tokens: list[int]) -> Effects:
        """Of rows [n, V], with the states [n, width] they were read from, on the tokens that follow."""
        near, followed = self.neighbours(states, logits.shape[-1]), torch.tensor(tokens, device=logits.device)[:, None]
        logp, mixed = logits.log_softmax(-1), self.mix({"target": logits, "hidden": states})
        model, mixed = logp.gather(1, followed)[:, 0], mixed.gather(1, followed)[:, 0]
        return Effects(model, mixed - model, torch.special.entr(logp.exp()).sum(-1), near.entropy, near.distances[:, 0])

    @property
    def _most(self) -> dict[str, float]:
        """The largest entropy that so many neighbours can have."""
        return {"ln k": math.log(min(self.k, len(self.store.keys)))}

    def mix(self, rows):
        logp = rows["target"].log_softmax(-1)
        if not self.lam:
            return rows["target"]
        near = self.neighbours(rows["hidden"], logp.shape[-1])
        lam = self._share(near).to(logp)[:, None]
        return torch.logaddexp(
            (1 - lam).log().clamp(min=NEVER) + logp, lam.log().clamp(min=NEVER) + near.p.to(logp).log().clamp(min=NEVER)
        )

    def _share(self, near: Neighbours) -> Tensor:
        """Weight of the neighbours in each row, [n], at most `lam`."""
        return self.lam * (1 - near.doubt).clamp(0, 1) if self.adaptive else torch.full_like(near.entropy, self.lam)

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
        logp, mixed = (
            rows["target"].log_softmax(-1).clamp(min=NEVER),
            self.mix({name: row[None] for name, row in rows.items()})[0],
        )
        yield from self._uncertain(position, float(entropy(rows["target"])), float(near.entropy))
        yield Figure(
            "scalar",
            "nearest distance",
            {
                "x": position,
                "series": {"squared distance": float(near.distances[0, 0])},
                "lines": {"usual": self.store.scale, **self.true_distance},
            },
        )
        chances = {
            "model": float(logp[token].exp()),
            "neighbours": float(near.p[0, token]),
            "mixed": float(mixed[token].exp()),
        }
        yield Figure("scalar", "probability of the chosen token", {"x": position, "series": chances})
        yield Figure(
            "scalar",
            "what the chosen token gains, nats",
            {
                "x": position,
                "series": {"gain": float(mixed[token] - logp[token])},
                "lines": {"ln(1 - lam)": _log(1 - self.lam)} if self.lam < 1 else {},
            },
        )
        labels = [self._quoted(int(at)) for at in near.at[0, :SHOWN]]
        yield Figure(
            "bars", "nearest places, by weight", {"labels": labels, "values": near.weights[0, :SHOWN].tolist()}
        )
        if int(logp.argmax()) != int(mixed.argmax()):
            yield Note("The neighbours turn the choice: without them another token would come first.")

    def _uncertain(self, position: int, model: float, near: float) -> Iterator[Event]:
        """Both entropies, and how fast each grows with the text: what was taken back counts no more."""
        self.seen = [*(seen for seen in self.seen if seen[0] < position), (position, model, near)]
        yield Figure(
            "scalar", "entropy, nats", {"x": position, "series": {MODEL: model, NEAR: near}, "lines": self._most}
        )
        if len(self.seen) >= GROWN:
            places, *values = map(list, zip(*self.seen))
            yield Figure(
                "scalar",
                "growth of the entropy so far, nats a token",
                {
                    "x": position,
                    "series": {name: slope(places, each) for name, each in zip((MODEL, NEAR), values)},
                    "lines": self.true_slopes,
                },
            )

    def _quoted(self, at: int) -> str:
        """A stored place with the token that follows it in brackets."""
        ids, place = self.store.ids, int(self.store.places[at])
        before = "".join(map(self.piece, ids[max(0, place + 1 - BEFORE):place + 1]))
        return f"{before}[{self.piece(ids[place + 1])}]"


def _log(share: float) -> float:
    return math.log(share) if share > 0 else NEVER
