"""Classifier-free guidance, prompted DExperts and contrastive decoding, against their formulas over probabilities."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pairs import pair
from registry import Collapse
from runs import alone, written
from tables import TableModel, distance, law
from torch import Tensor
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.modeling_outputs import CausalLMOutput

from playground.contract import Decoder, Sampler, find, make
from playground.contract.lane_config import Assembly, LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from strategies.sampling.contrastive_decoding import contrasted
from support.laws import AT_ONE, EXACT, WRONG

CFG, DExperts, Contrastive = (find(name) for name in ("cfg", "dexperts", "contrastive_decoding"))
GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "cfg": [Collapse(alone("cfg", scale=1.0), GREEDY)],
    "dexperts": [Collapse(alone("dexperts", alpha=0.0), GREEDY), Collapse(alone("dexperts", p=0.0), GREEDY)],
    "contrastive_decoding": [Collapse(LaneConfig("contrastive_decoding", {"alpha": 1.0}), GREEDY)],
}
V = 9
Row = list[float]


def drawn(seed: int) -> Tensor:
    return torch.randn(8, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def softmax(row: Row) -> Row:
    weights = [math.exp(score - max(row)) for score in row]
    return [weight / sum(weights) for weight in weights]


def refused(check: Callable, wrong: type) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


# --- classifier-free guidance ---


class Recorded:
    """A model for the library's processor that answers with given logits."""

    def __init__(self, logits: Tensor):
        self.logits = logits

    def __call__(self, *inputs, **settings):
        return CausalLMOutput(logits=self.logits[None, None])


def check_cfg(cls: type[Sampler]) -> None:
    rows = {"target": drawn(0), "negative": drawn(1)}
    for scale in (0.0, 1.5, 4.0):
        found = cls(scale=scale).mix(rows)
        for row, given, without in zip(found, *rows.values()):
            library = UnbatchedClassifierFreeGuidanceLogitsProcessor(scale, Recorded(without), use_cache=False)
            expected = library(torch.tensor([[0]]), given[None])[0]
            assert torch.allclose(row.softmax(-1), expected.softmax(-1))


class GuidesTheOtherWay(CFG):
    def mix(self, rows):
        return super().mix({"target": rows["negative"], "negative": rows["target"]})


class CountsFromThePrompted(CFG):
    """(1 + scale) p - scale n: the guidance of another convention."""

    def mix(self, rows):
        return (1 + self.scale) * rows["target"] - self.scale * rows["negative"]


@pytest.mark.oracle("cfg")
def test_guidance_is_the_librarys():
    check_cfg(CFG)


@pytest.mark.refuses("cfg")
@pytest.mark.parametrize("wrong", [GuidesTheOtherWay, CountsFromThePrompted])
def test_a_wrong_guidance_is_refused(wrong):
    refused(check_cfg, wrong)


def test_without_a_negative_prompt_the_other_stream_reads_the_last_token_alone():
    def prompt_of_the_other(**knobs) -> str:
        session = prepare(pair(), [alone("cfg", **knobs)], Prompt("The green bird"), Limits(0, 2))
        runner = session._runners[0]
        return "".join(map(runner.lane.piece, runner.lane.prompts["negative"]))

    whole = prompt_of_the_other(negative="Be dull.")
    assert "Be dull." in whole and whole.endswith("The green bird")
    assert 0 < len(prompt_of_the_other()) < len("green bird") and "The green bird".endswith(prompt_of_the_other())


# --- DExperts ---


def nucleus(p: Row, share: float) -> set[int]:
    order, total, found = sorted(range(len(p)), key=lambda t: -p[t]), 0.0, set()
    for token in order:
        found.add(token)
        total += p[token]
        if total >= share:
            break
    return found


def check_dexperts(cls: type[Sampler]) -> None:
    rows = {"target": drawn(0), "expert": drawn(1), "anti_expert": drawn(2)}
    for alpha, share in ((1.0, 0.9), (2.5, 0.5), (-1.0, 1.0)):
        found = cls(alpha=alpha, p=share).mix(rows).softmax(-1)
        for row, base, good, bad in zip(found.tolist(), *(r.tolist() for r in rows.values())):
            p, q, r = softmax(base), softmax(good), softmax(bad)
            weights = [p[t] * (q[t] / r[t]) ** alpha if t in nucleus(p, share) else 0.0 for t in range(V)]
            assert row == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-9)


class WithoutTheBase(DExperts):
    def mix(self, rows):
        return super().mix(rows) - rows["target"]


class NucleusOfTheResult(DExperts):
    def mix(self, rows):
        steered = rows["target"] + self.alpha * (rows["expert"] - rows["anti_expert"])
        return make("top_p", p=self.p).apply(steered, [])


class SwapsTheExperts(DExperts):
    def mix(self, rows):
        return super().mix(rows | {"expert": rows["anti_expert"], "anti_expert": rows["expert"]})


@pytest.mark.oracle("dexperts")
def test_dexperts_multiplies_by_the_ratio_of_the_experts_in_the_nucleus_of_the_model():
    check_dexperts(DExperts)


@pytest.mark.refuses("dexperts")
@pytest.mark.parametrize("wrong", [WithoutTheBase, NucleusOfTheResult, SwapsTheExperts])
def test_wrong_experts_are_refused(wrong):
    refused(check_dexperts, wrong)


# --- contrastive decoding ---


def contrastive_row(p: Row, q: Row, alpha: float, t: float) -> Row:
    """Probabilities in proportion to p / q, q at temperature t, among tokens with at least alpha of the best p."""
    sharp = [x ** (1 / t) for x in q]
    weights = [a / (b / sum(sharp)) if a >= alpha * max(p) else 0.0 for a, b in zip(p, sharp)]
    return [weight / sum(weights) for weight in weights]


def check_contrastive(cls: type[Decoder]) -> None:
    """The law of two sampled tokens, and the argmax."""
    for seed, alpha, t in ((1, 0.1, 0.5), (2, 0.4, 1.0), (3, 0.0, 2.0)):
        models = {"target": TableModel("abcd", seed=seed), "draft": TableModel("abcd", seed=seed + 9)}

        def row(text, alpha=alpha, t=t, models=models):
            p, q = (softmax(models[name].scores(text).tolist()) for name in ("target", "draft"))
            return contrastive_row(p, q, alpha, t)

        expected = {(a, b): x * y for a, x in enumerate(row((0, 1))) for b, y in enumerate(row((0, 1, a))) if x * y}
        sampled = Assembly(cls(alpha=alpha, temperature=t), [make(AT_ONE[0], **AT_ONE[1])])
        assert distance(law(sampled, models, [0, 1], 2), expected) < EXACT
        first = row((0, 1))
        assert written(Assembly(cls(alpha=alpha, temperature=t)), models, [0, 1], 1) == [first.index(max(first))]


class AmateurAsItIs(Contrastive):
    def __post_init__(self):
        self.temperature = 1.0


class EveryTokenCompetes(Contrastive):
    def __post_init__(self):
        self.alpha = 0.0


class SwapsTheModels(Contrastive):
    """The small model is the better one."""

    def decode(self, lm):
        rows = yield lm.prefill()
        weaker = yield lm.stream("draft").extend()
        rows.add_stage("swapped", contrasted(weaker.scores[-1], rows.scores[-1] / self.temperature, self.alpha)[None])
        yield lm.keep(lm.pick(rows))


@pytest.mark.oracle("contrastive_decoding")
def test_the_law_is_the_ratio_of_the_models_among_plausible_tokens():
    check_contrastive(Contrastive)


@pytest.mark.refuses("contrastive_decoding")
@pytest.mark.parametrize("wrong", [AmateurAsItIs, EveryTokenCompetes, SwapsTheModels])
def test_a_wrong_contrast_is_refused(wrong):
    refused(check_contrastive, wrong)


def test_two_equal_models_leave_all_eligible_tokens_equally_probable():
    model = TableModel("abc", seed=1)
    lane = Assembly(Contrastive(alpha=0.0, temperature=1.0), [make(AT_ONE[0], **AT_ONE[1])])
    found = law(lane, {"target": model, "draft": model}, [0, 1], 1)
    assert all(abs(p - 1 / 3) < WRONG for p in found.values())
