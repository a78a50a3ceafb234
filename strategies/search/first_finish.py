"""First finish search."""
from collections import defaultdict
from collections.abc import Iterator

from playground.algorithms.search.final_answer import last_number, whole_text
from playground.algorithms.search.parallel_samples import draw_many, finished
from playground.contract import Decoder, Strategy, knob, make
from playground.errors import Refusal
from playground.events import Branches, Figure, Note


class FirstFinish(Decoder):
    """Draw several texts side by side and take the one that ends first; the others are given up unfinished.

    Right reasoning tends to be shorter than wrong. Where a text is likely to be right because it is short, this is best
    of N with the length as its score, and the losers are never written out. It only tilts the length: given that, the
    text follows the sampler's law. Of texts that end with the same token the first one is taken; one cut off by the
    length has not ended, and if none ends, that with the largest log-probability per token is taken. With `wait` above
    1 so many texts are awaited and their answers vote, of equals the one that came first. Agarwal et al. 2025, arXiv
    2505.18149.
    """

    name, title, paper, sheet = "first_finish", "First finish search", "2505.18149", "search/first-finish-search"
    guarantee, several = ("heuristic", "collapses"), True

    n: int = knob(4, 1, 32, step=1, help="texts that are drawn; 1 is plain sampling")
    wait: int = knob(
        1,
        1,
        32,
        step=1,
        help="texts that have to end; from 2 on their answers vote, with as many as are drawn all of them",
    )
    answer: str = knob("number", choices=("number", "text"), help="what votes: the last number or the whole text")
    temperature: float = knob(
        0.8, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; at 0 all texts are the greedy one"
    )

    def check(self) -> None:
        if self.wait > self.n:
            raise Refusal(f"Of {self.n} texts {self.wait} cannot end: wait for {self.n} at most, or draw more.", "wait")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        ended = []  # in the order in which they ended

        def enough(samples) -> bool:
            ended.extend(sample for sample in finished(samples) if sample not in ended)
            return len(ended) >= self.wait

        samples = yield from draw_many(lm, self.n, self._standings, enough)
        winner = self._elected(ended[:self.wait]) if ended else max(samples, key=lambda sample: sample.mean)
        yield Note(self._outcome(samples, ended, winner))
        lm.drop(sample.leaf for sample in samples if sample is not winner)
        yield lm.keep(winner.leaf)

    def _elected(self, ended):
        """The first text that gave the answer most of them gave; one without an answer does not vote."""
        votes = defaultdict(list)
        for sample in ended:
            votes[self._read(sample.leaf.text)].append(sample)
        votes.pop(None, None)
        return max(votes.values(), key=len)[0] if votes else ended[0]

    def _read(self, text: str) -> str | None:
        return {"number": last_number, "text": whole_text}[self.answer](text)

    def _outcome(self, samples, ended, winner) -> str:
        if not ended:
            return f"None of {len(samples)} texts ended within the length: {winner.label}, the most probable per token, is taken."
        drawn, length = sum(sample.leaf.generated for sample in samples), winner.leaf.generated
        cut = sum(not sample.leaf.reason for sample in samples)
        tie = " Several ended with the same token: the first of them counts." if len(ended) > self.wait else ""
        return f"{winner.label} with {length} tokens is taken; {cut} texts were given up on the way, {drawn} tokens were drawn in all.{tie}"

    def _standings(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: sample.mean for sample in samples})
        if completed:
            labels, values = [sample.label for sample in samples], [sample.leaf.generated for sample in samples]
            yield Figure("bars", "tokens so far", {"labels": labels, "values": values})
