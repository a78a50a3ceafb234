"""What no choice of tokens can beat."""
from playground.contract import CachePolicy, knob
from playground.events import Figure


class OracleKeep(CachePolicy):
    """Keep the whole text, and let every row see only the tokens it attends to most: the bound for all rules that
    evict.

    A row's attention over the full cache is worked out first, and the `size` largest weights of each layer and KV head,
    summed over the query heads of a group, say what it may look at. Nobody can know that before the row is there, so
    this saves neither memory nor time: it shows how well a cache of that size could do. The figure is the share of
    attention that was kept, per layer. Rows choose for themselves, so guesses may be checked several at a time. The
    prompt is read in full. A baseline; the question is asked in H2O, Zhang et al. 2023, arXiv 2306.14048.
    """

    name, title, paper, sheet = "oracle_keep", "Oracle of attention", "2306.14048", "kv-cache/kv-baselines"
    guarantee = ("collapses",)
    watches, focuses = True, True

    size: int = knob(64, 1, 2048, step=1, help="tokens a row sees in each layer and KV head")

    def __post_init__(self):
        self._shares = {}  # of attention that was kept, by position and then by layer

    @classmethod
    def holding(cls, tokens, prompt):
        return {"size": tokens}

    def visible(self, query, key):
        return query >= key

    def focus(self, layer, weights, queries):
        most = weights.topk(min(self.size, weights.shape[-1]), -1).indices
        return weights.new_zeros(weights.shape).scatter(-1, most, 1).bool()

    def wants(self, position, prompt):
        return position >= prompt

    def attended(self, layer, weights, queries, keys):
        kept = weights.topk(min(self.size, weights.shape[-1]), -1).values.sum(-1) / weights.sum(-1)
        for position, share in zip(queries.tolist(), kept.mean(0).tolist()):
            self._shares.setdefault(position, {})[f"layer {layer}"] = share

    def explain(self, prompt, layers):
        for position, shares in sorted(self._shares.items()):
            yield Figure("scalar", "attention kept", {"x": position + 1 - prompt, "series": shares})
        self._shares = {}
