"""CacheGen: entropy coding, and a cache as a stream of bytes."""
from __future__ import annotations

import math

import numpy
import pytest
import torch
from pairs import pair
from torch import Tensor

from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Cache, Figure
from playground.trace import check
from strategies.kv_cache.cachegen import CacheGen, binned, pack, unpack
from strategies.kv_cache.cachegen.entropy_coding import TOTAL, decode, encode, tables
from support.coded_caches import TEXT, course, text
from support.packed_caches import PROMPT, rows
from support.wrong_variants import variants_of

# --- entropy coding ---

def symbols(kinds: int, n: int, streams: int, seed: int = 0) -> numpy.ndarray:
    """Streams of symbols [n, streams], each with its own probabilities: some nearly uniform, some almost deterministic.
    """
    chance = numpy.random.default_rng(seed)
    return numpy.stack(
        [chance.choice(kinds, n, p=chance.dirichlet(numpy.full(kinds, 3.0 ** -(i % 5)))) for i in range(streams)], 1
    )


def entropy_of(stream: numpy.ndarray) -> float:
    """Entropy of a stream in bits, by its own statistics."""
    counts = numpy.bincount(stream)
    return -sum(count * math.log2(count / len(stream)) for count in counts.tolist() if count)


STREAMS = [
    symbols(15, 300, 20),
    symbols(2, 1, 3),
    symbols(63, 40, 6),
    numpy.full((100, 4), 7),
    numpy.zeros((1, 1), numpy.int64),
    symbols(11, 1000, 3, seed=4),
]


@pytest.mark.parametrize("written", STREAMS, ids=lambda written: str(written.shape))
def test_every_symbol_is_decoded_exactly(written):
    starts = tables(written, 64)
    assert (numpy.diff(starts) > 0).all() and (starts[:, -1] == TOTAL).all()
    assert (decode(*encode(written, starts), starts, len(written)) == written).all()


@pytest.mark.parametrize("kinds, n", [(15, 2000), (31, 2000), (3, 500)])
def test_the_stream_length_equals_its_entropy_up_to_the_final_state(kinds, n):
    """32 bits of state, of which 16 are there from the start, and words of 16 bits."""
    written = symbols(kinds, n, 12, seed=kinds)
    _, counts, words = encode(written, tables(written, kinds))
    assert counts.sum() == len(words)
    for stream, count in zip(written.T, counts.tolist()):
        assert entropy_of(stream) - 16 <= 16 * count + 16 <= entropy_of(stream) * 1.02 + 32


def test_another_streams_frequency_table_takes_more_bits():
    written = symbols(15, 1000, 10)
    ours, others = tables(written, 15), tables(written[:, ::-1], 15)
    assert (decode(*encode(written, others), others, 1000) == written).all()
    assert len(encode(written, others)[2]) > 1.2 * len(encode(written, ours)[2])


# --- a cache as a stream of bytes ---

def of_tokens(n: int, channels: int = 12, seed: int = 0) -> Tensor:
    """Rows in which neighbouring tokens are similar and channels are not."""
    levels = rows(1, 1, channels, seed=seed)[0] * 4
    return levels + torch.cumsum(rows(1, n, channels, seed=seed + 1)[0] * 0.05, 0)


@pytest.mark.parametrize("group", [1, 4, 10])
@pytest.mark.parametrize("n", [1, 3, 4, 41])
def test_no_value_is_off_by_more_than_half_a_bin(group, n):
    written, bins = of_tokens(n), 16
    read = unpack(pack(written, bins, group))
    assert read.shape == written.shape and read.dtype == torch.float64
    rounded = (
        written
        if group == 1
        else written - torch.from_numpy(binned(written[::group].numpy(), 256).rows()).repeat_interleave(group, 0)[:n]
    )
    anchors = torch.arange(n) % group == 0
    most = rounded.abs().amax(1) / (2 * (bins // 2 - 1))
    if group > 1:
        most = torch.where(anchors, written.abs().amax(1) / (2 * 127), most)
    assert ((read - written).abs() <= most[:, None] * (1 + 1e-6) + 1e-12).all()


@pytest.mark.parametrize("bins", [12, 16, 32, 64, 2 ** 12])
def test_more_bins_reduce_the_error_and_zeros_stay_zeros(bins):
    written = of_tokens(30)
    written[4] = 0
    ours, finer = (unpack(pack(written, count, 1)) for count in (bins, 2 * bins))
    assert (ours - written).abs().mean() > 1.5 * (finer - written).abs().mean() > 0
    assert (ours[4] == 0).all()


def test_a_constant_text_takes_almost_no_words():
    once, again = (of_tokens(1).expand(count, -1) for count in (400, 800))
    read, anchors = unpack(pack(once, 16, 40)), torch.arange(400) % 40 == 0
    assert (read[~anchors] == read[1]).all() and (read[anchors] == read[0]).all()
    # a scale for each token, a byte for each number of an anchor, and at most two words a channel
    for group, others in ((1, 0), (40, 10 * 12)):
        assert len(pack(again, 16, group)) - len(pack(once, 16, group)) <= 400 * 4 + others + 12 * 4


def test_differences_to_an_anchor_are_smaller_and_therefore_more_exact():
    written = of_tokens(300)
    plain, apart = (unpack(pack(written, 16, group)) for group in (1, 10))
    assert (apart - written).abs().mean() < (plain - written).abs().mean() / 3


@pytest.mark.parametrize("layers, keys, values", [
    (32, [16] * 20 + [12] * 12, [16, 16] + [12] * 30), (8, [16] * 5 + [12] * 3, [16] + [12] * 7),
])
def test_early_layers_have_more_bins_and_boundaries_scale_with_the_depth(layers, keys, values):
    policy = make("cachegen", level="1")
    assert [policy.bins("keys", layer, layers) for layer in range(layers)] == keys
    assert [policy.bins("values", layer, layers) for layer in range(layers)] == values


def sent(knobs: dict, length: int = 6) -> tuple[int, float]:
    """Bytes of the stream, and how far the prompt's cache is from what was written, on average."""
    session = prepare(
        pair(),
        [LaneConfig("greedy", {}, [("cachegen", knobs)]), LaneConfig("greedy")],
        Prompt(TEXT * 2),
        Limits(max_new_tokens=length),
    )
    figures = [stamped.event for stamped in session if stamped.lane == 0 and isinstance(stamped.event, Figure)]
    stores = [runner.lane.target.store for runner in session._runners]
    n = len(session.headers[0].prompt_ids) - 1
    off = [
        float((ours.read(n) - plain.read(n)).abs().mean())
        for ours, plain in zip(*([*store.keys, *store.values] for store in stores))
    ]
    (bars,) = [figure for figure in figures if figure.shape == "bars"]
    assert check(session.trace) == []
    return bars.data["values"][-1], sum(off) / len(off)


def test_a_higher_level_sends_more_bytes_with_less_error():
    (small, far), (middle, nearer), (large, near) = (sent({"level": level}) for level in "123")
    assert small < middle < large and far > nearer > near > 0


def test_the_reported_size_is_that_of_the_stream_without_the_last_token(monkeypatch):
    streams = []

    def listening(*about):
        streams.append(pack(*about))
        return streams[-1]

    monkeypatch.setattr("strategies.kv_cache.cachegen.pack", listening)
    recorded, _ = sent({})
    assert recorded == sum(map(len, streams)) and len(streams) == 2 * 3
    (ours, plain) = (course(policy)[0] for policy in (make("cachegen"), make("mustafar", window=1024)))
    for part, exact in zip(ours.rows, plain.rows):
        assert torch.equal(part[:, -1], exact[:, -1]) and not torch.equal(part[:, :-1], exact[:, :-1])


def test_memory_is_not_reduced_and_the_first_token_is_that_of_the_full_cache():
    session = prepare(
        pair(),
        [LaneConfig("greedy", {}, [("cachegen", {"level": "1"})]), LaneConfig("greedy")],
        Prompt(TEXT),
        Limits(max_new_tokens=6),
    )
    caches = {lane: [] for lane in (0, 1)}
    for stamped in session:
        if isinstance(stamped.event, Cache):
            caches[stamped.lane].append(stamped.event)
    assert [cache.bytes for cache in caches[0]] == [cache.bytes for cache in caches[1]] and not any(
        cache.packed for cache in caches[0]
    )
    ours, plain = text(make("cachegen", level="1")), text(None)
    assert ours[len(PROMPT)] == plain[len(PROMPT)]


class KeysInPlaceOfValues(CacheGen):
    def _send(self, held, part):
        return super()._send(held, "keys")


class HeadsAreMixedUp(CacheGen):
    def _send(self, held, part):
        size = super()._send(held, part)
        held.write(part, held.read(part).flip(0))
        return size


class SentAgainAfterEveryKeep(CacheGen):
    def retain(self, held):
        if held.moment == "keep":
            self._send(held, "keys")
        return super().retain(held)


def by_hand(exact: Tensor, bins: int) -> Tensor:
    """The decoded stream, head by head and token by token."""
    half, found = bins // 2 - 1, exact.clone()
    for token in range(exact.shape[1] - 1):
        most = exact[:, token].abs().max().float().double()
        found[:, token] = (exact[:, token] * half / most).round().clamp(-half, half) / half * most
    return found


@pytest.mark.oracle("cachegen")
@pytest.mark.refuses("cachegen")
@pytest.mark.parametrize("wrong", variants_of(CacheGen, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_stream_is_detected(wrong):
    exact, length = course(make("mustafar", window=1024))[0].rows, len(PROMPT)
    expected = [by_hand(exact[0], 32), by_hand(exact[1], 32)]  # level 2, first layer
    right, ours = (course(cls())[-1].rows for cls in (CacheGen, wrong))
    assert all((part[:, :length] - hand).abs().max() < 1e-9 for part, hand in zip(right, expected))
    assert any((part[:, :length] - hand).abs().max() > 1e-3 for part, hand in zip(ours, expected))
