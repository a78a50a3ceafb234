"""CacheGen: a prompt's KV cache as a compressed byte stream."""
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from playground.contract import CachePolicy, knob
from playground.events import Figure
from strategies.kv_cache.cachegen.entropy_coding import decode, encode, tables

DEPTH = 32  # layers of the model that the levels were tuned for
# layers below 10, below 20 and above, of 32
KEY_BINS = {"1": (16, 16, 12), "2": (32, 16, 16), "3": (32, 32, 32)}
VALUE_BINS = {"1": (16, 12), "2": (32, 16), "3": (32, 32)}  # layers below 2 and above
ANCHOR = 256  # bins of an anchor, which is stored uncoded since its table would be larger than itself


class CacheGen(CachePolicy):
    """Continue from a prompt's KV cache that was transmitted as bytes: it is encoded after the prefill, decoded, and
    replaced by the result.

    The numbers of a token are scaled by their largest magnitude and rounded to a few bins, fewer in later layers; then
    each channel of a layer is entropy-coded by its own statistics, without loss. The last token of the prompt is not
    transmitted, and its logits stay exact. In the paper tokens are coded as differences to the first of their group,
    the anchor; the released code, and this one at `group` 1, omit that. The transmitted bytes are reduced, not the
    cache in memory, and for a short prompt the tables dominate. Arithmetic coding is replaced by an asymmetric numeral
    system of equal size that processes all channels at once; the choice of a level per chunk is left out. Liu et al.
    2023, arXiv 2310.07240.
    """

    name, title, paper, sheet = "cachegen", "Cache as a stream (CacheGen)", "2310.07240", "kv-cache/cachegen"
    guarantee, sure = ("heuristic",), "medium"
    prompt_only = True

    level: str = knob(
        "2", choices=("1", "2", "3"), help="quality: the number of bins; 3 has the most"
    )
    group: int = knob(
        1,
        1,
        32,
        step=1,
        help="neighbouring tokens coded as differences to the first of them; 1 codes every token separately",
    )

    def __post_init__(self):
        self._sent, self._shown = {}, False

    def retain(self, held):
        if held.moment == "prefill" and held.layer not in self._sent and held.positions.shape[1] > 1:
            self._sent[held.layer] = {part: self._send(held, part) for part in ("keys", "values")}
        return held.live

    def _send(self, held, part):
        """Replace the cached states by the decoded stream; returns its size in bytes and the number of values coded."""
        rows = held.read(part)
        sent = rows[:, :-1].transpose(0, 1).flatten(1)
        stream = pack(sent, self.bins(part, held.layer, held.layers), self.group)
        decoded = unpack(stream).to(rows).unflatten(1, (len(rows), -1)).transpose(0, 1)
        held.write(part, torch.cat([decoded, rows[:, -1:]], 1))
        return len(stream), sent.numel()

    def bins(self, part, layer, layers):
        """Number of bins for a layer."""
        deep = layer * DEPTH / layers
        if part == "keys":
            return KEY_BINS[self.level][(deep >= 10) + (deep >= 20)]
        return VALUE_BINS[self.level][deep >= 2]

    def explain(self, prompt, layers):
        if not self._sent or self._shown:
            return
        keys, values = ([self._sent[layer][part] for layer in range(layers)] for part in ("keys", "values"))
        labels = {"rows": [f"layer {layer}" for layer in range(layers)], "columns": ["keys", "values"]}
        bits = [[8 * size / count for size, count in both] for both in zip(keys, values)]
        yield Figure("matrix", "bits per number sent", {**labels, "values": bits})
        size, count = (sum(column) for column in zip(*keys, *values))
        bars = {"labels": ["at 16 bits", "at 8 bits", "this stream"], "values": [2 * count, count, size]}
        yield Figure("bars", "bytes to send", bars)
        self._shown = True


# --- from numbers to bins, and back ---

@dataclass(frozen=True)
class Binned:
    """Rows [n, channels] as symbols, with the largest magnitude of each row as its scale."""

    symbols: numpy.ndarray  # [n, channels]
    scale: numpy.ndarray  # float32 [n]
    bins: int

    def rows(self) -> numpy.ndarray:
        half = self.bins // 2 - 1
        return (self.symbols.astype(numpy.int64) - half) / half * self.scale[:, None].astype(numpy.float64)


def binned(rows: numpy.ndarray, bins: int) -> Binned:
    """Round each number to its nearest bin; as in the released code one bin is unused, or two if `bins` is odd."""
    scale, half = numpy.abs(rows).max(1).astype(numpy.float32), bins // 2 - 1
    spread = numpy.where(scale > 0, scale, 1)[:, None]
    return Binned(numpy.rint(rows * half / spread).clip(-half, half).astype(numpy.int64) + half, scale, bins)


# --- from bins to bytes, and back ---

HEAD, PART = "<IIH", "<IHI"  # rows, channels, group; and of a part: rows, bins, words


def pack(rows: Tensor, bins: int, group: int) -> bytes:
    """Encode rows [n, channels] as bytes; `unpack` decodes them to the precision of the bins."""
    numbers = rows.detach().cpu().double().numpy()
    head = struct.pack(HEAD, *numbers.shape, group)
    if group == 1:
        return head + _written(binned(numbers, bins))
    anchors = binned(numbers[::group], ANCHOR)
    # relative to the decoded anchors, so that errors do not accumulate
    differences = numbers - anchors.rows().repeat(group, 0)[:len(numbers)]
    return head + _written(anchors) + _written(binned(differences[_others(len(numbers), group)], bins))


def unpack(stream: bytes) -> Tensor:
    """Decode the rows [n, channels] of a stream, in float64."""
    n, channels, group = struct.unpack_from(HEAD, stream)
    parts = list(_read(stream, struct.calcsize(HEAD), channels))
    if group == 1:
        return torch.from_numpy(parts[0].rows())
    rows = parts[0].rows().repeat(group, 0)[:n]
    rows[_others(n, group)] += parts[1].rows()
    return torch.from_numpy(rows)


def _others(n: int, group: int) -> numpy.ndarray:
    """Which of n rows are not anchors."""
    return numpy.arange(n) % group != 0


def _written(part: Binned) -> bytes:
    if part.bins == ANCHOR or not len(part.symbols):
        return (
            struct.pack(PART, len(part.symbols), part.bins, 0)
            + part.scale.astype("<f4").tobytes()
            + part.symbols.astype("u1").tobytes()
        )
    kinds = 2 * (part.bins // 2 - 1) + 1
    starts = tables(part.symbols, kinds)
    last, counts, words = encode(part.symbols, starts)
    head = struct.pack(PART, len(part.symbols), part.bins, len(words))
    shapes = (part.scale, "<f4"), (starts[:, 1:-1], "<u2"), (last, "<u4"), (counts, "<u4"), (words, "<u2")
    return head + b"".join(column.astype(kind).tobytes() for column, kind in shapes)


def _read(stream: bytes, at: int, channels: int) -> Iterator[Binned]:
    while at < len(stream):
        n, bins, length = struct.unpack_from(PART, stream, at)
        at, kinds = at + struct.calcsize(PART), 2 * (bins // 2 - 1) + 1
        plain = bins == ANCHOR or not n
        coded = [(channels * (kinds - 1), "<u2"), (channels, "<u4"), (channels, "<u4"), (length, "<u2")]
        columns = []
        for count, kind in [(n, "<f4"), (n * channels, "u1")] if plain else [(n, "<f4"), *coded]:
            columns.append(numpy.frombuffer(stream, kind, count, at))
            at += columns[-1].nbytes
        yield Binned(columns[1].reshape(n, channels) if plain else _decoded(columns[1:], n), columns[0], bins)


def _decoded(columns: list[numpy.ndarray], n: int) -> numpy.ndarray:
    """Symbols [n, channels] from the inner table starts, final states, word counts and words."""
    inner, *coded = columns
    channels = len(coded[0])
    starts = numpy.pad(inner.reshape(channels, -1).astype(numpy.int64), ((0, 0), (1, 1)))
    starts[:, -1] = 1 << 16
    return decode(*(column.astype(numpy.int64) for column in coded), starts, n)
