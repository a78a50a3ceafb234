"""Just Read Twice: the passage is repeated in the prompt, with the question before it."""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from playground.algorithms.overlays.token_figures import bars, matrix
from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, Lane, knob
from playground.events import Figure, Note

ONCE, TWICE = "once", "twice"
FORMS = {  # what is read in place of the passage; the question follows all of them
    ONCE: "C", "question first": "QC", "repeat": "CC", "jrt": "QCC", "whole prompt": "CQC", "thrice": "QCCC",
}
SHOWN = 48  # tokens of the passage in the figure, those that the second reading recalls most
PREDICTABLE = 0.5  # nats below which a token of the first reading says nothing about memory


class Copy(NamedTuple):
    """A token of one reading of the passage."""

    place: int  # in the prompt
    start: int  # its first byte in the passage
    end: int


class ReadTwice(Decoder):
    """Read the passage twice, with the question before it, and then write greedily or with the lane's samplers.

    A recurrent model has to decide what to remember before it knows the question: at the second reading it knows it.
    Attention sees everything anyway, so on a transformer, as all bundled models are, an effect has another cause: the
    tokens of the second copy see the whole first one. The released form, `jrt`, is the question, the passage twice and
    the question; the other forms tell repetition from the order: the question first without repetition, repetition
    alone, the whole prompt twice, and `once`, which is plain decoding. With `recall` the longer prompt is read once
    more, and a figure shows how many nats the second reading of each token costs less than the first: near 0 it was
    forgotten, unless it could be predicted anyway. Prompts alone; the architecture JRT-RNN would have to be trained.
    The prompt is about twice as long. Arora et al. 2024, arXiv 2407.05483.
    """

    name, title, paper, sheet = "read_twice", "Just read twice", "2407.05483", "overlays/read-twice"
    needs, guarantee, refuses = ("context",), ("collapses",), ("cache_policy", "compute_policy")
    replaces_prompt, reconstruction = True, True

    order: str = knob("jrt", choices=tuple(FORMS), help="what is read before the question")
    recall: bool = knob(True, help="read the prompt once more to show what the second reading recalls")

    def passages(self, passage, question) -> dict[str, str]:
        if self.order == ONCE:
            return {}
        parts = {"C": cleaned(passage, question), "Q": question.strip()}
        return {TWICE: "\n".join(parts[part] for part in FORMS[self.order])}

    def decode(self, lm: Lane) -> Iterator:
        if TWICE in lm.prompts:
            prompt = lm.prompts[TWICE]
            lm.replace_prompt(prompt)
            yield bars("tokens of the prompt", ["once", self.order], [lm.prompt_length, len(prompt)])
            if self.recall:
                yield from self._recalled(lm, prompt)
        yield from plain(lm)

    def _recalled(self, lm: Lane, prompt: list[int]) -> Iterator:
        """How well each token of the passage is predicted at its first and second reading."""
        copies = copies_of([lm.bytes(token) for token in prompt], cleaned(lm.passage, lm.question).encode())
        if len(copies) < 2:
            return
        costs = yield from self._costs(lm, prompt)
        second = {copy[1:]: copy.place for copy in copies[1]}
        pairs = [(copy.place, second[copy[1:]]) for copy in copies[0] if copy.place and copy[1:] in second]
        if pairs:
            yield from shown(lm, prompt, [(first, costs[first], costs[again]) for first, again in pairs])

    def _costs(self, lm: Lane, prompt: list[int]) -> Iterator:
        """Nats of each token of a prompt, by place; 0 for the first, which nothing predicts."""
        costs = [torch.zeros(1, dtype=torch.float64)]
        for request in lm.reading(prompt[:-1]):
            piece = yield request
            at = sum(map(len, costs))
            following = torch.tensor(prompt[at:at + len(piece.tokens)], device=piece.logits.device)
            logp = piece.logits.double().log_softmax(-1)
            costs.append(-logp.gather(1, following[:, None])[:, 0].cpu())
        return torch.cat(costs).tolist()


def shown(lm: Lane, prompt: list[int], found: list[tuple[int, float, float]]) -> Iterator[Figure | Note]:
    """The tokens (place, nats at the first reading, at the second) that are recalled most, in order, and the means."""
    most = sorted(sorted(found, key=lambda token: token[2] - token[1])[:SHOWN])
    rows = [[first for _, first, _ in most], [again for *_, again in most], [first - again for _, first, again in most]]
    yield matrix("nats of the passage's tokens", ["first reading", "second reading", "recalled"],
                 [lm.piece(prompt[place]) for place, *_ in most], rows)
    hard = [(first, again) for _, first, again in found if first >= PREDICTABLE]
    first, again = (sum(column) / len(hard) for column in zip(*hard)) if hard else (0.0, 0.0)
    yield Note(f"{len(hard)} of {len(found)} tokens of the passage cost at least {PREDICTABLE} nats when they are read "
               f"first: {first:.2f} nats on average then, and {again:.2f} at the second reading.")


def cleaned(passage: str, question: str) -> str:
    """A passage that ends in one full stop or other mark, without the question if that stood at its end."""
    text = passage.strip().removesuffix(question.strip()).strip() or passage.strip()
    return text if re.search(r"[.!?]$", text) else f"{text}."


def copies_of(pieces: list[bytes], passage: bytes) -> list[list[Copy]]:
    """The tokens of every occurrence of a passage in a text of these pieces that lie within it."""
    text, ends, places = b"".join(pieces), [], []
    for piece in pieces:
        ends.append((ends[-1] if ends else 0) + len(piece))
    at = text.find(passage)
    while at >= 0:
        places.append(at)
        at = text.find(passage, at + len(passage))
    return [
        [Copy(number, end - len(piece) - place, end - place) for number, (piece, end) in enumerate(zip(pieces, ends))
         if piece and place <= end - len(piece) and end <= place + len(passage)]
        for place in places
    ]
