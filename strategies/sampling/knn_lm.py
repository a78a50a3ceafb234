"""kNN-LM: nearest neighbours in a datastore."""
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from playground.algorithms.fairy_tales import tales
from playground.contract import Lane, Sampler, knob
from playground.engine.sampling import entropy, first_largest
from playground.errors import Refusal
from playground.events import Event, Figure, Note

WINDOW = 128  # tokens per forward; windows are independent of each other
LETTERS = 8  # characters tokenized per token to read; few tokens are longer
SHOWN = 5  # neighbours
BEFORE = 6  # tokens shown before the token stored by a neighbour
NEVER = -1e4  # replaces the logarithm of zero, as in the authors' code
SAMPLE = 256  # keys from which the typical distance is estimated
FEW = 0.05  # share of tokens with the largest gains that is summarised
GAINS = (0.0, 0.5, 1.0, 2.0, 4.0)  # lower edges of the bins of gains, nats
GROWN = 8  # minimum tokens for a slope
MODEL, NEAR = "of the model", "of the neighbours"


@dataclass
class Neighbours:
    """The nearest stored entries of n states, nearest first, and their distribution over tokens."""

    distances: Tensor  # [n, k], squared
    at: Tensor  # [n, k], indices into the datastore
    weights: Tensor  # [n, k]
    p: Tensor  # [n, V]

    @property
    def entropy(self) -> Tensor:
        """Entropy of their distribution, in nats, [n]."""
        return torch.special.entr(self.p).sum(-1)

    @property
    def doubt(self) -> Tensor:
        """Their entropy as a share of its maximum ln k, [n]."""
        return self.entropy / max(math.log(self.weights.shape[-1]), torch.finfo(self.p.dtype).tiny)


@dataclass(frozen=True)
class Datastore:
    """Hidden states of a text and the tokens that follow. Immutable, so forked sequences share it."""

    keys: Tensor  # [N, width]
    ids: list[int]  # the text
    places: Tensor  # [N], index in the text of each key's token
    values: Tensor = field(init=False)  # [N], the token that follows each key
    scale: float = field(init=False)  # median squared distance from a key to its nearest neighbour

    def __post_init__(self):
        wide = torch.promote_types(self.keys.dtype, torch.float32)  # half precision collapses small distances
        object.__setattr__(self, "keys", self.keys.to(wide))
        values = torch.tensor(self.ids)[self.places + 1].to(self.keys.device)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "scale", self._typical())

    def _typical(self) -> float:
        sample = self.keys[::max(1, len(self.keys) // SAMPLE)]
        distances, _ = self.nearest(sample, 2)
        return max(float(distances[:, -1].median()), torch.finfo(self.keys.dtype).tiny)

    def nearest(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Squared distances and indices [n, count] of the nearest keys; computed without matmul, so that 0 is exact."""
        distances = torch.cdist(states.to(self.keys), self.keys, compute_mode="donot_use_mm_for_euclid_dist").square()
        near = distances.topk(min(count, len(self.keys)), largest=False)
        return near.values, near.indices

    def __deepcopy__(self, memo: dict) -> "Datastore":
        return self


@dataclass(frozen=True)
class Effects:
    """Effects of the neighbours on the tokens of a given text, [n] each, in nats except the distances."""

    logps: Tensor  # of the model alone
    gains: Tensor  # log-probability with the neighbours minus that without
    model: Tensor  # entropy of the model
    near: Tensor  # entropy of the neighbours
    distances: Tensor  # squared, to the nearest

    @classmethod
    def join(cls, parts: list["Effects"]) -> "Effects":
        """The effects on one text, from those on its pieces."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def split(self) -> Figure:
        """Perplexity and entropy by whether the neighbours help, and by both entropies."""
        helped, unsure, split = self.gains > 0, self.model > self.model.median(), self.near > self.near.median()
        parts = {"all": helped | True, "helped": helped, "hurt": ~helped, "model sure": ~unsure, "model unsure": unsure,
                 "neighbours sure": ~split, "neighbours unsure": split}
        rows = {name: self._row(part) for name, part in parts.items() if bool(part.any())}
        columns = ["tokens", "mean gain", "perplexity", "with neighbours", "entropy", "entropy of neighbours"]
        table = {"rows": list(rows), "columns": columns, "values": list(rows.values())}
        return Figure("matrix", "held-out text: where neighbours help and hurt", table)

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

    def histogram(self, lowest: float) -> Figure:
        """Histogram of gains; none is below `lowest`, ln(1 - lam)."""
        starts = [-math.inf, lowest / 2, *GAINS]
        counts = [int(((self.gains >= a) & (self.gains < b)).sum()) for a, b in zip(starts, [*starts[1:], math.inf])]
        losses = [f"loss above half of the maximum {-lowest:.2f}", "smaller loss"]
        names = losses + [f"gain of {gain:g} or more" for gain in GAINS]
        return Figure("bars", "held-out text: tokens by gain, nats", {"labels": names, "values": counts})

    def summary(self) -> str:
        best = self.gains.sort(descending=True).values[:max(1, round(FEW * len(self.gains)))]
        surprise, gain = -float(self.logps.mean()), float(self.gains.mean())
        hurt = float((self.gains < 0).float().mean())
        return (
            f"Of {len(self.gains)} held-out tokens after the stored text, the neighbours hurt {hurt:.0%}. The mean "
            f"gain is {gain:.3f} nats, that of the best {FEW:.0%} {float(best.mean()):.2f}; perplexity "
            f"{math.exp(surprise):.1f}, with neighbours {math.exp(surprise - gain):.1f}."
        )


def slope(places: list[int], values: list[float]) -> float:
    """Slope of the least-squares line, per token."""
    middle, mean = sum(places) / len(places), sum(values) / len(values)
    return sum((x - middle) * (y - mean) for x, y in zip(places, values)) / sum((x - middle) ** 2 for x in places)


class KNNLM(Sampler):
    """Interpolate the model's distribution with that of the tokens that followed the nearest neighbours in a text.

    Before the run the model reads a text and stores, for each token, the input of the lm_head and the next token. The k
    stored states nearest to the current one define p_kNN with weights softmax(-distance / T), with squared Euclidean
    distances and T in units of the typical distance between neighbours in the datastore; the result is (1 - lam) p +
    lam p_kNN. lam = 0 is the model. Khandelwal et al. 2019, arXiv 1911.00172.

    Wang et al. 2023, arXiv 2305.14625, found that it does not improve open-ended generation, and two figures show why.
    On held-out text most tokens lose a little, never more than -ln(1 - lam), and a few gain much. During generation the
    entropy of the neighbours grows faster than the model's; both slopes are shown beside those on held-out text, which
    is read before the run. Ours: the key is the input of the lm_head, not of the last feed-forward block, and
    `adaptive`, which lowers lam if the neighbours disagree.
    """

    name, title, paper, sheet = "knn_lm", "kNN-LM", "1911.00172", "sampling/knn-lm"
    stage, draws, needs, guarantee = "mix", False, ("hidden_states",), ("collapses",)

    lam: float = knob(
        0.25, 0.0, 1.0, step=0.05, help="weight of the neighbours; 0 is the model alone, 1 the neighbours alone"
    )
    k: int = knob(32, 1, 1024, step=1, help="number of neighbours")
    t: float = knob(
        1.0,
        0.05,
        20.0,
        step=0.05,
        help="temperature of the neighbours' weights, in units of the typical distance in the datastore",
    )
    text: str = knob(
        "",
        multiline=True,
        file=True,
        help="text for the datastore; empty: the bundled tales of the brothers Grimm",
    )
    tokens: int = knob(
        256, 16, 20000, step=16, help="maximum tokens stored; they are read again in every run"
    )
    held: int = knob(
        64,
        0,
        2048,
        step=16,
        help="tokens after the stored ones, on which neighbours and model are compared first; 0: none",
    )
    adaptive: bool = knob(False, help="scale lam by the agreement of the neighbours, 1 - their entropy / ln k")

    def __post_init__(self):
        self.seen = []  # (position, entropy of the model, of the neighbours) of committed tokens
        self.true_slopes, self.true_distance = {}, {}  # reference lines, from held-out text

    def prepare(self, lm: Lane) -> Iterator:
        if not self.lam:
            return
        ids = lm.spell((self.text.strip() or tales())[:(self.tokens + self.held) * LETTERS])
        if len(ids) < 2:
            raise Refusal("knn_lm needs a text of at least two tokens: give a longer one, or leave it empty.", "text")
        yield from self._store(lm, ids[:self.tokens])
        held = ids[self.tokens:self.tokens + self.held]
        if len(held) > 1:
            yield from self._held_out_events(lm, held)

    def _store(self, lm: Lane, ids: list[int]) -> Iterator:
        """Read the text of the datastore; only its hidden states are stored."""
        read = yield from self._read(lm, ids, lambda piece, places: (piece.hidden[:len(places)], places))
        places = [place for _, part in read for place in part]
        self.store = Datastore(torch.cat([hidden for hidden, _ in read]), ids, torch.tensor(places))
        yield Note(f"The datastore has {len(places)} entries, each with the token that follows.")

    def _read(self, lm: Lane, ids: list[int], use: Callable) -> Iterator:
        """Read a text window by window. Returns `use(piece, places)` of each piece, whose logits [n, V] are then
        discarded. `places` are the indices of the piece's tokens that are followed by another one in the window, a
        prefix of it.
        """
        size, found = min(WINDOW, lm.context), []
        for start in range(0, len(ids), size):
            window, at = ids[start:start + size], start
            for request in lm.reading(window):
                piece = yield request
                places = list(range(at, min(at + len(piece.tokens), start + len(window) - 1)))
                at += len(piece.tokens)
                found += [use(piece, places)] if places else []
        return found

    def _held_out_events(self, lm: Lane, ids: list[int]) -> Iterator:
        """Read held-out text; figures about the effects of the neighbours on it."""
        def measured(piece, places: list[int]) -> tuple[Effects, list[int]]:
            n = len(places)
            return self.effects(piece.logits[:n], piece.hidden[:n], [ids[place + 1] for place in places]), places

        read = yield from self._read(lm, ids, measured)
        effects, places_read = Effects.join([part for part, _ in read]), [place for _, part in read for place in part]
        for place, model, near in zip(places_read, effects.model.tolist(), effects.near.tolist()):
            yield Figure(
                "scalar",
                "held-out text: entropy, nats",
                {"x": place, "axis": "token of the text", "series": {MODEL: model, NEAR: near}, "lines": self._most},
            )
        yield effects.histogram(_log(1 - self.lam))
        yield effects.split()
        yield Note(effects.summary())
        self.true_distance = {"held-out text, on average": float(effects.distances.mean())}
        if len(places_read) >= GROWN:
            self.true_slopes = {
                f"{name}, held-out text": slope(places_read, values.tolist())
                for name, values in ((MODEL, effects.model), (NEAR, effects.near))
            }

    def effects(self, logits: Tensor, states: Tensor, tokens: list[int]) -> Effects:
        """Effects on the next tokens of logits [n, V], with hidden states [n, width]."""
        near, targets = self.neighbours(states, logits.shape[-1]), torch.tensor(tokens, device=logits.device)[:, None]
        logp, mixed = logits.log_softmax(-1), self.mix({"target": logits, "hidden": states})
        model, mixed = logp.gather(1, targets)[:, 0], mixed.gather(1, targets)[:, 0]
        return Effects(model, mixed - model, torch.special.entr(logp.exp()).sum(-1), near.entropy, near.distances[:, 0])

    @property
    def _most(self) -> dict[str, float]:
        """The maximum entropy of the neighbours."""
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
        """The neighbours of states [n, width]."""
        distances, at = self.store.nearest(states, self.k)
        # relative to the nearest: where most keys are equal the scale is tiny, and every quotient would be infinite
        weights = ((distances[:, :1] - distances) / (self.t * self.store.scale)).softmax(-1)
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
        yield from self._entropies(position, float(entropy(rows["target"])), float(near.entropy))
        yield Figure(
            "scalar",
            "nearest distance",
            {
                "x": position,
                "series": {"squared distance": float(near.distances[0, 0])},
                "lines": {"typical": self.store.scale, **self.true_distance},
            },
        )
        probabilities = {
            "model": float(logp[token].exp()),
            "neighbours": float(near.p[0, token]),
            "mixed": float(mixed[token].exp()),
        }
        yield Figure("scalar", "probability of the chosen token", {"x": position, "series": probabilities})
        yield Figure(
            "scalar",
            "gain of the chosen token, nats",
            {
                "x": position,
                "series": {"gain": float(mixed[token] - logp[token])},
                "lines": {"ln(1 - lam)": _log(1 - self.lam)} if self.lam < 1 else {},
            },
        )
        labels = [self._quoted(int(at)) for at in near.at[0, :SHOWN]]
        yield Figure(
            "bars", "nearest entries, by weight", {"labels": labels, "values": near.weights[0, :SHOWN].tolist()}
        )
        if int(first_largest(logp)) != int(first_largest(mixed)):
            yield Note("The neighbours change the most probable token.")

    def _entropies(self, position: int, model: float, near: float) -> Iterator[Event]:
        """Both entropies and their slopes over the text, without tokens that were rolled back."""
        self.seen = [*(seen for seen in self.seen if seen[0] < position), (position, model, near)]
        yield Figure(
            "scalar", "entropy, nats", {"x": position, "series": {MODEL: model, NEAR: near}, "lines": self._most}
        )
        if len(self.seen) >= GROWN:
            places, *values = map(list, zip(*self.seen))
            yield Figure(
                "scalar",
                "slope of the entropy so far, nats per token",
                {
                    "x": position,
                    "series": {name: slope(places, each) for name, each in zip((MODEL, NEAR), values)},
                    "lines": self.true_slopes,
                },
            )

    def _quoted(self, at: int) -> str:
        """The context of an entry with its next token in brackets."""
        ids, place = self.store.ids, int(self.store.places[at])
        before = "".join(map(self.piece, ids[max(0, place + 1 - BEFORE):place + 1]))
        return f"{before}[{self.piece(ids[place + 1])}]"


def _log(share: float) -> float:
    return math.log(share) if share > 0 else NEVER
