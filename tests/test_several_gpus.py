"""A model over two GPUs of the stand-in: it loads as `--device auto` loads it, and writes the text of one device."""
from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from architectures import tiny
from pairs import TOKENIZER, network, pair
from recurrent_networks import recurrent
from transformers import PreTrainedModel

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.attention.segment_masks import SegmentMasks
from playground.engine.forward_input import ForwardInput
from playground.engine.loading.load import Loading, estimate, load
from playground.engine.loading.loaded_model import loaded_model
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Done, Event, Failed
from playground.ui.server.machine_meters import gpu
from support.gpu_standin import Standin

PROMPT = Prompt("the red fox, the red fox, the")
LENGTH = 8
AUTO = Loading("auto", "float64")
FIRST, SECOND = "cuda:0", "cuda:1"


def saved(folder, network: PreTrainedModel) -> str:
    """The network and a tokenizer in a folder."""
    network.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def two_gpus(network: PreTrainedModel, share: float = 0.8) -> Standin:
    """Two GPUs, each with room for a share of the network's weights."""
    machine = Standin(count=2)
    size = int(sum(weight.nbytes for weight in network.parameters()) * share)
    machine.memory = [(size, size)] * 2
    return machine


def loaded(folder: str, machine: Standin, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the stand-in is one thread's
    with machine, patch("transformers.modeling_utils.caching_allocator_warmup", lambda *args, **more: None):
        network, tokenizer, facts = load(folder, AUTO)
        return loaded_model(network, tokenizer, "target", facts.revision, facts.quantization)


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> tuple[Standin, Models]:
    """A target over both GPUs, and a draft on the second: the weights of `pair()`."""
    target, draft = network("llama"), network("llama")
    draft.load_state_dict(pair().draft.network.state_dict())
    machine = two_gpus(target)
    with pytest.MonkeyPatch.context() as patches:
        model = loaded(saved(tmp_path_factory.mktemp("target"), target), machine, patches)
    with machine:
        return machine, Models(model, Model(machine.move(draft, {"model": 1, "lm_head": 1}), TOKENIZER, "draft"))


def lane(*extras: str, strategy: str = "greedy", **knobs) -> LaneConfig:
    return LaneConfig(strategy, {}, [(name, knobs.get(name, {})) for name in extras])


LANES = {
    "greedy": lane(),
    "sampled": lane("temperature"),
    "grammar": lane("regex", regex={"pattern": "[a-z ,]{1,400}"}),
    "draft model on the second GPU": lane("draft_model", "greedy_match", strategy="speculative"),
    "draft in parallel": lane(strategy="pearl"),
    "layers left out of the draft": lane(strategy="layer_skip"),
    "beams": lane(strategy="beam_search"),
    "attention scores of every layer": lane("h2o", h2o={"heavy": 8, "recent": 8}),
    "keys": lane("key_diff", key_diff={"size": 16}),
    "merged slots": lane("d2o", d2o={"heavy": 0.2, "recent": 0.2, "first": 0, "last": 0}),
    "quantised slots": lane("kivi", kivi={"bits": 2, "residual": 8}),
    "slots for each row, by keys": lane("quest", quest={"size": 8, "page": 4}),
    "positions renumbered": lane("sink_window", sink_window={"window": 12, "positions": "renumbered"}),
    "narrower layers": lane("cfsp"),
    "learners of each layer": lane("acm", acm={"mode": "fixed", "k": 2}),
    "layers that random routers leave out": lane("stop_exit", stop_exit={"weights": "random"}),
    "hidden states of several layers": lane("dola"),
}
"""Lanes by what of the layers they read or change."""


def run(models: Models, config: LaneConfig, length: int = LENGTH) -> tuple[list[int], Event]:
    session = prepare(models, [config], PROMPT, Limits(0, length))
    list(session)
    events = [stamped.event for stamped in session.trace.events]
    return [token for event in events if isinstance(event, Commit) for token in event.ids], events[-1]


@pytest.mark.oracle
@pytest.mark.parametrize("kind", LANES)
def test_a_lane_over_two_gpus_writes_the_text_of_one_device(spread, kind):
    machine, models = spread
    with machine:
        text, last = run(models, LANES[kind])
    assert isinstance(last, Done), last
    assert text == run(pair(), LANES[kind])[0]


def test_keys_and_values_lie_on_the_device_of_their_layer(spread):
    machine, models = spread
    places = [str(device) for device in models.target.devices]
    assert set(places) == {FIRST, SECOND} and places == sorted(places), "consecutive layers share a device"
    with machine:
        session = prepare(models, [lane("h2o")], PROMPT, Limits(0, LENGTH))
        list(session)
    (runner,) = session._runners
    store = runner.lane.target.store
    assert [str(buffer.rows.device) for buffer in store.keys] == places
    assert {str(slots.positions.device) for slots in store.slots} == {FIRST}


def test_hidden_states_move_once_per_boundary(spread):
    machine, models = spread
    moves = []
    for length in (4, 8):
        before = machine.moves
        with machine:
            run(models, lane(), length)
        moves.append(machine.moves - before)
    # of each token, to the second device: hidden states, cosines and sines; back: logits
    assert moves[1] - moves[0] == 4 * (8 - 4)


@pytest.mark.refuses
def test_a_mask_that_stays_on_the_first_gpu_fails_the_lane(spread, monkeypatch):
    machine, models = spread
    monkeypatch.setattr(SegmentMasks, "of", SegmentMasks._on_store)
    with machine:
        _, last = run(models, LANES["draft model on the second GPU"])
    assert isinstance(last, Failed) and "on the same device" in last.message


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma2", "stablelm"])  # own attention with windows; the library's
def test_other_architectures_are_spread_too(architecture, tmp_path, monkeypatch):
    original = tiny(architecture)
    machine = two_gpus(original)
    model = loaded(saved(tmp_path, original), machine, monkeypatch)  # compares its logits with the library's
    ids = [3, 5, 7, 11]
    with machine:
        ours = model.forward([ForwardInput(model.new_store(), ids, list(range(-1, len(ids) - 1)))])[0][0]
    with torch.inference_mode():
        theirs = tiny(architecture)(torch.tensor([ids]), use_cache=False).logits[0]
    assert len(set(model.devices)) == 2 and torch.allclose(ours.held, theirs, atol=1e-6)


# --- when a model is spread, and when it is not ---

def test_only_auto_spreads_and_only_what_one_gpu_has_no_room_for(tmp_path):
    original = network("llama")
    folder, small, large = saved(tmp_path, original), two_gpus(original), two_gpus(original, share=2)
    with small:
        assert estimate(folder, AUTO).spread and estimate(folder, AUTO).fits
        assert not estimate(folder, Loading("cuda", "float64")).fits
        with pytest.raises(Refusal, match="are free on cuda"):
            load(folder, Loading("cuda", "float64"))
    with large:
        assert not estimate(folder, AUTO).spread
    with two_gpus(original, share=0.4), pytest.raises(Refusal, match="on all GPUs together"):
        load(folder, AUTO)


def test_a_model_that_two_gpus_do_not_divide_is_refused_before_it_is_read(tmp_path):
    original = network("llama")
    folder = saved(tmp_path, original)
    machine = two_gpus(original)
    machine.memory[1] = (2 * machine.memory[0][0] // 3, machine.memory[1][1])
    with machine, patch("playground.engine.loading.load.read_network") as read, pytest.raises(Refusal, match="divided"):
        load(folder, AUTO)
    assert not read.called


def test_recurrent_states_are_not_spread(tmp_path):
    original = recurrent("lfm2")
    folder = saved(tmp_path, original)
    with two_gpus(original), pytest.raises(Refusal, match="recurrent layers lie on one GPU"):
        load(folder, AUTO)


def test_forwards_over_two_gpus_are_not_recorded(spread):
    machine, models = spread
    assert models.target.fused and models.target.replay is None
    assert models.draft.replay, "a model on one of them is"


def test_the_meter_reads_the_memory_of_each_gpu_in_use():
    machine = Standin(count=2)
    machine.memory = [(3, 8), (5, 9)]
    with machine, patch("torch.cuda.memory_reserved", lambda device=None: 1):
        assert gpu()["gpu_memory"] == [5, 4] and gpu()["gpu_memory_total"] == [8, 9]
    with machine, patch("torch.cuda.memory_reserved", lambda device=None: device):
        assert gpu()["gpu_memory"] == [4], "another GPU of the machine is not this page's"
