"""Attention sinks with a sliding window."""
from playground.contract import CachePolicy, knob


class SinkWindow(CachePolicy):
    """Keep the first few tokens and the most recent ones in the KV cache, forget everything between.

    The first tokens soak up attention that has nowhere else to go; without them the text falls apart as soon as they
    leave the window. Evicted slots are freed. With `renumbered` positions, as in the paper, a row stands at its place
    in the cache, so no token is ever further away than the cache is long; with true ones, as most libraries have it,
    the first tokens fall ever further behind. Without sinks this is a plain sliding window. The prompt itself is read
    with full attention. StreamingLLM, Xiao et al. 2023, arXiv 2309.17453.
    """

    name, title, paper, sheet = "sink_window", "Attention sinks + window", "2309.17453", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")

    sinks: int = knob(4, 0, 16, step=1, help="tokens at the very start that always stay")
    window: int = knob(64, 1, 1024, step=1, help="most recent tokens that stay, the one being written included")
    positions: str = knob(
        "true",
        choices=("true", "renumbered"),
        help="places by which rows and tokens are told apart: in the text or in the cache",
    )

    @classmethod
    def holding(cls, tokens, prompt):
        return {"window": max(1, tokens - cls.sinks)}

    def visible(self, query, key):
        return (key < self.sinks) | (query - key < self.window)

    def budget(self, generated):
        return self.sinks + self.window

    @property
    def renumbers(self):
        return self.positions == "renumbered"

    def far(self, key):
        return (key >= 0) & (key < self.sinks)

    def skipped(self, query):
        return (query + 1 - self.sinks - self.window).clamp(min=0)
