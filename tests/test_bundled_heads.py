"""The draft heads that are bundled: fitted to the bundled target, small, and of use without changing its text; and
what is fitted to the bundled denoiser.
"""
from __future__ import annotations

from functools import cache

import pytest
from safetensors import safe_open

import playground
from playground.contract import Strategy, discover, find
from playground.contract.lane_config import LaneConfig
from playground.decoding import fitted_weights as fitted
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Forward
from playground.questions.questions import ask
from playground.trace import metrics
from support.commits import ids
from support.speculation import speculative_lane

MOST_BYTES = 75e6  # of all together
TASKS = ("records", "programs")
STORED = {path.name.partition("-")[0] for path in fitted.BUNDLED_FITTED.glob("*.safetensors")}
FITTED = [cls for cls in discover().values() if cls.fitted_to_target and (cls.weights_of or cls.name) in STORED]
HEADS = [cls.name for cls in FITTED if cls.kind == "drafter"]


@cache
def models(name: str | None = None) -> Models:
    return playground.load(name, playground.NO_DRAFT, dtype="float64")


def fitted_to(cls: type[Strategy]) -> str | None:
    """The bundled model that a strategy is fitted to; None is the target."""
    return "pocket-diffusion" if cls.kind == "canvas_decoder" else None


@cache
def run(drafter: str, task: str):
    """The text of a lane on a question, and its metrics."""
    sized = {"sized": "fixed"} if drafter == "ppd" else {}  # not by the time that forwards take here
    config = speculative_lane(drafter, "greedy_match", **sized) if drafter else LaneConfig("greedy")
    question = ask(task, 1, 1)[0]
    session = prepare(models(), [config], Prompt(question.prompt, chat=True), Limits(0, 48))
    return ids(stamped.event for stamped in session), metrics(session.trace)


def test_heads_are_bundled():
    assert HEADS


@pytest.mark.parametrize("name", sorted({cls.weights_of or cls.name for cls in FITTED}))
def test_a_bundled_head_belongs_to_a_bundled_model_and_its_matrices_are_stored_in_half_precision(name):
    """Numbers and vectors are small, and may keep their precision: means, spreads and figures that a fit measured."""
    target = {"target": models(fitted_to(find(name))).target}
    with safe_open(fitted.BUNDLED_FITTED / fitted.file_name(name, target), "pt") as file:
        tensors = map(file.get_tensor, file.keys())
        kinds = {str(tensor.dtype) for tensor in tensors if tensor.dim() > 1}
        assert fitted.digests(target)["target"] in file.metadata()["models"]
    assert kinds <= {"torch.float16", "torch.int64"}


def test_all_bundled_heads_together_are_small():
    assert sum(path.stat().st_size for path in fitted.BUNDLED_FITTED.glob("*.safetensors")) < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", HEADS)
def test_a_fitted_head_saves_forwards_and_leaves_the_text_unchanged(name, task):
    text, measured = run(name, task)
    plain, reference = run("", task)
    assert text == plain and len(plain) > 20
    assert measured["target_forwards"] < 0.8 * reference["target_forwards"]


@pytest.mark.strategy("learn2pd")
def test_the_bundled_filter_fills_several_positions_per_forward():
    question = ask("programs", 1, 1)[0]
    forwards = {}
    for name, knobs in (("learn2pd", {"end_prediction": False}), ("masked_diffusion", {"block_length": 16})):
        session = prepare(
            models("pocket-diffusion"), [LaneConfig(name, knobs)], Prompt(question.prompt, chat=True), Limits(0, 32)
        )
        forwards[name] = sum(isinstance(stamped.event, Forward) for stamped in session)
    assert forwards["learn2pd"] < 0.7 * forwards["masked_diffusion"]
