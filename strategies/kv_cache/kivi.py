"""KIVI: keys and values in two, four or eight bits."""
from playground.algorithms.kv_cache.quantization import group_size, quantise
from playground.contract import Quantises, knob


class Kivi(Quantises):
    """Quantise all but the most recent tokens of the cache to a few bits per number: keys per channel, values per
    token.

    Keys have channels that are large in every token, so the tokens of one channel share a scale and a zero; values have
    no such channels, so the channels of one token share them. Keys are quantised `residual` tokens at a time, values
    once they are that old, and nothing is quantised twice. Codes are packed into bytes, scale and zero take two bytes
    each. Attention reads dequantised states, so this saves memory but no time. Groups are smaller if they do not divide
    the head or the residual. The prompt is read before anything is quantised. Liu et al. 2024, arXiv 2402.02750.
    """

    name, title, paper, sheet = "kivi", "Quantised cache (KIVI)", "2402.02750", "kv-cache/kv-baselines"
    guarantee = ("collapses",)

    bits: str = knob("2", choices=("2", "4", "8"), help="bits per number")
    group: int = knob(32, 8, 128, step=8, help="numbers that share a scale and a zero")
    residual: int = knob(
        32, 8, 1024, step=8, help="recent tokens in full precision; keys are quantised that many at a time"
    )

    def quantise_count(self, part, exact):
        return exact - exact % self.residual if part == "keys" else max(0, exact - self.residual)

    def quantised_bits(self, part, full):
        return int(self.bits) + 32 / self._size(part, full.head)

    def quantise(self, part, rows, packed):
        coded = quantise(rows, int(self.bits), 1 if part == "keys" else 2, self._size(part, rows.shape[2]))
        return packed.concat(coded) if packed else coded

    def _size(self, part, d):
        """Numbers that share a scale and a zero, for heads of d channels."""
        return group_size(self.residual if part == "keys" else d, self.group)
