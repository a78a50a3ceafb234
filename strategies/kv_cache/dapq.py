"""DapQ: pseudo queries at the positions of the answer select prompt tokens."""
from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.contract import ReadsAttention, ReadsProbes, knob
from playground.errors import Refusal


class DapQ(ReadsProbes, ReadsAttention):
    """Evict prompt tokens once, keeping those that pseudo queries at the positions of the answer attend to.

    A few pseudo tokens are read after the prompt, at the positions of the answer, and discarded. What a query attends
    to depends more on its position than on its token, so they approximate the attention of the answer. Scores are their
    attention, summed over them and over the query heads of a group, without their attention to each other. The prompt's
    own logits do not change, and the answer starts at its usual position. Generated tokens are not evicted. A
    reconstruction: the accessible sources do not specify which end of the prompt supplies more pseudo tokens, and
    whether the last prompt tokens are protected; here the end supplies more, and the last `recent` tokens are
    protected. Tian et al. 2026, arXiv 2603.11564.
    """

    name, title, paper, sheet = "dapq", "Pseudo queries (DapQ)", "2603.11564", "kv-cache/dapq"
    guarantee = ("budget_respected", "collapses")
    reconstruction, sure = True, "medium"
    prompt_only = True

    capacity: int = knob(64, 8, 2048, step=1, help="prompt tokens that stay")
    pretending: int = knob(32, 1, 128, step=1, help="pseudo tokens, read after the prompt and discarded")
    first: int = knob(
        2, 0, 32, step=1, help="pseudo tokens copied from the start of the prompt; the others are copied from its end"
    )
    content: str = knob(
        "ends",
        choices=("ends", "repeated"),
        help="source of the pseudo tokens: both ends of the prompt, or its last token repeated",
    )
    recent: int = knob(0, 0, 128, step=1, help="last tokens of the prompt that always stay")

    def __post_init__(self):
        self.attention = AttentionScores()

    def check(self):
        if self.recent > self.capacity:
            raise Refusal(
                f"recent is {self.recent} and only {self.capacity} prompt tokens stay: raise capacity.",
                "capacity",
            )

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"capacity": tokens}

    def probe_texts(self, text, room):
        return [self.probe_tokens(text)[:room]]

    def probe_tokens(self, text: list[int]) -> list[int]:
        """The pseudo tokens; none if the whole prompt stays."""
        if len(text) <= self.capacity:
            return []
        if self.content == "repeated":
            return text[-1:] * self.pretending
        first = min(self.first, self.pretending)
        return text[:first] + text[max(first, len(text) - self.pretending + first):]

    def wants_attention(self, position, prompt):
        return False  # only the attention of pseudo tokens counts

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, key_positions, self.text_length)

    def retain(self, held):
        if held.moment != "prefill":
            return held.live
        late = held.positions >= held.prompt - self.recent
        return late | top_slots(
            self.attention.of(held.layer, held.positions, held.next), self.capacity - self.recent, held.live & ~late
        )

    def budget(self, generated):
        return self.capacity + generated
