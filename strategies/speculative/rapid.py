"""RAPID: a drafter that reads only what was retrieved, and a target that lets itself be moved by it."""
from collections import Counter
from collections.abc import Iterator
from math import log, sqrt
from re import finditer

import torch

from playground.algorithms.search.similarity import words
from playground.algorithms.speculative.drafting import grow, guess_row, independent, new_tree
from playground.algorithms.speculative.speculative_loop import rounds
from playground.algorithms.speculative.verification import Ruling, match, walk
from playground.contract import Decoder, knob
from playground.events import Figure, Note, Test

SHOWN = 6  # tokens of a place whose three probabilities are shown
PARTS = 16  # parts of the passage that are shown


class RAPID(Decoder):
    """The model guesses with only the parts of a long passage that fit the question before it, and checks with the
    whole; each view moves the other.

    A guess from the short view, with distribution q, is held not against p but against p moved towards q: the scores
    gain eta times q - p, tokens that then stay below a share `tail` of the largest keep their p, and the sum is made 1,
    which is our addition. A refused guess is drawn again from what p has above both, and after the last guess the next
    token is the whole view's own. Despite what the paper says the text no longer follows p: where both q and the moved
    p exceed p a token comes too often, and so what was retrieved gets its say. eta = 0 is exact speculative sampling,
    and gamma = 0 plain decoding. Where nothing is drawn by chance, guesses stand that are the best of the moved p, as
    we chose. Parts are found by shared words, not by embeddings, and their sizes are made for short passages; a larger
    model as drafter is left out. Chen et al. 2025, arXiv 2502.20330.
    """

    name, title, paper, sheet = "rapid", "RAPID: drafts from a retrieved view", "2502.20330", "speculative/rapid"
    needs, views, drawn, guarantee = ("context",), ("retrieved",), "independent", ("heuristic", "collapses")
    reconstruction, sure = True, "medium"

    gamma: int = knob(
        10, 0, 16, step=1, help="tokens guessed one after another; 0 is plain decoding with the whole passage"
    )
    eta: float = knob(
        10.0, 0.0, 50.0, step=0.5, help="how far the short view moves the long one; 0 keeps the text the long one's"
    )
    tail: float = knob(
        0.1, 0.0, 0.5, step=0.05, help="share of the largest moved probability below which a token keeps its own"
    )
    part: int = knob(32, 4, 512, step=4, help="words in a part of the passage")
    length: int = knob(64, 4, 2048, step=4, help="words the short view may have")
    threshold: float = knob(0.05, 0.0, 0.8, step=0.05, help="likeness to the question that a part must exceed")

    _parts = ()  # of the passage: text, likeness, whether it was chosen

    # --- the two views ---

    def passages(self, passage, question) -> dict[str, str]:
        spans = [word.span() for word in finditer(r"\S+", passage)]
        pieces = [spans[at:at + self.part] for at in range(0, len(spans), self.part)]
        texts = [passage[piece[0][0]:piece[-1][1]] for piece in pieces]
        chosen, left, likeness = set(), self.length, alike(texts, question)
        for at in sorted(range(len(texts)), key=lambda at: -likeness[at]):
            if likeness[at] > self.threshold and len(pieces[at]) <= left:
                chosen.add(at)
                left -= len(pieces[at])
        self._parts = [(text, likeness[at], at in chosen) for at, text in enumerate(texts)]
        return {"retrieved": " ".join(texts[at] for at in sorted(chosen))}

    def decode(self, lm) -> Iterator:
        self._told = []
        yield from self._tell_parts(lm)
        yield from rounds(lm, self, self)

    def propose(self, lm, budget) -> Iterator:
        yield from self._told
        self._told, self._q, tree = [], [], new_tree(lm, self)

        def level(rows, leaves, number):
            made = independent(lm, tree, rows, leaves[0], 1)
            self._q += [guess_row(lm, tree, rows, leaves[0])] * len(made)
            return made

        return (yield from grow(lm, lm.stream("retrieved"), tree, min(self.gamma, budget), level))

    def observe(self, tree, rows, verdict) -> None:
        """There is nothing to learn."""

    # --- what stands ---

    def judge(self, lm, tree, rows):
        def rule(node, children):
            scores, q = rows.stages_of([rows.row(node)])[-1].scores[0], self._q[children[0]]
            p, moved = scores.softmax(-1), self.moved(scores, q)
            self._look_at(lm, rows.position(node) - rows.sequence.start, p, q, moved)
            if not lm.chain.draws:
                return match(int(moved.argmax()), children, tree, moved)
            return self._drawn(lm, children[0], tree, rows.position(node), p, q, moved)

        return walk(lm, tree, rows, rule)

    def moved(self, scores, q) -> torch.Tensor:
        """p [V], the softmax of these scores, moved towards q [V]: a step down the slope of KL(q, p)."""
        p = scores.softmax(-1)
        moved = (scores + self.eta * (q - p)).softmax(-1)
        moved = torch.where(moved < self.tail * moved.max(), p, moved)
        return moved / moved.sum()

    def _drawn(self, lm, child, tree, position, p, q, moved) -> Ruling:
        token = tree.tokens[child]
        accepted, u = lm.flip(min(1.0, float(moved[token] / q[token])), position)
        tests = [Test(child, float(moved[token]), float(q[token]), u, accepted)]
        if accepted:
            return Ruling(child, tests=tests)
        left = (p - torch.minimum(moved, q)).clamp(min=0)
        left = left / left.sum() if left.sum() > 0 else p
        return Ruling(None, lm.draw(left, position, "redraw"), tests, left)

    # --- what is shown ---

    def _look_at(self, lm, place, p, q, moved) -> None:
        """Keep for the page how far the views are from each other, and of one place of a round all three probabilities.
        """
        apart = {"moved p from p": moved, "q from p": q}
        series = {name: float((other - p).abs().sum() / 2) for name, other in apart.items()}
        likeliest = torch.stack([p, q, moved]).amax(0).topk(min(SHOWN, len(p))).indices
        table = torch.stack([p, q, moved], 1)[likeliest].tolist()
        self._told = [event for event in self._told if event.shape == "scalar"]
        self._told.append(Figure("scalar", "total variation", {"x": place, "series": series}))
        self._told.append(
            Figure(
                "matrix",
                "the last guess that was tested",
                {
                    "rows": [lm.piece(token) for token in likeliest.tolist()],
                    "columns": ["p", "q", "moved p"],
                    "values": table,
                },
            )
        )

    def _tell_parts(self, lm) -> Iterator:
        if not self._parts:
            return
        likeliest = sorted(sorted(range(len(self._parts)), key=lambda at: -self._parts[at][1])[:PARTS])
        labels = [f"{'* ' if chosen else ''}{text[:40]}" for text, _, chosen in (self._parts[at] for at in likeliest)]
        yield Figure(
            "bars",
            "parts of the passage, by likeness to the question",
            {"labels": labels, "values": [self._parts[at][1] for at in likeliest]},
        )
        count = sum(chosen for _, _, chosen in self._parts)
        yield Note(
            f"The guesses come from {count} of {len(self._parts)} parts of the passage: a guess reads {len(lm.prompts['retrieved'])} tokens "
            f"before the answer, a check {len(lm.prompts['target'])}."
            if count
            else "No part of the passage is like the question, so the guesses come from the question alone."
        )


def alike(texts: list[str], question: str) -> list[float]:
    """Cosine of each text and a question, words weighted by how few of the texts have them, 0 to 1."""
    bags = [Counter(words(text)) for text in texts]
    found = Counter(word for bag in bags for word in bag)
    rare = {word: log((1 + len(bags)) / (1 + count)) + 1 for word, count in found.items()}
    asked = {word: count * rare.get(word, 0.0) for word, count in Counter(words(question)).items()}
    return [_cosine({word: count * rare[word] for word, count in bag.items()}, asked) for bag in bags]


def _cosine(a: dict[str, float], b: dict[str, float]) -> float:
    lengths = sqrt(sum(x * x for x in a.values()) * sum(x * x for x in b.values()))
    return sum(x * b.get(word, 0.0) for word, x in a.items()) / lengths if lengths else 0.0
