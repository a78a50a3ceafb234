"""First finish search."""
from collections import defaultdict
from collections.abc import Iterator

from playground.algorithms.search.final_answer import final_answer, whole_text
from playground.algorithms.search.parallel_samples import draw_many, finished
from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.errors import Refusal
from playground.events import Branches, Figure, Note


class FirstFinish(Decoder):
    """Sample several texts in parallel and return the one that ends first; the others are abandoned.

    Correct reasoning tends to be shorter than incorrect reasoning. This is best of N with brevity as the score, except
    that the other texts are never completed. Only the distribution of the length changes: given its length, the text
    follows the sampler's distribution. If several texts end at the same step, the first is returned. A text truncated
    by the length limit has not ended; if none ends, the one with the highest log-probability per token is returned.
    With `wait` above 1, the first `wait` texts to end vote on the answer; ties go to the answer that came first.
    Agarwal et al. 2025, arXiv 2505.18149.
    """

    name, title, paper, sheet = "first_finish", "First finish search", "2505.18149", "search/first-finish-search"
    guarantee = ("heuristic", "collapses")
    several = counts_forced = True

    n: int = knob(4, 1, 32, step=1, help="texts to sample; 1 is plain sampling")
    wait: int = knob(
        1,
        1,
        32,
        step=1,
        help="texts that have to end before the search stops; from 2 on their answers vote",
    )
    answer: str = knob(
        "number",
        choices=("number", "text"),
        help="answer of a text: the one it states, or its last number if it states none; or the whole text",
    )
    temperature: float = knob(
        0.8, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; at 0 every text is the greedy one"
    )

    def check(self) -> None:
        if self.wait > self.n:
            raise Refusal(
                f"{self.wait} of {self.n} texts cannot end: wait for at most {self.n}, or sample more.", "wait"
            )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        ended = []  # in the order in which they ended

        def enough(samples) -> bool:
            ended.extend(sample for sample in finished(samples) if sample not in ended)
            return len(ended) >= self.wait

        samples = yield from draw_many(lm, self.n, self._progress, enough)
        winner = self._elected(ended[:self.wait]) if ended else max(samples, key=lambda sample: sample.mean)
        yield Note(self._outcome(samples, ended, winner))
        lm.drop(sample.leaf for sample in samples if sample is not winner)
        yield lm.keep(winner.leaf)

    def _elected(self, ended):
        """The first text with the majority answer; texts without an answer do not vote."""
        votes = defaultdict(list)
        for sample in ended:
            votes[self._read(sample.leaf.text)].append(sample)
        votes.pop(None, None)
        return max(votes.values(), key=len)[0] if votes else ended[0]

    def _read(self, text: str) -> str | None:
        return {"number": final_answer, "text": whole_text}[self.answer](text)

    def _outcome(self, samples, ended, winner) -> str:
        if not ended:
            return (
                f"None of {len(samples)} texts ended within the length limit: {winner.label}, the most "
                "probable per token, is returned."
            )
        sampled, length = sum(sample.leaf.generated for sample in samples), winner.leaf.generated
        abandoned = sum(not sample.leaf.reason for sample in samples)
        tie = " Several ended at the same step: the first of them counts." if len(ended) > self.wait else ""
        return (
            f"{winner.label} with {length} tokens is returned; {abandoned} texts were abandoned, {sampled} tokens were "
            f"sampled in total.{tie}"
        )

    def _progress(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: sample.mean for sample in samples})
        if completed:
            labels, values = [sample.label for sample in samples], [sample.leaf.generated for sample in samples]
            yield Figure("bars", "tokens so far", {"labels": labels, "values": values})
