"""Tokens with short keys stay."""
from playground.errors import Refusal
from playground.parts.votes import heaviest
from playground.strategy import CachePolicy, knob


class KeyNorm(CachePolicy):
    """Keep the tokens whose keys are shortest: in trained models those are the ones that will be attended to.

    Goes by the L2 norm of a key alone, in each layer and KV head by itself, so no attention has to be looked at and no query
    awaited. It is found in many models and explained in none; where it does not hold, this keeps the wrong half. A rotation
    changes no length, so positions do not matter. Devoto et al. 2024, arXiv 2406.11430, who leave the first layers whole; here
    every layer is cut.
    """

    name, title, paper, sheet = "key_norm", "By the length of keys", "2406.11430", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")
    row_wise = False

    size: int = knob(64, 1, 2048, step=1, help="tokens that stay, recent ones included")
    recent: int = knob(0, 0, 1024, step=1, help="most recent tokens that stay however long their keys are")

    def check(self):
        if self.recent > self.size:
            raise Refusal(f"recent is {self.recent} and only {self.size} tokens stay: raise size.", "size")

    @classmethod
    def holding(cls, tokens, prompt):
        return {"size": tokens}

    def retain(self, held):
        recent = held.positions >= held.next - self.recent
        length = held.read("keys").norm(dim=-1)
        return recent | heaviest(-length, self.size - self.recent, held.live & ~recent)

    def budget(self, generated):
        return self.size
