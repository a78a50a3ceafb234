"""WeDLM: what enters the cache, the order and number of fills, and the decoding of the same model by hand."""
from __future__ import annotations

import pytest
import torch

from playground.contract import make
from playground.engine.sampling import entropy
from strategies.diffusion import wedlm as module
from support.canvases import LENGTH, MASK, PROMPT, course, denoiser, fills, forwards, run

EXACT = 1e-5
GREEDY = dict(temperature=0.0)
ALL = 100.0  # nats: every position of the window


def model():
    return denoiser(known_first=True)


@pytest.fixture
def any_threshold(monkeypatch):
    """Lets a threshold be beyond its slider."""
    def lane(threshold: float, **knobs):
        strategy = make("wedlm", **GREEDY | knobs)
        strategy.threshold = threshold
        return run(model(), "wedlm", strategy)
    return lane


@torch.inference_mode()
def by_hand(window: int, threshold: float, penalty: float, length: int = LENGTH) -> list[tuple[int, int]]:
    """Streaming decoding with one causal forward of the library per pass, over the text in physical order, uncached."""
    network, answer, order = model().network, [None] * length, []
    while None in answer:
        first = answer.index(None)
        seen = [*range(min(first + window, length))]
        known = [at for at in seen if answer[at] is not None]
        masked = [at for at in seen if answer[at] is None]
        ids = [*PROMPT, *(answer[at] for at in known), *[MASK] * len(masked)]
        places = [*range(len(PROMPT)), *(len(PROMPT) + at for at in known + masked)]
        causal = torch.ones(1, 1, len(ids), len(ids)).tril().bool()  # without it the library sees several texts
        logits = network(
            input_ids=torch.tensor([ids]), position_ids=torch.tensor([places]), attention_mask=causal, use_cache=False
        ).logits[0, -len(masked):]
        logits[:, MASK] = float("-inf")
        p = logits.softmax(-1)
        sums = [float(-torch.xlogy(row, row).sum()) + penalty * (at - first) for row, at in zip(p, masked)]
        chosen = [i for i, value in enumerate(sums) if value < threshold] or [sums.index(min(sums))]
        for i in chosen:
            answer[masked[i]] = int(logits[i].argmax())
            order.append((masked[i], answer[masked[i]]))
    return order


CASES = [(6, 0.4, 0.02), (4, 1.2, 0.1), (16, 2.0, 0.3), (1, 0.4, 0.02)]


@pytest.mark.oracle("wedlm")
@pytest.mark.parametrize("window, threshold, penalty", CASES)
def test_a_lane_fills_what_the_librarys_causal_network_fills_without_a_cache(window, threshold, penalty):
    events = run(model(), "wedlm", window=window, threshold=threshold, penalty=penalty, **GREEDY)
    assert [(at, token) for at, token, _ in course(events)] == by_hand(window, threshold, penalty)


@pytest.mark.refuses("wedlm")
def test_states_that_were_cached_behind_a_gap_fill_something_else(monkeypatch):
    class Kept(module.WeDLM):
        """Caches every filled position of the window at once, as if it had no gap."""

        def decode(self, lm):
            states = lm.new_states()
            while lm.masked:
                stop = min(lm.masked[0] + self.window, lm.length)
                masked = [at for at in lm.masked if at < stop]
                present = states.present[len(PROMPT):]
                read = [at for at in lm.everything if at < stop and (at in masked or at < 0 or not present[at])]
                rows = yield lm.read(masked, read, states)
                states.drop([len(PROMPT) + at for at in masked])
                yield from self._fill(lm, rows, masked)

    knobs = dict(window=4, threshold=1.2, penalty=0.0, **GREEDY)
    found = [(at, token) for at, token, _ in course(run(model(), "wedlm", Kept(**knobs)))]
    right = [(at, token) for at, token, _ in course(run(model(), "wedlm", **knobs))]
    assert right == by_hand(4, 1.2, 0.0) and found != right


def test_cached_states_are_those_of_a_causal_forward_over_the_text(monkeypatch):
    kept = {}
    made = module.WeDLM.decode

    def spied(self, lm):
        states = lm.new_states()
        kept["states"], kept["lm"] = states, lm
        monkeypatch.setattr(lm, "new_states", lambda: states)
        yield from made(self, lm)

    monkeypatch.setattr(module.WeDLM, "decode", spied)
    run(model(), "wedlm", window=5, threshold=1.2, **GREEDY)
    states, lm = kept["states"], kept["lm"]
    size = int(states.present.sum())
    assert bool(states.present[:size].all()) and size > len(PROMPT)
    fresh = model().new_states(size)
    model().denoise(lm.tokens[:size], [], range(size), fresh)
    for layer in range(len(states.keys)):
        assert float((states.keys[layer][:, :size] - fresh.keys[layer]).abs().max()) < EXACT
        assert float((states.values[layer][:, :size] - fresh.values[layer]).abs().max()) < EXACT


def test_one_position_per_forward_with_the_largest_penalty_does_not_depend_on_the_window():
    lanes = [run(model(), "wedlm", window=window, threshold=0.0, penalty=0.5, **GREEDY) for window in (1, 3, 16)]
    texts = [[(at, token) for at, token, _ in course(events)] for events in lanes]
    assert [at for at, _ in texts[1]] == list(range(LENGTH)) and texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("window", [1, 4, 7])
def test_without_a_threshold_every_window_is_filled_at_once(any_threshold, window):
    events = any_threshold(ALL, window=window)
    assert len(forwards(events)) == -(-LENGTH // window)
    sizes = [min(window, LENGTH - at) for at in range(0, LENGTH, window)]
    assert [len(fill.positions) for fill in fills(events)] == sizes


def test_a_forward_reads_the_window_and_what_was_filled_before_it(any_threshold):
    assert [event.tokens for event in forwards(any_threshold(ALL, window=4))] == [len(PROMPT) + 4, 8, 8, 6]


def test_an_end_token_counts_once_nothing_before_it_is_masked():
    ending = model()
    token = course(run(model(), "wedlm", window=4, threshold=1.2, **GREEDY))[3][1]
    ending.end_ids = frozenset([token])
    events = run(ending, "wedlm", window=4, threshold=1.2, **GREEDY)
    assert fills(events)[-1].ids.count(token) == len(fills(events)[-1].ids) and len(course(events)) == LENGTH


def test_the_entropy_is_that_of_the_untempered_logits():
    hot, cold = (run(model(), "wedlm", window=4, threshold=0.8, temperature=t, length=4) for t in (0.0, 1.5))
    assert fills(hot)[0].positions == fills(cold)[0].positions
    assert float(entropy(torch.zeros(1, 4))) == pytest.approx(1.386, abs=1e-3)  # nats
