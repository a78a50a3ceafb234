"""Lanes on a stand-in for a GPU: no operation between devices, the CPU's text, and few waits for the device.

Whenever the host waits, the device runs empty, so each kind of lane has a budget of waits.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from pairs import TOKENIZER, network

from playground.algorithms.sampling.contrastive import contrast_events
from playground.algorithms.sampling.token_readings import TokenReading
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder, Silent
from playground.decoding.session import Session, prepare
from playground.decoding.stream import experts_figure
from playground.engine.expert_routing import ExpertRouting
from playground.engine.graphs.graph_replay import GraphSegment
from playground.engine.graphs.graph_sizes import BLOCK_SIZES
from playground.engine.loading.loaded_model import loaded_model
from playground.engine.model import Model
from playground.engine.sampling import in_float64
from playground.events import Commit, Done, Event, Failed, Mask, Step
from strategies.sampling.adadec.entropy_threshold import judge
from support.canvases import denoiser, fills, run
from support.gpu_standin import DeviceTensor, Standin

PROMPT = Prompt("the red fox, the red fox, the")
WARM_UP, LENGTH = 6, 22  # tokens before the count begins, and in all


@pytest.fixture(scope="module")
def cpu() -> Models:
    return models(lambda network: network)


@pytest.fixture(scope="module")
def gpu() -> tuple[Standin, Models]:
    """A CUDA device, to be entered again, and models on it."""
    with Standin() as machine:
        return machine, models(machine.move)


def models(move, dtype: torch.dtype = torch.float64) -> Models:
    """A target, and a draft with other weights."""
    target, draft = network("llama").to(dtype), network("llama").to(dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += torch.randn_like(weights) * 0.04 * weights.std(correction=0)
    return Models(Model(move(target), TOKENIZER, "target"), Model(move(draft), TOKENIZER, "draft"))


def lane(*extras: str, strategy: str = "greedy", **knobs) -> LaneConfig:
    return LaneConfig(strategy, {}, [(name, knobs.get(name, {})) for name in extras])


DRAFT, LOOKUP = ("draft_model", "greedy_match"), ("prompt_lookup", "greedy_match")
SAMPLED = ("temperature", "draft_model", "rejection")
LANES = {
    "greedy": (lane(), Recorder, 1),
    "greedy, silent": (lane(), Silent, 1),
    "temperature": (lane("temperature"), Recorder, 1),
    "top-p": (lane("temperature", "top_p"), Recorder, 1),
    "regex": (lane("regex", regex={"pattern": "[a-z ,]{1,400}"}), Recorder, 1),
    "heavy hitters": (lane("h2o"), Recorder, 2),
    "heavy hitters, evicting": (lane("h2o", h2o={"heavy": 8, "recent": 8}), Recorder, 2),
    "last token's attention, evicting": (lane("tova", tova={"size": 16}), Recorder, 2),
}
"""Lanes by kind, how they are recorded, and the most waits per token, whatever the number of layers."""
ROUNDS = {
    "prompt lookup": (lane(*LOOKUP, strategy="speculative"), 1),
    "draft model": (lane(*DRAFT, strategy="speculative"), 2),
    "draft model, sampled": (lane(*SAMPLED, strategy="speculative"), 2),
    "tree": (lane(*DRAFT, strategy="speculative", draft_model={"width": 2}), 2),
    "tree, sampled": (lane(*SAMPLED, strategy="speculative", draft_model={"width": 2}), 2),
    "prompt lookup, sampled": (lane("temperature", "prompt_lookup", "rejection", strategy="speculative"), 1),
    "distinct siblings": (lane("temperature", "rsd_c", "rejection", strategy="speculative"), 1 + 3),
    "distinct paths": (lane("temperature", "rsd_s", "rejection", strategy="speculative"), 1 + 4),
    "independent paths": (lane("temperature", "spectr", "rejection", strategy="speculative"), 1 + 4),
    "scores of parts of the text": (LaneConfig("ved"), 3),
}
"""Speculative lanes, and the most waits per round beside one for the prefill."""


def written(session: Session) -> list[int]:
    events = [stamped.event for stamped in session.trace.events]
    return [token for event in events if isinstance(event, Commit) for token in event.ids]


class Measured(NamedTuple):
    """A lane's text, its last event, and the waits per token by reason after the first tokens."""

    text: list[int]
    last: Event
    waits: dict[str, float]


def measured(models: Models, config: LaneConfig, machine: Standin | None = None,
             recorder: type[Recorder] = Recorder) -> Measured:
    session = prepare(models, [config], PROMPT, Limits(0, LENGTH), recorder)
    while len(written(session)) < WARM_UP and not session.finished:
        session.advance()
    before, start = len(written(session)), Counter(machine.waits if machine else ())
    list(session)
    text = written(session)
    waits = Counter(machine.waits) - start if machine else {}
    return Measured(text, session.trace.events[-1].event,
                    {why: count / max(1, len(text) - before) for why, count in waits.items()})


@pytest.mark.slow
@pytest.mark.parametrize("kind", LANES)
def test_a_lane_writes_the_cpus_text_within_its_budget_of_waits(cpu, gpu, kind):
    (machine, pair), (config, recorder, budget) = gpu, LANES[kind]
    with machine:
        text, last, waits = measured(pair, config, machine, recorder)
    assert isinstance(last, Done), last
    assert text == measured(cpu, config).text
    assert "device" not in waits and sum(waits.values()) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "top-p", "regex"])
def test_what_is_recorded_of_a_token_is_that_of_the_cpu(cpu, gpu, kind):
    (machine, pair), (config, *_) = gpu, LANES[kind]
    with machine:
        here = prepare(pair, [config], PROMPT, Limits(0, LENGTH))
        list(here)
    there = prepare(cpu, [config], PROMPT, Limits(0, LENGTH))
    list(there)
    assert recorded(here) == recorded(there) and recorded(there)


def recorded(session: Session) -> list[Step | Mask]:
    """What is recorded of rows, without times."""
    events = [stamped.event for stamped in session.trace.events]
    return [replace(event, seconds=0.0) if isinstance(event, Mask) else event for event in events
            if isinstance(event, Step | Mask)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDS)
def test_a_speculative_lane_waits_twice_per_round_or_once_per_level_of_its_tree(cpu, gpu, kind):
    (machine, pair), (config, budget) = gpu, ROUNDS[kind]
    with machine:
        measured(pair, config)  # forwards of new sizes are recorded
        before = Counter(machine.waits)
        session = prepare(pair, [config], PROMPT, Limits(0, LENGTH))
        list(session)
    waits, rounds = Counter(machine.waits) - before, count(session, Commit)
    assert written(session) == measured(cpu, config).text
    assert count(session, Done) == 1 and "device" not in waits and waits.total() <= 1 + budget * rounds




def head(name: str, **knobs) -> LaneConfig:
    return lane(name, "greedy_match", strategy="speculative", **{name: {"weights": "random", **knobs}})


DEPTH = 2
HEADS = {
    **{name: (head(name, depth=DEPTH), DEPTH) for name in (
        "chimera", "clover", "clover_2", "eagle", "eagle_2", "eagle_3", "fspad", "hydra", "hydra_plus_plus", "longspec",
    )},
    "falcon": (head("falcon", passes=DEPTH), DEPTH),
    "ppd": (head("ppd", depth=DEPTH, sized="fixed"), 1),
    **{name: (head(name, depth=DEPTH), 1) for name in ("ddtree", "dflash", "jetspec", "medusa", "p_eagle")},
    "hidden_transfer": (head("hidden_transfer", depth=DEPTH), 2),  # and once to compare the states it guessed
    "kangaroo": (head("kangaroo", depth=DEPTH), DEPTH + 1),  # and once for the time of the first forward
}
"""Draft heads, and the most waits per round beside one for the verification."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_draft_head_waits_once_per_forward_of_its_own(cpu, gpu, name):
    (machine, pair), (config, budget) = gpu, HEADS[name]
    with machine:
        session = prepare(pair, [config], PROMPT, Limits(0, LENGTH))
        while count(session, Commit) < 2 and not session.finished:  # the weights go to the device in the first round
            session.advance()
        before, started = Counter(machine.waits), count(session, Commit)
        list(session)
    waits, rounds = Counter(machine.waits) - before, count(session, Commit) - started
    assert written(session) == measured(cpu, config).text and count(session, Done) == 1
    assert waits.total() <= (1 + budget) * rounds


READING = {
    "hidden states, by a head": lane("eagle", "greedy_match", strategy="speculative",
                                     eagle={"weights": "random", "nodes": 5, "depth": 2}),
    "keys and values, by a head": lane("longspec", "greedy_match", strategy="speculative",
                                       longspec={"weights": "random", "depth": 2, "first": 2, "width": 2}),
    "rows of the lm_head, by a head": lane("clover", "greedy_match", strategy="speculative",
                                           clover={"weights": "random", "depth": 2}),
    "learners of each layer": lane("acm", acm={"mode": "fixed", "k": 2}),
    "hidden states of each layer": lane("stop_exit", stop_exit={"weights": "random", "theta_exit": 0.4}),
    "keys of each row": lane("quest", quest={"size": 8, "page": 4, "full_layers": 0}),
    "probe tokens": lane("kvzip"),
    "scores of parts of the text": LaneConfig("ved"),
}
"""Lanes by what of the model they read, beside logits and attention weights."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", READING)
def test_a_lane_that_reads_more_of_the_model_writes_the_cpus_text(cpu, gpu, kind):
    machine, pair = gpu
    with machine:
        text, last, _ = measured(pair, READING[kind], machine)
    assert isinstance(last, Done), last
    assert text == measured(cpu, READING[kind]).text


def test_what_is_shown_of_a_contrast_or_of_experts_is_read_at_once():
    with Standin() as machine:
        better, weaker = (DeviceTensor(torch.randn(40), machine) for _ in range(2))
        list(contrast_events(better, weaker, better - weaker, 0.1, 0, str))
        chosen = [DeviceTensor(torch.tensor([[layer, 7]]), machine) for layer in range(4)]
        figure = experts_figure("target", ExpertRouting(chosen=chosen))
    assert machine.waits.total() == 2 and figure.data["values"] == [[0, 7], [1, 7], [2, 7], [3, 7]]


def count(session: Session, kind: type[Event]) -> int:
    return sum(isinstance(stamped.event, kind) for stamped in session.trace.events)


@pytest.mark.slow
def test_the_usual_forwards_are_recorded_when_a_model_is_loaded_and_then_replayed(gpu):
    machine, _ = gpu
    with machine:
        before = machine.captured
        loaded = models(machine.move)
        recorded, replayed = machine.captured - before, machine.replayed
        list(prepare(loaded, [lane(*DRAFT, strategy="speculative")], Prompt(3 * PROMPT.text), Limits(0, 6)))
    # of target and draft, with what is launched ahead, what the load check joins, and the numbers that the host reads;
    # more exceeds the free share
    assert recorded == 2 * (len(BLOCK_SIZES) + 3)
    assert machine.captured == before + recorded and machine.replayed > replayed


@pytest.mark.slow
def test_loading_on_cuda_switches_off_attention_that_plans_each_shape(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    with Standin() as machine:
        loaded_model(machine.move(network("llama")), TOKENIZER, "target", "", "none")
    assert chosen == [False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked_diffusion", "explore_then_exploit", "fast_dllm"])
def test_a_canvas_is_filled_as_on_the_cpu(name):
    with Standin() as machine:
        found = fills(run(denoiser(move=machine.move), name))
    expected = fills(run(denoiser(), name))
    assert [(fill.positions, fill.ids) for fill in found] == [(fill.positions, fill.ids) for fill in expected]


# --- planted faults, each of which the stand-in finds ---

def test_token_ids_on_another_device_fail_the_lane(gpu, monkeypatch):
    right = Model._inputs

    def ids_on_the_host(*arguments):
        return {name: ids.cpu() for name, ids in right(*arguments).items()}

    machine, pair = gpu
    monkeypatch.setattr(Model, "_inputs", ids_on_the_host)
    with machine:
        last = measured(pair, lane("h2o")).last
    assert isinstance(last, Failed) and "on the same device" in last.message


@pytest.mark.parametrize("wait, why", [(lambda rows: float(rows.raw[0, 0]), "read"),
                                       (lambda rows: torch.cuda.synchronize(), "device"),
                                       (lambda rows: torch.tensor([1], device=rows.raw.device), "copy")])
def test_one_more_wait_per_token_exceeds_the_budget(gpu, wait, why):
    class Waits(Recorder):
        def committed(self, committed, start, text):
            wait(committed[0].rows)
            return super().committed(committed, start, text)

    (machine, pair), (config, _, budget) = gpu, LANES["greedy"]
    with machine:
        waits = measured(pair, config, machine, Waits).waits
    assert sum(waits.values()) > budget and waits[why] >= 1


@pytest.mark.slow
def test_a_wait_within_a_recording_leaves_the_model_without_recordings(monkeypatch, caplog):
    caplog.set_level("WARNING", logger="playground.engine.implementations")
    right = GraphSegment.attend
    monkeypatch.setattr(GraphSegment, "attend", lambda seat, *how: (seat._slots.any().item(), right(seat, *how))[1])
    with Standin() as machine:
        assert models(machine.move).target.replay is None
    assert "not permitted when stream is capturing" in caplog.text


# --- Apple GPUs ---

WITHOUT_FLOAT64 = {
    "anchored": LaneConfig("anchored"),
    "knn_lm": lane("knn_lm", knn_lm={"tokens": 32, "held": 16}),
    "temperature": lane("temperature", "top_p"),
    "head": READING["hidden states, by a head"],
    "compute policy": READING["learners of each layer"],
    "search": READING["scores of parts of the text"],
}


@pytest.fixture(scope="module")
def apple() -> tuple[Standin, Models]:
    with Standin("mps") as machine:
        return machine, models(machine.move, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITHOUT_FLOAT64)
def test_a_lane_runs_on_a_device_without_float64(apple, kind):
    machine, pair = apple
    with machine:
        last = measured(pair, WITHOUT_FLOAT64[kind]).last
    assert isinstance(last, Done), last


def test_what_needs_float64_is_computed_on_the_host_there():
    with Standin("mps") as machine:
        wide = in_float64(DeviceTensor(torch.ones(3), machine))
    with Standin() as machine:
        assert not in_float64(DeviceTensor(torch.ones(3), machine)).is_cpu
    assert wide.dtype == torch.float64 and wide.is_cpu


def test_a_threshold_is_fitted_on_a_device_without_float64():
    with Standin("mps") as machine:
        logits, ids = DeviceTensor(torch.randn(4, 8), machine), DeviceTensor(torch.arange(4), machine)
        entropies, right = judge(TokenReading(ids, logits))
    assert entropies.dtype == torch.float64 and entropies.is_cpu and right.is_cpu
