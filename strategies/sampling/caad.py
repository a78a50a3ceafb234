"""CAAD: context-aware adaptive decoding."""
from collections.abc import Iterator

import torch
from torch import Tensor

from playground.contract import Lane, Sampler, knob
from playground.engine.sampling import first_largest
from playground.errors import Refusal
from playground.events import Event, Figure, Note

ARROW = "=>"
LEAST = 1e-6  # lower bound of similarities, so that weights stay positive
MAX_PLACES = 512  # tokens of answers; each stores logits [V]
MAX_PAIRS = 64
SHOWN = 5  # entries
TAIL = 6  # tokens shown of an entry
FLOOR = 1e-8  # of mixed probabilities, as in the authors' code
PAIRS = """Name the favourite food of Didrast. => bread
Name the ruler of Hifak. => Zideth
Do you know what pet Hosos keeps? => crow
Name the good that Nezind sells. => copper"""


class CAAD(Sampler):
    """Add the model's own logits on trusted answers whenever the current hidden state is similar to one of theirs. The
    paper compares sentence embeddings; its encoder, 90 MB, is not bundled.

    Before the run the model reads questions with their answers and stores, for each token of an answer, the hidden
    state and the logits before it. During decoding, the logits of the entries more similar than tau are averaged, and
    alpha times the mean is added. Without a similar entry this is the model alone, and so it always is with alpha = 0
    or tau = 1. Nguyen et al. 2025, arXiv 2508.02184. Ours: entries are compared by the model's own state, the input of
    the lm_head minus the mean over all entries. The authors embed the last few words with a sentence encoder of 90 MB,
    which is not bundled, so "similar" means here what the model predicts alike, not what reads alike. Their questions
    use a chat template, here the format of the prompt.
    """

    name, title, paper, sheet = "caad", "CAAD", "2508.02184", "sampling/caad"
    stage, draws, needs, guarantee = "mix", False, ("hidden_states",), ("collapses",)
    reconstruction, sure = True, "medium"

    alpha: float = knob(0.5, 0.0, 2.0, step=0.05, help="weight of the retrieved logits; 0 is the model alone")
    tau: float = knob(0.7, -1.0, 1.0, step=0.05, help="cosine that an entry must exceed; at 1 none does")
    most: int = knob(0, 0, 64, step=1, help="maximum number of entries averaged; 0: all that are similar enough")
    weighted: bool = knob(True, help="weight the average by similarity")
    mode: str = knob(
        "linear",
        choices=("linear", "delta", "probabilities"),
        help="add to the logits, move towards them, or mix the probabilities",
    )
    pairs: str = knob(PAIRS, multiline=True, file=True, help="trusted answers, one per line: question => answer")

    def check(self) -> None:
        if self.mode != "linear" and self.alpha > 1:
            raise Refusal(
                f"alpha may exceed 1 only in mode linear, not {self.mode}: set alpha to at most 1, or choose linear.",
                "alpha",
            )
        lines = [line for line in self.pairs.splitlines() if line.strip()]
        if not lines or not all(all(_split_pair(line)) for line in lines):
            raise Refusal(
                f"caad needs trusted answers, one per line, in the form `question {ARROW} answer`: "
                "write at least one, and no other lines.",
                "pairs",
            )
        if len(lines) > MAX_PAIRS:
            raise Refusal(
                f"There are {len(lines):,} trusted answers, and the maximum is {MAX_PAIRS}: remove some.", "pairs"
            )

    def prepare(self, lm: Lane) -> Iterator:
        if not self.alpha:
            return
        states, logits, tails = [], [], []
        for line in self.pairs.splitlines():
            if line.strip():
                for column, found in zip((states, logits, tails), (yield from _entries(lm, *_split_pair(line)))):
                    column += found
                if len(tails) > MAX_PLACES:
                    raise Refusal(
                        f"The trusted answers have more than {MAX_PLACES} tokens in total: remove or shorten some.",
                        "pairs",
                    )
        if not tails:
            raise Refusal("No token of the trusted answers fits the model's context: shorten them.", "pairs")
        self.grounding = Grounding(torch.stack(states), torch.stack(logits), tails)
        yield Note(f"{len(tails)} tokens of trusted answers are stored.")

    def mix(self, rows):
        logits = rows["target"]
        if not self.alpha:
            return logits
        weights = self._weights(self.grounding.similarities(rows["hidden"]))
        near = weights.any(0).nonzero()[:, 0]  # usually few entries are similar to any row
        if not len(near):
            return logits
        mean = weights[:, near].to(logits) @ self.grounding.logits[near].to(logits)
        return torch.where(weights.any(-1, keepdim=True), self._shaped(logits, mean), logits)

    def _weights(self, similarities: Tensor) -> Tensor:
        """Weights of the entries [n, N], with sum 1; all 0 if no entry is similar enough."""
        near = similarities > self.tau
        if self.most:
            best = similarities.topk(min(self.most, similarities.shape[-1])).indices
            near &= torch.zeros_like(near).scatter(-1, best, True)
        weights = near * (similarities.clamp(min=LEAST) if self.weighted else 1.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=LEAST)

    def _shaped(self, logits: Tensor, mean: Tensor) -> Tensor:
        if self.mode == "linear":
            return logits + self.alpha * mean
        if self.mode == "delta":
            return (1 - self.alpha) * logits + self.alpha * mean
        return ((1 - self.alpha) * logits.softmax(-1) + self.alpha * mean.softmax(-1) + FLOOR).log()

    def observe(self, rows, token, position) -> Iterator[Event]:
        if not self.alpha:
            return
        similarities = self.grounding.similarities(rows["hidden"][None])
        weights, shaped = self._weights(similarities)[0], self.mix({name: row[None] for name, row in rows.items()})[0]
        level = {"similarity of the nearest entry": float(similarities.max())}
        yield Figure("scalar", "similarity", {"x": position, "series": level, "lines": {"tau": self.tau}})
        yield Figure("scalar", "entries averaged", {"x": position, "series": {"entries": int((weights > 0).sum())}})
        best = similarities[0].topk(min(SHOWN, len(weights))).indices.tolist()
        values = [[float(similarities[0, at]), float(weights[at])] for at in best]
        yield Figure(
            "matrix",
            "nearest entries",
            {"rows": [self.grounding.tails[at] for at in best], "columns": ["similarity", "weight"], "values": values},
        )
        first, chosen = int(first_largest(rows["target"])), int(first_largest(shaped))
        if first != chosen:
            yield Note(f"The trusted answers rank {self.piece(chosen)!r} above {self.piece(first)!r}.")


def _split_pair(line: str) -> tuple[str, str]:
    question, _, answer = line.partition(ARROW)
    return question.strip(), answer.strip()


def _entries(lm: Lane, question: str, answer: str) -> Iterator:
    """Hidden states [width] and logits [V] before every token of an answer, and a label for each."""
    prompt, continuation = lm.ask(question), lm.spell(f" {answer}")
    if len(continuation) > MAX_PLACES:
        raise Refusal(
            f"A trusted answer has {len(continuation):,} tokens, and the maximum for all of them is {MAX_PLACES}:"
            " shorten it.",
            "pairs",
        )
    ids, states, logits = (prompt + continuation)[:lm.context], [], []
    for request in lm.reading(ids):
        piece = yield request
        states += piece.hidden
        logits += piece.logits
    places = range(max(len(prompt), 1) - 1, len(ids) - 1)
    tails = ["".join(map(lm.piece, ids[max(0, at + 1 - TAIL):at + 1])) + f"[{lm.piece(ids[at + 1])}]" for at in places]
    return [states[at] for at in places], [logits[at] for at in places], tails


class Grounding:
    """The stored tokens of trusted answers. Immutable, so forked sequences share it."""

    def __init__(self, states: Tensor, logits: Tensor, tails: list[str]):
        """Hidden states [N, width], logits [N, V] and labels of the entries."""
        self.logits, self.tails = logits, tails
        self._mean = states.mean(0)
        self._keys = _unit(states - self._mean)

    def similarities(self, states: Tensor) -> Tensor:
        """Cosine of states [n, width] and every entry, [n, N]."""
        return (_unit(states - self._mean) @ self._keys.T).clamp(-1, 1)

    def __deepcopy__(self, memo: dict) -> "Grounding":
        return self


def _unit(rows: Tensor) -> Tensor:
    """Unit vectors, in float32 or better; zeros stay zeros."""
    return torch.nn.functional.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)
