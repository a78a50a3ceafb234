"""Superposed decoding."""
from collections.abc import Iterator

import torch

from playground.algorithms.fairy_tales import tales
from playground.algorithms.search.beams import Beam, Beams
from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree, merged
from playground.engine.sampling import largest
from playground.errors import Refusal
from playground.events import Branches, Figure
from strategies.search.superposed.ngram_counts import Corpus, frequencies

WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)  # of the n-gram frequencies after 1, 2, ... tokens, as released


class Superposed(Decoder):
    """Generate several drafts with one forward per step: the model reads the weighted mean of their last tokens'
    embeddings.

    The single row of logits is shared by all drafts, so the n-gram frequencies of a corpus, which depend on each
    draft's own last tokens, differentiate them: a draft gains (1 - alpha) log q + alpha log n-gram for each of the
    `kept` best tokens, and the best continuations over all drafts survive. Scores are not log-probabilities; the true
    ones are shown at the end. Shen et al. 2024, arXiv 2405.18400. Ours: a corpus of a few fairy tales, the run ends
    once `drafts` texts are finished, and an end token counts only among the `drafts` best continuations.
    """

    name, title, paper, sheet = "superposed", "Superposed decoding", "2405.18400", "search/superposed"
    guarantee, several, refuses = ("heuristic", "collapses"), True, ("sampler", "constraint")

    drafts: int = knob(3, 1, 10, step=1, help="drafts that grow in parallel")
    kept: int = knob(9, 1, 60, step=1, help="the model's best tokens that the drafts may take")
    temperature: float = knob(
        0.1, 0.02, 1.0, step=0.02, help="of the logits, which a mean of embeddings flattens; low values sharpen them"
    )
    alpha: float = knob(0.54, 0.0, 1.0, step=0.02, help="weight of the n-grams; 0: the model only, 1: n-grams only")
    penalty: float = knob(
        200.0,
        0.0,
        500.0,
        step=10,
        help="subtracted from a draft's score if none of the kept tokens occurs in the n-grams",
    )
    corpus: str = knob(
        "",
        multiline=True,
        file=True,
        help="text whose n-grams are counted; empty: the bundled tales of the Brothers Grimm",
    )
    audit: bool = knob(
        True, help="one extra forward at the end, to show the true log-probabilities of the finished drafts"
    )

    def check(self) -> None:
        if self.kept < self.drafts:
            raise Refusal(
                f"{self.kept} kept tokens are too few for {self.drafts} drafts: keep at least as many tokens as there "
                "are drafts.",
                "kept",
            )

    def decode(self, lm: Lane) -> Iterator:
        rows, node, mixtures = (yield lm.prefill()), ROOT, TokenTree(self.name)
        corpus = Corpus(
            [lm.encode(paragraph) for paragraph in (self.corpus.strip() or tales()).split("\n\n")], len(WEIGHTS)
        )
        drafts = Beams(lm.fork(1)[0], self.drafts, exponent=1.0, patient=False)
        while True:
            gains = self._gains(rows.raw[rows.row(node)], [corpus.followers(beam.leaf.tokens) for beam in drafts.live])
            offers = drafts.choose(gains, lm.ends)
            drafts.follow(lm, offers, gains)
            yield lm.keep([lm.choose(rows, offer.token, node, beam.leaf) for offer, beam in zip(offers, drafts.live)])
            drafts.retire(lm)
            yield from self._shown(drafts, corpus)
            if not drafts.live:
                break
            node = mixtures.blend([beam.leaf.tokens[-1] for beam in drafts.live], shares(drafts.live), node)
            rows = yield lm.extend(mixtures)
        if self.audit:
            yield from self._compared(lm, drafts.finished)
        yield lm.keep(drafts.finished[0].leaf)

    def _shown(self, drafts, corpus) -> Iterator:
        yield Branches(scores=drafts.ranks(), sums=drafts.sums())
        known = {"labels": [f"last {n}" for n in range(1, len(WEIGHTS) + 1)], "values": corpus.hit_rates()}
        yield Figure("bars", "suffixes that occur in the corpus", known)
        if drafts.live:
            labels = [f"#{beam.leaf.number}" for beam in drafts.live]
            yield Figure("bars", "mixture weights", {"labels": labels, "values": shares(drafts.live)})

    def _gains(self, raw, followers) -> torch.Tensor:
        """Score that each token adds to a draft, [drafts, V].

        `raw` are the model's logits [V], `followers` the tokens after each draft's suffixes in the corpus.
        """
        best = largest(raw / self.temperature, min(self.kept, len(raw)))
        logq = (1 - self.alpha) * best.values.log_softmax(-1)
        gains = raw.new_full((len(followers), len(raw)), float("-inf"))
        for row, found in zip(gains, followers):
            known = frequencies(found, WEIGHTS, len(raw))[best.indices.cpu()].to(raw)
            row[best.indices] = self._gain(logq, known)
        return gains

    def _gain(self, logq, known) -> torch.Tensor:
        if self.alpha == 0:
            return logq
        return logq + self.alpha * known.log() if bool(known.any()) else logq - self.penalty

    def _compared(self, lm: Lane, drafts) -> Iterator:
        """Compare the drafts' scores with their true log-probabilities, computed in one forward."""
        texts = [draft.leaf.written for draft in drafts]
        tree, paths = merged([text[:-1] for text in texts], "audit")
        rows = yield lm.extend(tree)
        truth = [
            sum(float(rows.logp[rows.row(node), token]) for node, token in zip(path, text))
            for path, text in zip(paths, texts)
        ]
        values = [[draft.score, logp] for draft, logp in zip(drafts, truth)]
        labels = [f"#{draft.leaf.number}" for draft in drafts]
        yield Figure(
            "matrix", "finished drafts", {"rows": labels, "columns": ["score", "log-probability"], "values": values}
        )


def shares(drafts: list[Beam]) -> list[float]:
    """Weight of each live draft in the mixture."""
    return torch.tensor([draft.score for draft in drafts], dtype=torch.float64).softmax(0).tolist()
