"""Attention sinks with a sliding window."""
from playground.contract import ReadsInChunks, RenumbersPositions, RestrictsPrompt, knob


class SinkWindow(ReadsInChunks, RestrictsPrompt, RenumbersPositions):
    """Keep the first few tokens and the most recent ones in the KV cache, and evict everything between.

    The first tokens act as attention sinks; without them the text degrades as soon as they leave the window. Evicted
    slots are freed. With `renumbered` positions, as in the paper, a token's position is its index in the cache, so
    distances never exceed the size of the cache; with `true` positions, as in most libraries, the distance to the first
    tokens keeps growing. Without sinks this is a plain sliding window. The prompt is read with full attention and then
    evicted, which keeps what its last tokens know of the evicted ones. With `windowed` prefill, as in the paper, the
    rows of the prompt see no more than later rows, so it is read in chunks, and no more than a chunk is ever held
    beside the budget: useful for prompts that do not fit into memory. The size of the chunks does not change the text.
    StreamingLLM, Xiao et al. 2023, arXiv 2309.17453.
    """

    name, title, paper, sheet = "sink_window", "Attention sinks + window", "2309.17453", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")

    sinks: int = knob(4, 0, 16, step=1, help="tokens at the start that always stay")
    window: int = knob(64, 1, 1024, step=1, help="most recent tokens that stay, including the current one")
    positions: str = knob(
        "true",
        choices=("true", "renumbered"),
        help="positions used by attention: those in the text, or those in the cache",
    )
    prefill: str = knob(
        "full", choices=("full", "windowed"), help="what tokens of the prompt see: all before them, or sinks and window"
    )
    chunk: int = knob(128, 1, 1024, step=1, help="with windowed prefill: tokens of the prompt read in one forward")

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"window": max(1, tokens - cls.sinks)}

    @property
    def restricts_prompt(self):
        return self.prefill == "windowed"

    @property
    def prefill_chunk(self):
        return self.chunk if self.restricts_prompt else 0

    def visible(self, query_positions, key_positions):
        return (key_positions < self.sinks) | (query_positions - key_positions < self.window)

    def budget(self, generated):
        return self.sinks + self.window

    @property
    def renumbers_positions(self):
        return self.positions == "renumbered"

    def before_gap(self, key_positions):
        return (key_positions >= 0) & (key_positions < self.sinks)

    def gap_width(self, query_positions):
        return (query_positions + 1 - self.sinks - self.window).clamp(min=0)
