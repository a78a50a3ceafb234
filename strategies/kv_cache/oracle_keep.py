"""Oracle of attention: the largest attention mass that a given number of tokens can have."""
from playground.contract import ReadsAttention, SelectsPerRow, knob
from playground.events import Figure


class OracleKeep(SelectsPerRow, ReadsAttention):
    """Keep the full cache, but mask all except the tokens that each query position attends to most.

    Attention over the full cache is computed first, and the `size` largest weights of each layer and KV head, summed
    over the query heads of a group, select the visible tokens. This requires the position's own query, so it saves
    neither memory nor time. No other selection of that size keeps more of this attention, whose share the figure shows
    per layer. The error of the output has no such bound: it also depends on the values, so a policy that keeps less
    attention can generate better text. Each position selects separately, so several draft tokens can be verified at
    once. The prompt is read in full. A baseline; that few tokens receive most of the attention is observed in H2O,
    Zhang et al. 2023, arXiv 2306.14048.
    """

    name, title, paper, sheet = "oracle_keep", "Oracle of attention", "2306.14048", "kv-cache/kv-baselines"
    guarantee = ("collapses",)

    size: int = knob(64, 1, 2048, step=1, help="tokens visible to each query position, per layer and KV head")

    def __post_init__(self):
        self._shares = {}  # of attention kept, by position and layer

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"size": tokens}

    def select_for_rows(self, layer, weights, query_positions):
        most = weights.topk(min(self.size, weights.shape[-1]), -1).indices
        return weights.new_zeros(weights.shape).scatter(-1, most, 1).bool()

    def wants_attention(self, position, prompt):
        return position >= prompt

    def observe_attention(self, layer, weights, query_positions, key_positions):
        kept = weights.topk(min(self.size, weights.shape[-1]), -1).values.sum(-1) / weights.sum(-1)
        for position, share in zip(query_positions.tolist(), kept.mean(0).tolist()):
            self._shares.setdefault(position, {})[f"layer {layer}"] = share

    def explain(self, prompt, layers):
        for position, shares in sorted(self._shares.items()):
            yield Figure("scalar", "attention kept", {"x": position + 1 - prompt, "series": shares})
        self._shares = {}
