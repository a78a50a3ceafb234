"""Lexical unit decoding: several tokens at once where the model is certain of all of them."""
from collections.abc import Iterator

from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, chain
from playground.errors import Refusal
from playground.events import Event, Figure, Note, Verdict

TUNING = "lexical_unit_tuning"  # the variant that makes a model fit for it


class LexicalUnits(Decoder):
    """Predict the next k tokens in one forward, from placeholders after the text, and keep those the model is certain
    of. No bundled model is tuned for it: those trained here for minutes lost most of their score.

    The row after the text predicts the next token, which is always kept. The row of each placeholder predicts the token
    at its place without seeing the tokens between. Tokens are kept up to the first one whose probability is below
    `beta`; with `rule` whole, all k or the next one only. Nothing is verified, so the text may differ from greedy
    decoding; how often it does is shown, because the next forward reads the kept tokens anyway. A model has to be
    trained for it: `python -m playground variant lexical_unit_tuning` trains one. Any
    other predicts from placeholders at random and is refused. beta above 1 or k = 1 is greedy decoding, of any model.
    None is bundled: low-rank additions that were trained for 18 minutes on a CPU predicted 1.5 tokens per forward on
    five records, with a mean score of 0.34 where the plain model has 1. The paper's guard against tokens
    that repeat is left out, since its details were not found. Sun et al. 2024, arXiv 2405.15208, from the abstract and
    summaries.
    """

    name, title, paper, sheet = "lexical_units", "Lexical units", "2405.15208", "search/lexical-units"
    guarantee, refuses = ("heuristic", "collapses"), ("sampler", "constraint")
    reconstruction, sure = True, "medium"

    k: int = knob(4, 1, 8, step=1, help="tokens predicted in one forward; 1 is greedy decoding")
    beta: float = knob(0.9, 0.5, 1.01, step=0.01, help="smallest probability of a further token; 1.01 is greedy")
    rule: str = knob("prefix", choices=("prefix", "whole"), help="keep the certain beginning, or all k tokens or one")

    def check_target(self, model):
        if self.k > 1 and self.beta <= 1 and not model.lexical_units:
            raise Refusal(
                f"{model.name} was not tuned to predict tokens from placeholders, so it would write at random: make a "
                f"tuned copy with `python -m playground variant {TUNING}` and choose it as the model, or choose "
                "Greedy. If it was tuned elsewhere, set lexical_units to the number of tokens in its config.json.",
                self.name,
            )

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        rows = yield lm.extend(self._tree(lm, []))
        self._forwards = self._checked = self._differing = 0
        unit = self._unit(rows, ROOT, len(rows.tree), lm)
        while True:
            last = lm.ends(unit[-1]) or len(unit) >= lm.remaining
            rows = yield lm.extend(chain(unit[:-1], self.name) if last else self._tree(lm, unit))
            yield from self._shown(lm, rows, unit)
            kept = list(range(len(unit) - last))
            yield lm.keep(Verdict(kept=kept, token=unit[-1] if last else -1))
            unit = self._unit(rows, len(unit) - 1, len(rows.tree) - len(unit), lm)

    def _tree(self, lm: Lane, unit: list[int]):
        """The kept tokens that the model has not read, and the placeholders after them."""
        count = min(self.k - 1, lm.remaining - len(unit) - 1)
        return chain(unit + [lm.padding] * count, self.name)

    def _unit(self, rows, node: int, count: int, lm: Lane) -> list[int]:
        """The tokens kept of the predictions after a node and after the `count` placeholders that follow it."""
        places = [rows.row(each) for each in range(node, node + count + 1)]
        q, tokens = (part.tolist() for part in rows.logp[places].exp().max(-1))
        kept = next((place for place, share in enumerate(q) if place and share < self.beta), len(q))
        if self.rule == "whole" and kept < len(q):
            kept = 1
        self._considered = list(zip(tokens, q, [place < kept for place in range(len(q))]))
        ends = next((place + 1 for place, token in enumerate(tokens) if lm.ends(token)), kept)
        return tokens[:min(kept, ends)]

    def _shown(self, lm: Lane, rows, unit: list[int]) -> Iterator[Event]:
        """The unit with the probabilities of its tokens, and how many differ from the model's choice after reading."""
        best = [rows.best(node) for node in range(ROOT, len(unit) - 1)]
        wrong = sum(token != own for token, own in zip(unit[1:], best[1:]))
        self._forwards += 1
        self._checked, self._differing = self._checked + len(unit) - 1, self._differing + wrong
        labels = [f"{'✓' if kept else '–'} {lm.piece(token)}" for token, _, kept in self._considered]
        yield Figure("bars", "predicted tokens", {"labels": labels, "values": [q for _, q, _ in self._considered]})
        span = [lm.generated, lm.generated + len(unit), f"{len(unit)} at once", len(unit) / self.k]
        yield Figure("spans", "lexical units", {"spans": [span]})
        series = {"tokens per forward": (lm.generated + len(unit)) / self._forwards}
        yield Figure("scalar", "tokens per forward", {"x": lm.generated, "series": series})
        if wrong:
            shares = f"{self._differing} of {self._checked} further tokens so far"
            yield Note(f"{shares} differ from the model's choice after reading.")
