"""Diverse beam search."""
from collections.abc import Iterator

from playground.algorithms.search.beams import Beams, compared, log_probabilities
from playground.contract import Decoder, Lane, knob
from playground.errors import Refusal
from playground.events import Branches, Figure
from strategies.search.diverse_beam_search import diversity


class DiverseBeamSearch(Decoder):
    """Beam search in groups, each penalised for what earlier groups wrote.

    The beams are split into groups of equal size that choose one after another. A token costs `strength` nats for each
    beam of an earlier group that took it in this step (Hamming); less the more the two texts differ already
    (cumulative); for each occurrence of the n-gram it completes in their texts (n-gram); or for its similarity to the
    tokens they took, by the cosine of embeddings (embedding). Penalties remain part of the sum that ranks texts within
    a group. The result is the group winner with the highest log-probability under the model, after samplers that do
    not draw. Vijayakumar et al. 2016, arXiv 1610.02424, with the four diversity functions of the paper, word2vec
    replaced by the model's own embeddings; the choice between the groups is ours, the paper returns all texts.
    """

    name, title, paper, sheet = "diverse_beam_search", "Diverse beam search", "1610.02424", "search/diverse-beam-search"
    guarantee, refuses = ("heuristic", "collapses"), ("drawing",)
    several = counts_forced = True

    beams: int = knob(6, 1, 64, step=1, help="sequences that grow in parallel, over all groups")
    groups: int = knob(2, 1, 16, step=1, help="number of groups, a divisor of the beams; 1 is plain beam search")
    strength: float = knob(
        0.5, 0.0, 2.0, step=0.1, help="penalty of a token, in nats, for each beam of an earlier group that took it"
    )
    diversity: str = knob(
        "hamming", choices=("hamming", "cumulative", "n-gram", "embedding"), help="what counts as a repetition"
    )
    n: int = knob(2, 1, 8, step=1, help="for n-gram: its length in tokens")
    backoff: float = knob(2.0, 0.1, 20.0, step=0.1, help="for cumulative: differences after which a penalty fades")
    length_exponent: float = knob(
        0.0, 0.0, 2.0, step=0.1, help="0 ranks texts by their sum, which favours short ones; 1 by the mean"
    )

    def check(self) -> None:
        if self.beams % self.groups:
            raise Refusal(
                f"{self.beams} beams cannot be split into {self.groups} equal groups: choose a number of groups that "
                "divides them.",
                "groups",
            )

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        groups = [Beams(leaf, self.beams // self.groups, self.length_exponent) for leaf in lm.fork(self.groups)]
        while active := {number: group for number, group in enumerate(groups, 1) if group.live}:
            rows = yield lm.extend([beam.leaf for group in active.values() for beam in group.live])
            choices, penalties = self._choose(lm, active, rows)
            yield lm.keep(choices)
            for group in active.values():
                group.retire(lm)
            yield Branches(
                scores={number: rank for group in groups for number, rank in group.ranks().items()},
                sums={number: total for group in groups for number, total in group.sums().items()},
            )
            yield penalties
        yield from compared([beam for group in groups for beam in group.finished])
        yield self._sums(groups)
        winner = max(groups, key=lambda group: group.of_length(group.finished[0].logp, group.finished[0]))
        yield lm.keep(winner.finished[0].leaf)

    def _choose(self, lm: Lane, groups, rows) -> tuple[list, Figure]:
        """Choose the continuations group by group. Returns the choice of each beam, and a figure of the penalties."""
        earlier, choices, labels, values = [], [], [], []
        for number, group in groups.items():
            own, rows = rows[:len(group.live)], rows[len(group.live):]
            logp, texts = log_probabilities(own), [beam.leaf.written for beam in group.live]
            penalties = self.strength * self._penalties(lm, texts, earlier, logp)
            offers = group.choose(logp - penalties, lm.ends)
            group.follow(lm, offers, logp)
            choices += [
                lm.choose(own[offer.place], offer.token, leaf=beam.leaf) for offer, beam in zip(offers, group.live)
            ]
            labels += [f"{number} {lm.piece(offer.token)}" for offer in offers]
            values += [
                [float(logp[place, token]), -float(penalties[place, token]), score] for place, token, score in offers
            ]
            earlier += [[*texts[offer.place], offer.token] for offer in offers if not lm.ends(offer.token)]
        return choices, matrix("group and token", ["log-probability", "penalty", "sum of the text"], labels, values)

    def _penalties(self, lm: Lane, own, earlier, logp):
        """The penalties [live, V] of a group, in units of `strength`."""
        match self.diversity:
            case "cumulative":
                return diversity.cumulative(own, earlier, logp, self.backoff)
            case "n-gram":
                return diversity.ngrams(own, earlier, logp, self.n)
            case "embedding":
                return diversity.embedding(own, earlier, logp, lm.embed)
        return diversity.hamming(own, earlier, logp)

    def _sums(self, groups) -> Figure:
        beams = [beam for group in groups for beam in group.finished]
        values = [[beam.logp, beam.score - beam.logp, beam.score] for beam in beams]
        return matrix(
            "finished texts",
            ["log-probability", "penalties", "sum"],
            [f"#{beam.leaf.number}" for beam in beams],
            values,
        )


def matrix(name: str, columns: list[str], rows: list[str], values: list[list[float]]) -> Figure:
    return Figure("matrix", name, {"rows": rows, "columns": columns, "values": values})
