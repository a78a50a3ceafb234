"""Tokens that only pretend to be the answer say which of the prompt matter."""
from playground.algorithms.kv_cache.attention_scores import Votes, heaviest
from playground.contract import CachePolicy, knob
from playground.errors import Refusal


class DapQ(CachePolicy):
    """Cut the prompt once, to the tokens that rows at the places of the answer attend to, whatever those rows say.

    A few tokens are read behind the prompt, where the answer will stand, and forgotten: what a row looks for depends on
    its place more than on its token, so they look where the answer will. Their attention, summed over them and over the
    query heads of a group, is the vote; attention among themselves counts for nothing. The prompt's own rows are not
    touched, and the answer begins where it would have. What is generated stays. A reconstruction: what could be read of
    it leaves open which end of the prompt lends more tokens, and whether the last ones are safe; here its end does, and
    `recent` are. Tian et al. 2026, arXiv 2603.11564.
    """

    name, title, paper, sheet = "dapq", "Pseudo queries (DapQ)", "2603.11564", "kv-cache/dapq"
    guarantee = ("budget_respected", "collapses")
    reconstruction, sure = True, "medium"
    row_wise, watches = False, True

    capacity: int = knob(64, 8, 2048, step=1, help="tokens of the prompt that stay")
    pretending: int = knob(32, 1, 128, step=1, help="tokens that are read behind the prompt and forgotten")
    first: int = knob(
        2, 0, 32, step=1, help="how many of them are taken from the start of the prompt, the others from its end"
    )
    content: str = knob(
        "ends",
        choices=("ends", "repeated"),
        help="what they say: both ends of the prompt, or its last token over and over",
    )
    recent: int = knob(0, 0, 128, step=1, help="last tokens of the prompt that stay in any case")

    def __post_init__(self):
        self.votes = Votes()

    def check(self):
        if self.recent > self.capacity:
            raise Refusal(
                f"recent is {self.recent} and only {self.capacity} tokens of the prompt stay: raise capacity.",
                "capacity",
            )

    @classmethod
    def holding(cls, tokens, prompt):
        return {"capacity": tokens}

    def rehearsal(self, text):
        if len(text) <= self.capacity:
            return []
        if self.content == "repeated":
            return text[-1:] * self.pretending
        first = min(self.first, self.pretending)
        return text[:first] + text[max(first, len(text) - self.pretending + first):]

    def wants(self, position, prompt):
        return False  # no row of the text votes

    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights, keys)

    def retain(self, held):
        if held.moment != "prefill":
            return held.live
        late = held.positions >= held.prompt - self.recent
        return late | heaviest(
            self.votes.of(held.layer, held.positions), self.capacity - self.recent, held.live & ~late
        )

    def budget(self, generated):
        return self.capacity + generated
