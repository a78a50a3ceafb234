"""Reflective verification: the target reads the draft tokens twice, with an instruction to reconsider in between."""
from collections.abc import Iterator
from dataclasses import replace

import torch

from playground.algorithms.speculative.drafting import check_chain
from playground.algorithms.speculative.speculative_loop import proposal
from playground.contract import Drafter, Lane, Preset, Verifier, knob, slot
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import first_largest
from playground.events import Event, Figure, Note


class Reflective(Preset):
    """Verify draft tokens against a mix of the target's distribution and its distribution after an instruction to
    reconsider; more are accepted, including wrong ones.

    The verification forward reads the draft tokens, a short instruction, the last tokens of the text, and the draft
    tokens again. The mixed row, (1 - alpha) of the first copy and alpha of the second, decides acceptance and the token
    after the last accepted one. A model that copies what it has just read accepts almost anything as alpha grows, so
    this is not lossless; alpha = 0 is plain speculative decoding. Intended for instruction-tuned models. Wang et al.
    2025, arXiv 2505.18629, reconstructed from public reviews: the instruction, alpha, the length of the repeated text
    and the rule for the last token are our interpretation. Chains only.
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
    alpha: float = knob(0.3, 0.0, 1.0, step=0.05, help="weight of the second reading; 0 is plain speculative decoding")
    ask: str = knob("Check the last words and write them again, corrected:", help="instruction between the two copies")
    ending: int = knob(8, 0, 32, step=1, help="last tokens of the text repeated before the second copy")
    mix: str = knob("logits", choices=("logits", "probabilities"), help="mix logits or probabilities")

    def check(self):
        check_chain(self.name, self.drafter)

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        while True:
            draft, learns = yield from proposal(lm, self.drafter)
            if len(draft):
                yield draft.draft()
            rows = yield lm.extend(self.twice(lm, draft))
            verdict = yield from self._verified(lm, draft, rows)
            try:
                yield lm.keep(verdict)
            finally:  # the generator is closed here when the text is complete
                if learns:
                    self.drafter.observe(draft, rows, verdict)

    def _verified(self, lm: Lane, draft, rows) -> Iterator:
        """The verdict on the draft, by mixed rows if it was read twice."""
        twice = len(rows.tree) > len(draft)
        if twice:
            yield from self._reflect(lm, draft, rows)
        verdict = self.verifier.judge(lm, draft, rows)
        if len(draft):
            yield verdict
        if twice:
            yield from self._changed(lm, draft, rows, verdict)
        return verdict

    def twice(self, lm: Lane, draft) -> TokenTree:
        """The draft, the instruction, the end of the text, and the draft again.

        The draft alone if it is empty, or if this would exceed the model's context.
        """
        tokens = lm.tokens
        appended = [*lm.spell(self.ask), *tokens[len(tokens) - min(self.ending, len(tokens)):], *draft.tokens]
        if not len(draft) or len(tokens) + len(draft) + len(appended) > lm.context:
            return draft
        tree = draft.only(list(range(len(draft))))
        for token in appended:
            tree.add(token, len(tree) - 1)
        return tree

    def _reflect(self, lm: Lane, draft, rows) -> Iterator[Event]:
        """Replace the rows of the text's end and of the first copy of the draft by mixed rows."""
        count = len(draft) + 1
        first, second = rows.raw[:count], rows.raw[-count:]
        mixed = self.mixed(first, second)
        yield self._figure(lm, draft, first, second, mixed)
        raw = torch.cat([mixed, rows.raw[count:]])
        rows.add_stage("reflection", replace(rows, raw=raw).scores)

    def mixed(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Mixture of the logits [n, V] of both readings."""
        if self.mix == "logits":
            return (1 - self.alpha) * first + self.alpha * second
        return ((1 - self.alpha) * first.softmax(-1) + self.alpha * second.softmax(-1)).log()

    def _figure(self, lm: Lane, draft, *readings: torch.Tensor) -> Event:
        at = torch.tensor(draft.tokens, device=readings[0].device)[:, None]
        values = torch.cat([logits[:-1].softmax(-1).gather(-1, at) for logits in readings], 1).tolist()
        columns = ["first reading", "second reading", "mixed"]
        return Figure(
            "matrix",
            "probability of each draft token",
            {"rows": list(map(lm.piece, draft.tokens)), "columns": columns, "values": values},
        )

    def _changed(self, lm: Lane, draft, rows, verdict) -> Iterator[Event]:
        """A note for each accepted token that is not the target's top token at the first reading."""
        for before, node in zip([ROOT, *verdict.kept], verdict.kept):
            top = int(first_largest(rows.raw[rows.row(before)]))
            if top != draft.tokens[node]:
                yield Note(
                    f"{lm.piece(draft.tokens[node])!r} is accepted; the target's top token at the first reading was "
                    f"{lm.piece(top)!r}."
                )
