"""A budget for the thinking part of a text."""
import math
from collections.abc import Iterator

from playground.algorithms.sampling.repetition import parse_marks
from playground.algorithms.search.thinking_part import ThinkingPart
from playground.contract import Decoder, Lane, knob
from playground.errors import Refusal
from playground.events import Figure, Note


class ThinkingBudget(Decoder):
    """Cut a text's thinking part off after a number of tokens, extend it where it would end, or leave it early once a
    trial answer is certain.

    The part stands between two tags. When the budget is used up, a message and the end tag are forced, after the bytes
    of a begun character. With `waits`, the first end tags are replaced by a word such as "Wait", and the thinking goes
    on. With `confidence`, thinking pauses at every mark: the end tag and a trial answer are written beside the text,
    greedily, and if the geometric mean of its probabilities is high enough the text goes on with it; otherwise it is
    dropped. Models without tags can be given texts that they write, and an empty start tag if they think from the
    first token on. With budget -1, no waits and confidence 0 this is plain decoding. The budget is that of llama.cpp
    (2026); waits: Muennighoff et al. 2025, arXiv 2501.19393; early answers: Yang et al. 2025, arXiv 2504.15895.
    """

    name, title, paper, sheet = "thinking_budget", "Thinking budget", "2501.19393", "search/reasoning-budget"
    guarantee, several, sure = ("collapses",), True, "medium"
    new_in = "2026"
    # a grammar would have to wait for the answer; the others cannot undo an end tag that is taken back
    refuses = ("constraint", "cache_policy", "mirostat", "adaptive_p")

    budget: int = knob(64, -1, 4096, step=1, help="tokens of the thinking part; -1 sets no limit")
    message: str = knob("", help="text that is written before the end tag when the budget is used up")
    waits: int = knob(0, 0, 8, step=1, help="how many end tags are replaced, so that the thinking goes on")
    wait: str = knob("\nWait", help="what replaces an end tag")
    confidence: float = knob(
        0.0, 0.0, 1.0, step=0.01, help="mean probability of a trial answer from which thinking ends early; 0: no trials"
    )
    marks: str = knob("\\n Wait Alternatively", help="ends of a token after which a trial is made, separated by spaces")
    opener: str = knob("", help="text after the end tag with which a trial answer begins")
    longest: int = knob(16, 1, 128, step=1, help="maximum tokens of a trial answer")
    start: str = knob("<think>", help="tag that begins the thinking part; empty: it begins with the text")
    end: str = knob("</think>", help="tag that ends it")

    def check(self) -> None:
        if not self.end:
            raise Refusal("The thinking part needs an end: enter the model's tag, such as </think>.", "end")

    def thinking_tags(self) -> tuple[str, str]:
        return self.start, self.end

    def check_target(self, model) -> None:
        if self.start and not model.tokens.can_spell(self.start):
            return  # it has no thinking part
        for name in ("message", "wait", "opener", "end"):
            if (text := getattr(self, name)) and not model.tokens.can_spell(text):
                raise Refusal(f"This model has no tokens for all of {text!r}: choose another text.", name)

    def decode(self, lm: Lane) -> Iterator:
        rows = yield lm.prefill()
        part = ThinkingPart(lm, self.start, self.end)
        while True:
            if part.opened and 0 <= self.budget <= part.used and not part.inside_character:
                yield Note(f"The budget of {self.budget} tokens is used up: the end of the thinking part is forced.")
                rows = yield from self._force(lm, part, rows, self.message + self.end)
                continue
            choice = lm.pick(rows)
            if part.opened and part.waits < self.waits and part.closes_with(choice.token):
                rows = yield from self._go_on(lm, part, rows)
                continue
            yield from part.follow(choice.token)
            yield lm.keep(choice)
            if part.opened and self.confidence and lm.piece(choice.token).endswith(parse_marks(self.marks)):
                yield from self._try(lm, part)
            rows = yield lm.extend()

    def _force(self, lm: Lane, part: ThinkingPart, rows, text: str) -> Iterator:
        """Write a text whatever the model prefers; returns the row after it."""
        tokens, first = lm.spell(text), lm.generated
        yield Figure("spans", "forced text", {"spans": [[first, first + len(tokens), "forced", len(tokens)]]})
        for token in tokens:
            yield from part.follow(token)
            yield lm.keep(lm.choose(rows, token))
            rows = yield lm.extend()
        return rows

    def _go_on(self, lm: Lane, part: ThinkingPart, rows) -> Iterator:
        """Take the beginning of an end tag back and write the word that replaces it; returns the row after it."""
        part.waits += 1
        yield Note(f"The thinking part would end here and goes on ({part.waits} of {self.waits}).")
        if count := part.take_tag_back():
            yield lm.roll_back(count)
            rows = yield lm.extend()
        return (yield from self._force(lm, part, rows, self.wait))

    def _try(self, lm: Lane, part: ThinkingPart) -> Iterator:
        """Write a trial answer beside the text, and go on with it if it is certain enough."""
        [leaf] = lm.fork(1)
        yield from self._open(lm, leaf)
        logps = []
        while not leaf.reason and len(logps) < self.longest:
            [row] = yield lm.extend([leaf])
            token = int(row.logp[0].argmax())
            logps.append(float(row.logp[0, token]))
            yield lm.keep([lm.choose(row, token)])
        certain = math.exp(sum(logps) / len(logps)) if logps else 0.0
        tokens = leaf.written[lm.generated:]
        answer = lm.text_of(tokens[len(tokens) - len(logps):])
        yield Figure("bars", "probability of the trial answer", {"labels": [answer], "values": [certain]})
        if certain < self.confidence:
            lm.drop([leaf])
            return
        yield Note(f"The trial answer {answer!r} has a mean probability of {certain:.2f}: thinking ends early.")
        for token in tokens:
            yield from part.follow(token)
        yield lm.keep(leaf)

    def _open(self, lm: Lane, leaf) -> Iterator:
        """Write what comes before a trial answer."""
        for token in lm.spell(self.end + self.opener):
            if not leaf.reason:
                [row] = yield lm.extend([leaf])
                yield lm.keep([lm.choose(row, token)])
