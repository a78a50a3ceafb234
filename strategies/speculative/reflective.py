"""Reflective verification: the target reads the guesses twice, and is asked to look again in between."""
from collections.abc import Iterator
from dataclasses import replace

import torch

from playground.algorithms.speculative.drafting import check_chain
from playground.contract import Drafter, Preset, Verifier, knob, slot
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Event, Figure, Note


class Reflective(Preset):
    """Check guesses against what the target thinks of them mixed with what it thinks after being asked to reconsider:
    more stand, and not only right ones.

    In the pass that checks the guesses stand, behind them, a short instruction, the last tokens of the text, and the
    guesses again. The rows of this second copy tell whether the target would write them still; 1 - alpha of the first
    and alpha of the second make the row they are judged by, and the token after the last one is taken from. A model
    that copies what it has just read will accept almost anything as alpha grows, so this is not lossless: only alpha =
    0 is, and it is plain speculation. Worth trying with models that follow instructions. Wang et al. 2025, arXiv
    2505.18629, from public reviews: instruction, alpha, the length of the repeated ending and the rule for the last
    token are our reading. Chains only.
    """

    name, title, paper, sheet = (
        "reflective",
        "Reflective verification",
        "2505.18629",
        "speculative/reflective-verification",
    )
    guarantee = ("heuristic", "collapses")
    reconstruction, sure = True, "low"

    drafter: Drafter = slot("draft_model")
    verifier: Verifier = slot("rejection")
    alpha: float = knob(0.3, 0.0, 1.0, step=0.05, help="weight of the second reading; 0 is plain speculation")
    ask: str = knob("Check the last words and write them again, corrected:", help="instruction between the two copies")
    ending: int = knob(8, 0, 32, step=1, help="last tokens of the text that are repeated before the second copy")
    mix: str = knob("logits", choices=("logits", "probabilities"), help="what is mixed")

    def check(self):
        check_chain(self.name, self.drafter)

    def decode(self, lm) -> Iterator:
        yield lm.prefill()
        while True:
            guess = yield from self.drafter.propose(lm, lm.remaining - 1)
            if len(guess):
                yield guess.draft()
            rows = yield lm.extend(self.twice(lm, guess))
            verdict = yield from self._judged(lm, guess, rows)
            try:
                yield lm.keep(verdict)
            finally:  # where this completes the text nobody comes back here
                self.drafter.observe(guess, rows, verdict)

    def _judged(self, lm, guess, rows) -> Iterator:
        """The verdict on the guesses, by mixed rows where they were read twice."""
        twice = len(rows.tree) > len(guess)
        if twice:
            yield from self._reflect(lm, guess, rows)
        verdict = self.verifier.judge(lm, guess, rows)
        if len(guess):
            yield verdict
        if twice:
            yield from self._saved(lm, guess, rows, verdict)
        return verdict

    def twice(self, lm, guess) -> TokenTree:
        """The guesses, the instruction, the ending of the text, the guesses again; the guesses alone where there are
        none, or no room for more.
        """
        tokens = lm.tokens
        behind = [*lm.spell(self.ask), *tokens[len(tokens) - min(self.ending, len(tokens)):], *guess.tokens]
        if not len(guess) or len(tokens) + len(guess) + len(behind) > lm.context:
            return guess
        read = guess.only(list(range(len(guess))))
        for token in behind:
            read.add(token, len(read) - 1)
        return read

    def _reflect(self, lm, guess, rows) -> Iterator[Event]:
        """Put mixed rows in the place of those the guesses are judged by: of the end of the text, and of each guess of
        the first copy.
        """
        count = len(guess) + 1
        first, second = rows.raw[:count], rows.raw[-count:]
        mixed = self.mixed(first, second)
        yield self._figure(lm, guess, first, second, mixed)
        raw = torch.cat([mixed, rows.raw[count:]])
        rows.decide("reflection", replace(rows, raw=raw).scores)

    def mixed(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of both readings as one."""
        if self.mix == "logits":
            return (1 - self.alpha) * first + self.alpha * second
        return ((1 - self.alpha) * first.softmax(-1) + self.alpha * second.softmax(-1)).log()

    def _figure(self, lm, guess, *readings: torch.Tensor) -> Event:
        at = torch.tensor(guess.tokens, device=readings[0].device)[:, None]
        values = torch.cat([logits[:-1].softmax(-1).gather(-1, at) for logits in readings], 1).tolist()
        columns = ["first reading", "second reading", "mixed"]
        return Figure(
            "matrix",
            "probability of each guess",
            {"rows": list(map(lm.piece, guess.tokens)), "columns": columns, "values": values},
        )

    def _saved(self, lm, guess, rows, verdict) -> Iterator[Event]:
        """Guesses that stand although another token was the target's own first choice."""
        for before, node in zip([ROOT, *verdict.kept], verdict.kept):
            own = int(rows.raw[rows.row(before)].argmax())
            if own != guess.tokens[node]:
                yield Note(
                    f"{lm.piece(guess.tokens[node])!r} stands; at the first reading the target's own choice was {lm.piece(own)!r}."
                )
