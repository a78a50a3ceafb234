"""Keys and values in two, four or eight bits."""
from playground.algorithms.kv_cache.quantization import fitting, quantise
from playground.contract import CachePolicy, knob


class Kivi(CachePolicy):
    """Hold all but the most recent tokens in a few bits for each number: keys channel by channel, values token by
    token.

    Keys have channels that are large in every token, so the tokens of one channel share a scale and a zero; values have
    none, so the channels of one token do. Keys are packed `residual` tokens at a time, values as soon as they are that
    old, and nothing is packed twice. Codes share bytes, scale and zero take two bytes each, and attention reads the
    unpacked rows, so memory is saved and time is not. Groups are made smaller where they do not divide a head or the
    residual. The prompt is read before anything is packed. Liu et al. 2024, arXiv 2402.02750.
    """

    name, title, paper, sheet = "kivi", "Quantised cache (KIVI)", "2402.02750", "kv-cache/kv-baselines"
    guarantee = ("collapses",)
    row_wise, packs = False, True  # by the path: what a row reads in full depends on when the rows before it were kept

    bits: str = knob("2", choices=("2", "4", "8"), help="bits of each number")
    group: int = knob(32, 8, 128, step=8, help="numbers that share a scale and a zero")
    residual: int = knob(
        32, 8, 1024, step=8, help="recent tokens that stay as they were written; keys are packed that many at a time"
    )

    def retain(self, held):
        return held.live

    def due(self, part, exact):
        return exact - exact % self.residual if part == "keys" else max(0, exact - self.residual)

    def packed_bits(self, part, full):
        return int(self.bits) + 32 / self._size(part, full.head)

    def encode(self, part, rows, packed):
        coded = quantise(rows, int(self.bits), 1 if part == "keys" else 2, self._size(part, rows.shape[2]))
        return packed.then(coded) if packed else coded

    def _size(self, part, d):
        """Numbers that share a scale and a zero, where a head has d."""
        return fitting(self.residual if part == "keys" else d, self.group)
