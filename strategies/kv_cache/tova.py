"""The last row says which token goes."""
from playground.algorithms.kv_cache.attention_scores import Votes, heaviest
from playground.contract import CachePolicy, knob


class Tova(CachePolicy):
    """Keep the tokens the newest one attends to most; the one it attends to least goes, however old or new it is.

    Only the last row that was kept votes, and all heads of a layer vote together: weights are summed over them, and
    they keep the same tokens. Nothing is protected, neither the start of the text nor its end. The prompt is cut by its
    last row. Where several guesses are kept at once, the last of them votes for all. Oren et al. 2024, arXiv
    2401.06104.
    """

    name, title, paper, sheet = "tova", "By the last token's attention (TOVA)", "2401.06104", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")
    row_wise, watches = False, True

    size: int = knob(64, 1, 2048, step=1, help="tokens that stay")

    def __post_init__(self):
        self.votes = Votes()

    @classmethod
    def holding(cls, tokens, prompt):
        return {"size": tokens}

    def wants(self, position, prompt):
        return position >= prompt - 1

    def attended(self, layer, weights, queries, keys):
        self.votes.replace(layer, weights[:, -1:].sum(0, keepdim=True), keys)

    def retain(self, held):
        return heaviest(self.votes.of(held.layer, held.positions), self.size, held.live)

    def budget(self, generated):
        return self.size
