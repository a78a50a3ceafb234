"""RAPID: drafting with a retrieved part of the context, verified against a target distribution shifted towards it."""
from collections import Counter
from collections.abc import Iterator
from math import log, sqrt
from re import finditer

import torch

from playground.algorithms.search.similarity import words
from playground.algorithms.speculative.drafting import draft_distribution, grow, independent, new_tree
from playground.algorithms.speculative.speculative_loop import rounds
from playground.algorithms.speculative.verification import Ruling, match, walk
from playground.contract import Decoder, Lane, knob
from playground.engine.sampling import largest
from playground.events import Figure, Note, Test

SHOWN = 6  # tokens listed with their three probabilities
PARTS = 16  # parts of the passage listed


class RAPID(Decoder):
    """The model drafts with only the parts of a long passage that match the question, and verifies with the whole
    passage.

    A draft token from the retrieved context, with distribution q, is verified against p shifted towards q: eta times (q
    - p) is added to the scores, tokens below a share `tail` of the largest probability keep their p, and the result is
    renormalised, which is our addition. After a rejection the token is sampled from max(p - min(shifted p, q), 0); the
    bonus token follows p. Contrary to the paper's claim the output does not follow p: a token is too frequent if both q
    and the shifted p exceed p. This is how the retrieved parts influence the text. eta = 0 is exact speculative
    sampling, gamma = 0 is plain decoding. Under greedy decoding, a draft token is accepted if it is the argmax of the
    shifted p, which is our choice. Parts are retrieved by shared words, not by embeddings, with default sizes for short
    passages; drafting with a larger model is left out. Chen et al. 2025, arXiv 2502.20330.
    """

    name, title, paper, sheet = "rapid", "RAPID: drafts from a retrieved context", "2502.20330", "speculative/rapid"
    needs, views, drawn, guarantee = ("context",), ("retrieved",), "independent", ("heuristic", "collapses")
    reconstruction, sure = True, "medium"

    gamma: int = knob(
        10, 0, 16, step=1, help="draft tokens per round; 0 is plain decoding with the whole passage"
    )
    eta: float = knob(
        10.0, 0.0, 50.0, step=0.5, help="how far p is shifted towards the draft's distribution; 0 is exact"
    )
    tail: float = knob(
        0.1, 0.0, 0.5, step=0.05, help="share of the largest shifted probability below which a token keeps its p"
    )
    part: int = knob(32, 4, 512, step=4, help="words per part of the passage")
    length: int = knob(64, 4, 2048, step=4, help="maximum words retrieved")
    threshold: float = knob(0.05, 0.0, 0.8, step=0.05, help="minimum similarity of a part to the question")

    _parts = ()  # of the passage: text, similarity, whether it was retrieved

    # --- the two contexts ---

    def passages(self, passage, question) -> dict[str, str]:
        spans = [word.span() for word in finditer(r"\S+", passage)]
        pieces = [spans[at:at + self.part] for at in range(0, len(spans), self.part)]
        texts = [passage[piece[0][0]:piece[-1][1]] for piece in pieces]
        chosen, left, similarity = set(), self.length, tf_idf_similarity(texts, question)
        for at in sorted(range(len(texts)), key=lambda at: -similarity[at]):
            if similarity[at] > self.threshold and len(pieces[at]) <= left:
                chosen.add(at)
                left -= len(pieces[at])
        self._parts = [(text, similarity[at], at in chosen) for at, text in enumerate(texts)]
        return {"retrieved": " ".join(texts[at] for at in sorted(chosen))}

    def decode(self, lm: Lane) -> Iterator:
        self._pending = []
        yield from self._show_parts(lm)
        yield from rounds(lm, self, self)

    def propose(self, lm: Lane, budget) -> Iterator:
        yield from self._pending
        self._pending, self._q, tree = [], [], new_tree(lm, self)

        def level(rows, leaves, number):
            added = independent(lm, tree, rows, leaves[0], 1)
            self._q += [draft_distribution(lm, tree, rows, leaves[0])] * len(added)
            return added

        return (yield from grow(lm, lm.stream("retrieved"), tree, min(self.gamma, budget), level))

    def observe(self, tree, rows, verdict) -> None:
        """Nothing to learn."""

    # --- verification ---

    def judge(self, lm: Lane, tree, rows):
        def rule(node, children):
            scores, q = rows.stages_of([rows.row(node)])[-1].scores[0], self._q[children[0]]
            p, shifted = scores.softmax(-1), self.shifted(scores, q)
            self._record(lm, rows.position(node) - rows.sequence.start, p, q, shifted)
            if not lm.chain.draws:
                return match(int(shifted.argmax()), children, tree, shifted)
            return self._sampled(lm, children[0], tree, rows.position(node), p, q, shifted)

        return walk(lm, tree, rows, rule)

    def shifted(self, scores, q) -> torch.Tensor:
        """p [V], the softmax of these scores, shifted towards q [V] by a gradient step on KL(q, p)."""
        p = scores.softmax(-1)
        shifted = (scores + self.eta * (q - p)).softmax(-1)
        shifted = torch.where(shifted < self.tail * shifted.max(), p, shifted)
        return shifted / shifted.sum()

    def _sampled(self, lm: Lane, child, tree, position, p, q, shifted) -> Ruling:
        token = tree.tokens[child]
        accepted, u = lm.flip(min(1.0, float(shifted[token] / q[token])), position)
        tests = [Test(child, float(shifted[token]), float(q[token]), u, accepted)]
        if accepted:
            return Ruling(child, tests=tests)
        residual = (p - torch.minimum(shifted, q)).clamp(min=0)
        residual = residual / residual.sum() if residual.sum() > 0 else p
        return Ruling(None, lm.draw(residual, position, "redraw"), tests, residual)

    # --- figures ---

    def _record(self, lm: Lane, position, p, q, shifted) -> None:
        """Record distances between the distributions, and the top tokens of the last tested position, for the page."""
        others = {"shifted p from p": shifted, "q from p": q}
        series = {name: float((other - p).abs().sum() / 2) for name, other in others.items()}
        top = largest(torch.stack([p, q, shifted]).amax(0), min(SHOWN, len(p))).indices
        table = torch.stack([p, q, shifted], 1)[top].tolist()
        self._pending = [event for event in self._pending if event.shape == "scalar"]
        self._pending.append(Figure("scalar", "total variation", {"x": position, "series": series}))
        self._pending.append(
            Figure(
                "matrix",
                "the last tested draft token",
                {
                    "rows": [lm.piece(token) for token in top.tolist()],
                    "columns": ["p", "q", "shifted p"],
                    "values": table,
                },
            )
        )

    def _show_parts(self, lm: Lane) -> Iterator:
        if not self._parts:
            return
        top = sorted(sorted(range(len(self._parts)), key=lambda at: -self._parts[at][1])[:PARTS])
        labels = [f"{'* ' if chosen else ''}{text[:40]}" for text, _, chosen in (self._parts[at] for at in top)]
        yield Figure(
            "bars",
            "parts of the passage, by similarity to the question",
            {"labels": labels, "values": [self._parts[at][1] for at in top]},
        )
        count = sum(chosen for _, _, chosen in self._parts)
        yield Note(
            f"The draft reads {count} of {len(self._parts)} parts of the passage: "
            f"{len(lm.prompts['retrieved'])} prompt tokens instead of {len(lm.prompts['target'])}."
            if count
            else "No part of the passage is similar to the question, so the draft reads only the question."
        )


def tf_idf_similarity(texts: list[str], question: str) -> list[float]:
    """Cosine similarity of each text to a question, 0 to 1, over TF-IDF word vectors."""
    bags = [Counter(words(text)) for text in texts]
    frequencies = Counter(word for bag in bags for word in bag)
    idf = {word: log((1 + len(bags)) / (1 + count)) + 1 for word, count in frequencies.items()}
    query = {word: count * idf.get(word, 0.0) for word, count in Counter(words(question)).items()}
    return [_cosine({word: count * idf[word] for word, count in bag.items()}, query) for bag in bags]


def _cosine(a: dict[str, float], b: dict[str, float]) -> float:
    lengths = sqrt(sum(x * x for x in a.values()) * sum(x * x for x in b.values()))
    return sum(x * b.get(word, 0.0) for word, x in a.items()) / lengths if lengths else 0.0
