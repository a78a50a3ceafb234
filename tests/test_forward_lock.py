"""Forwards from several threads on one model: the worker's, a page's "look inside", a forward beside a lane."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from toys import byte_tokenizer, network

from playground.decoding.attribution import attribute
from playground.decoding.logit_lens import look
from playground.engine.forward_input import ForwardInput
from playground.engine.forward_lock import lock_for
from playground.engine.model import Model
from support.recorded_forwards import recorded

MEETING = 0.3  # seconds in which a second thread would reach an unlocked forward


class Meeting:
    """A `Record` whose forwards wait, once `open`, until two threads are inside, or until nobody else comes."""

    def __init__(self):
        self.inside, self.open = Barrier(2), False

    def __call__(self, run):
        def meet():
            if self.open:
                try:
                    self.inside.wait(MEETING)
                except BrokenBarrierError:
                    pass
            run()
        meet()
        return meet


def next_logits(model: Model, store, token: int) -> torch.Tensor:
    (logits,), _ = model.forward([ForwardInput(store, [token], [-1])])
    store.crop_scratch()
    return logits


def test_two_threads_on_one_model_compute_what_each_computes_alone():
    meeting = Meeting()
    model, tokens = recorded("llama", meeting), [3, 90]
    stores = [model.new_store() for _ in tokens]
    alone = [next_logits(model, store, token) for store, token in zip(stores, tokens)]
    meeting.open = True
    with ThreadPoolExecutor(len(tokens)) as threads:
        together = list(threads.map(lambda store, token: next_logits(model, store, token), stores, tokens))
    assert all(map(torch.equal, together, alone))


class Witness:
    """A lock that knows whether it is held."""

    def __init__(self):
        self.depth = 0

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *error):
        self.depth -= 1


READERS = {
    "look inside": lambda model: look(model, [3, 4, 5], 6),
    "attribution": lambda model: attribute(model, model.tokens.encode("the red fox"), 3, 6),
    "read-out without the norm": lambda model: model.read_out(torch.zeros(1, model.width, dtype=model.dtype), False),
    "read-out": lambda model: model.read_out(torch.zeros(1, model.width, dtype=model.dtype)),
    "final norm": lambda model: model.normed(torch.zeros(1, model.width, dtype=model.dtype)),
}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(network("llama"), byte_tokenizer(), "llama")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_whoever_runs_a_part_of_the_network_holds_the_lock(model, monkeypatch, read):
    held, witness = [], Witness()
    monkeypatch.setattr(model, "lock", witness)
    hooks = [
        part.register_forward_pre_hook(lambda *_: held.append(witness.depth))
        for part in (model.network.model.norm, model.network.lm_head)
    ]
    monkeypatch.setattr(model, "fused", None)  # the library's modules, whose hooks are called
    try:
        read(model)
    finally:
        for hook in hooks:
            hook.remove()
    assert held and all(held)


def test_models_on_one_accelerator_share_a_lock_and_those_on_a_cpu_do_not():
    cuda, first, second, cpu = map(torch.device, ("cuda", "cuda:0", "cuda:1", "cpu"))
    assert lock_for(cuda) is lock_for(first) is not lock_for(second)
    assert lock_for(cpu) is not lock_for(cpu)


def test_a_model_over_two_accelerators_holds_the_locks_of_both():
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    held, released = [], []
    with ThreadPoolExecutor(1) as other:
        def is_free(device):
            def taken():
                free = lock_for(device).acquire(blocking=False)
                if free:
                    lock_for(device).release()
                return free
            return other.submit(taken).result()
        with lock_for(second, first), lock_for(first, second):  # re-entrant
            held = [is_free(first), is_free(second)]
        released = [is_free(first), is_free(second)]
    assert held == [False, False] and released == [True, True]
