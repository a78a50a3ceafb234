"""Adaptive sampling with approximate expected futures."""
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp

import torch

from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.engine.sampling import largest
from playground.errors import Refusal
from playground.events import Branches, Figure, Note
from strategies.constrained.asap.prefix_trie import NEVER, ROOT, PrefixTrie

SHOWN = 10  # tokens of a step
OUTLINED = 40  # prefixes of what was learned


@dataclass
class GrammarSample:
    """A text sampled under the grammar, and its log-probability under the model."""

    leaf: object
    node: int | None = ROOT
    logp: float = 0.0
    learned: int = ROOT  # the last node whose row was learned

    @property
    def whole(self) -> bool:
        return self.leaf.reason in ("end", "grammar")

    def follow(self, trie: PrefixTrie, legal: torch.Tensor, token: int) -> None:
        self.learned = self.learned if self.node is None else self.node
        self.node, self.logp = trie.descend(self.node, legal, token), self.logp + float(legal[token])


def legal_of(rows) -> torch.Tensor:
    """log P of each token the grammar allows, [V], without renormalisation, since the masked probability is what is to
    be learned.
    """
    return rows.scores[0].cpu().double().log_softmax(-1).masked_fill(~rows.masks[0].cpu(), NEVER)


class ASAp(Decoder):
    """Sample many texts under a grammar and learn from each, so that samples converge to the model's own distribution
    over valid texts.

    A mask that is renormalised at every token favours prefixes whose valid continuations are improbable. Here each
    token's probability is multiplied by the probability that unconstrained sampling after it gives a valid text: 1 if
    nothing was sampled there yet, lower with every sample; a trie stores it for the next run with the same prompt. The
    first sample is that of a plain mask, and the distribution of later ones converges to the model's, given the
    grammar. Each token of a sample takes one row. Dead ends are learned and the sample is repeated; a text truncated by
    the length limit teaches nothing about its end. Park et al. 2024, arXiv 2405.21047.
    """

    name, title, paper, sheet = "asap", "ASAp: grammar-aligned sampling", "2405.21047", "constrained/asap-gad"
    guarantee, needs, refuses = ("heuristic",), ("constraint",), ("sampler",)
    several = owns_constraint = remembers = True

    samples: int = knob(10, 1, 500, step=1, help="texts sampled one after the other; each improves the next")
    temperature: float = knob(
        1.0, 0.3, 1.5, step=0.05, help="of the target distribution; 1 is the model's own"
    )
    text: str = knob(
        "last",
        choices=("last", "most probable"),
        help="which of the complete texts becomes the answer; the last one follows the target distribution",
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        circumstances = [part for part in lm.assembly.parts() if part.name != self.name]
        trie = lm.memory(self.name, PrefixTrie, lm.tokens, lm.prompt_length, circumstances)
        chosen, found = None, Counter()
        for number in range(1, self.samples + 1):
            sample = yield from self._draw(lm, trie)
            found[sample.leaf.text] += 1
            yield from self._tell(lm, trie, sample, number, found)
            # of equals the later one
            *others, chosen = sorted([sample] if chosen is None else [chosen, sample], key=self._rank)
            lm.drop([other.leaf for other in others])
        yield lm.keep(chosen.leaf)

    def _rank(self, sample: GrammarSample) -> tuple[bool, float]:
        return sample.whole, sample.logp if self.text == "most probable" else 0.0

    def _draw(self, lm: Lane, trie: PrefixTrie) -> Iterator:
        """One sample, from the end of the prompt on; restarted at a dead end."""
        sample = GrammarSample(lm.fork(1)[0])
        try:
            while not sample.leaf.reason:
                [rows] = yield lm.extend([sample.leaf])
                legal = legal_of(rows)
                weights = trie.weigh(sample.node, legal)
                if weights.max() == NEVER:
                    sample = self._begin_again(lm, trie, sample, legal)
                    continue
                rows.add_stage("mask", legal[None])
                rows.add_stage(self.name, weights[None])
                choice = lm.pick(rows)
                yield self._odds(lm, legal, weights)
                yield lm.keep([choice])
                sample.follow(trie, legal, choice.token)
        finally:  # a run that is stopped keeps what it learned
            trie.settle(sample.learned)
        return sample

    def _begin_again(self, lm: Lane, trie: PrefixTrie, sample: GrammarSample, legal: torch.Tensor) -> GrammarSample:
        trie.learn(sample.node, legal)
        trie.settle(sample.learned if sample.node is None else sample.node)
        if sample.node is None or trie.chances[ROOT] == NEVER:
            raise Refusal(
                "The grammar leads this model into dead ends only, where it allows no token: loosen it.", "constraint"
            )
        lm.drop([sample.leaf])
        return GrammarSample(lm.fork(1)[0])

    def _odds(self, lm: Lane, legal: torch.Tensor, weights: torch.Tensor) -> Figure:
        """The most probable allowed tokens: by the model, with a mask alone, as sampled, and the probability that they
        lead to a valid text.
        """
        top = largest(legal, min(SHOWN, int((legal > NEVER).sum()))).indices
        columns = torch.stack([legal.exp(), legal.softmax(0), weights.softmax(0), (weights - legal).exp()], 1)[top]
        return Figure(
            "matrix",
            "next token",
            {
                "rows": [lm.piece(token) for token in top.tolist()],
                "values": columns.tolist(),
                "columns": ["model", "mask alone", "sampled from", "validity after it"],
            },
        )

    def _tell(self, lm: Lane, trie: PrefixTrie, sample: GrammarSample, number: int, found: Counter) -> Iterator:
        chance, ending = exp(trie.chances[ROOT]), "" if sample.whole else ", cut off before its end"
        yield Branches(scores={sample.leaf.number: sample.logp})
        yield Note(
            f"Sample {number} of {self.samples}: {sample.leaf.text!r}{ending}, log-probability {sample.logp:.2f}. As"
            f" far as is known, at most {chance:.3g} of what the model writes freely is legal.",
            sample.leaf.number,
        )
        yield Figure(
            "scalar",
            "chance of a legal text, by sample",
            {"x": number - 1, "axis": "sample", "series": {"at most": chance}},
        )
        texts, counts = zip(*found.most_common(SHOWN))
        yield Figure("bars", "samples, by their text", {"labels": list(texts), "values": list(counts)})
        nodes, parents = trie.outline(OUTLINED)
        labels = [lm.piece(trie.tokens[node]) if node else "the prompt" for node in nodes]
        yield Figure(
            "tree",
            "chance of a legal end",
            {"labels": labels, "parents": parents, "values": [exp(trie.chances[node]) for node in nodes]},
        )
