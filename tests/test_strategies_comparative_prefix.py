"""Comparative prefix: learnt key and value states before the text, trained by pairs of programs."""
from __future__ import annotations

import copy
import math

import pytest
import torch
from pairs import network, pair
from peft import PrefixTuningConfig, get_peft_model
from runs import run
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.prefix_before_text import after_states
from playground.algorithms.programs.meaningful_names import (
    changed_lines,
    in_lines,
    short_names,
    with_meaningful_names,
)
from playground.contract import find, make
from playground.errors import Refusal
from playground.events import Note, Step
from playground.training.calibration import CalibrationTexts
from strategies.kv_cache import comparative_prefix as module
from support.budget_policies import roomy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.policy_fits import finished
from support.wrong_variants import refused, variants_of

Prefix = find("comparative_prefix")
COLLAPSES = {"comparative_prefix": [*roomy("comparative_prefix"), *roomy("comparative_prefix", prefix=False)]}
LAYERS, KV_HEADS, VECTORS, D = 3, 2, 4, 8
SEEDS = range(3)
PROGRAM = "def f(items):\n    return [x + 1 for x in items]"


def fitted(seed: int = 0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(LAYERS, KV_HEADS, VECTORS, D, generator=chance, dtype=torch.float64) * 2
            for name in ("keys", "values")}


def policy_with(weights: dict[str, Tensor], cls: type = Prefix, **knobs):
    policy = cls(**knobs)
    policy.begin_fitted(weights)
    return policy


# --- peft as oracle: its text starts at position n, so its keys are ours rotated by n ---

def with_peft(weights: dict[str, Tensor]):
    model = network("llama")
    cos, sin = model.model.rotary_emb(weights["keys"], torch.full((1, VECTORS), VECTORS))
    keys = torch.stack([apply_rotary_pos_emb(own[None], own[None], cos, sin)[0][0] for own in weights["keys"]])
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VECTORS, num_layers=LAYERS,
                                token_dim=KV_HEADS * D, num_attention_heads=KV_HEADS, num_transformer_submodules=1)
    tuned = get_peft_model(model, config).double().eval()
    rows = torch.stack([keys, weights["values"]], 1).permute(3, 0, 1, 2, 4).reshape(VECTORS, -1)
    tuned.prompt_encoder["default"].embedding.weight.data = rows.clone()
    return tuned


@torch.no_grad()
def text_by_peft(weights: dict[str, Tensor], length: int = LENGTH) -> list[int]:
    tuned, ids = with_peft(weights), list(PROMPT)
    for _ in range(length):
        ids.append(int(tuned(input_ids=torch.tensor([ids]), use_cache=True).logits[0, -1].argmax()))
    return ids[len(PROMPT):]


def check(cls: type) -> None:
    for seed in SEEDS:
        assert course(alone(policy_with(fitted(seed), cls)), models())[0] == text_by_peft(fitted(seed))


class RotatedOnceMore(Prefix):
    """Keys are stored rotated, and are rotated again."""

    def begin(self, parts):
        super().begin(parts)
        positions = torch.arange(VECTORS)
        self.states = [(parts.rotate(keys, positions), values) for keys, values in self.states]


class HeadsSwapped(Prefix):
    def begin(self, parts):
        super().begin(parts)
        self.states = [(keys.flip(0), values.flip(0)) for keys, values in self.states]


class FirstLayerInAll(Prefix):
    def begin(self, parts):
        super().begin(parts)
        self.states = [self.states[0]] * len(self.states)


class BesideTheSoftmax(Prefix):
    """The prefix is added with the weight 1, whatever its scores are."""

    def attend_memory(self, layer, query_states, query_positions, seen):
        return super().attend_memory(layer, query_states, query_positions, seen._replace(total=seen.total * 0))


@pytest.mark.oracle("comparative_prefix")
def test_a_run_writes_what_peft_writes_with_the_same_prefix():
    check(Prefix)


@pytest.mark.refuses("comparative_prefix")
@pytest.mark.parametrize("wrong", variants_of(Prefix, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_prefix_is_refused(wrong):
    refused(check, wrong)


@torch.inference_mode()
def test_the_states_of_a_text_as_prefix_are_that_text_in_the_prompt():
    opening, model = [17, 4, 99, 8], network("llama")
    cache = DynamicCache()
    model(input_ids=torch.tensor([opening]), position_ids=torch.arange(-4, 0)[None], past_key_values=cache)
    weights = {"keys": torch.stack([layer.keys[0] for layer in cache.layers]),
               "values": torch.stack([layer.values[0] for layer in cache.layers])}
    ids, expected = [*opening, *PROMPT], []
    for _ in range(LENGTH):
        expected.append(int(model(input_ids=torch.tensor([[*ids, *expected]]), use_cache=False).logits[0, -1].argmax()))
    assert course(alone(policy_with(weights)), models())[0] == expected


def test_speculative_decoding_writes_the_same():
    assert course(alone(policy_with(fitted()), "speculative"), models())[0] == text_by_peft(fitted())


def test_without_the_prefix_every_distribution_is_that_of_the_plain_lane_to_the_bit():
    def steps(lane) -> list[Step]:
        return [event for event in run(lane, models(), PROMPT, LENGTH)[1] if isinstance(event, Step)]

    plain = steps(alone(None))
    assert plain and steps(alone(policy_with(fitted(), prefix=False))) == plain == steps(alone(make(Prefix.name)))
    assert steps(alone(policy_with(fitted()))) != plain


def test_a_run_says_what_the_prefix_takes():
    lane, events = run(alone(policy_with(fitted())), models(), PROMPT, 2)
    assert lane.target.store.memory_bytes == 2 * LAYERS * KV_HEADS * VECTORS * D * 8
    assert any(f"{VECTORS} positions" in event.text for event in events if isinstance(event, Note))


# --- pairs ---

def test_names_of_loop_variables_are_written_out_and_the_program_computes_the_same():
    better = with_meaningful_names(PROGRAM)
    assert better == "def f(items):\n    return [item + 1 for item in items]"
    assert (short_names(PROGRAM), short_names(better)) == (3, 1), "f is a name of one letter as well"
    spaces = ({}, {})
    for program, space in zip((PROGRAM, better), spaces):
        exec(program, space)
    assert spaces[0]["f"]([1, 2]) == spaces[1]["f"]([1, 2]) == [2, 3]


def test_a_program_that_has_the_new_name_already_stays_as_it_is():
    taken = "item = 3\nprint([x + item for x in range(9)])"
    assert with_meaningful_names(taken) == taken


def test_docstrings_are_no_names():
    program = '"""Find x and i."""\nreturn y'
    assert with_meaningful_names(program) == program and short_names(program) == 1


def test_compared_are_the_tokens_of_the_lines_that_differ():
    assert changed_lines(["a", "b", "c"], ["a", "B", "c"]) == ({1}, {1})
    assert changed_lines(["a", "c"], ["a", "b", "c"]) == (set(), {1})
    assert in_lines(["a", "b\n", "c", "\n", "d"], {1}) == [False, False, True, True, False]


def texts_of(*programs: str) -> CalibrationTexts:
    model = pair("llama", dtype=torch.float32).target
    return CalibrationTexts(model, [model.tokens.encode(program) for program in programs])


def test_texts_without_such_names_make_no_pairs():
    pairs, others = module.pairs_of(texts_of(PROGRAM, "print(3)"))
    assert len(pairs) == len(others) == 1
    piece = pair("llama").target.tokens.piece
    compared = "".join(piece(token) for token, counts in zip(pairs[0].good, pairs[0].good_mask) if counts)
    assert compared.strip() == "return [item + 1 for item in items]"


# --- losses ---

@torch.no_grad()
def losses_by_hand(weights: dict[str, Tensor], one: module.ProgramPair) -> dict[str, float]:
    """Token by token, by peft and by the library's network."""
    tuned, plain = with_peft(weights), network("llama")
    found = {}
    for which in ("good", "bad"):
        ids, mask = getattr(one, which), getattr(one, f"{which}_mask")
        logp = tuned(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        own = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        each = [(float(logp[row, token]), mask[row + 1], float((logp[row].exp() * (logp[row] - own[row])).sum()))
                for row, token in enumerate(ids[1:])]
        found[which] = [p for p, compared, _ in each if compared]
        found.setdefault("lm", [-p for p, _, _ in each])
        found.setdefault("kl", [kl for _, compared, kl in each if not compared])
    means = {name: math.fsum(values) / len(values) for name, values in found.items()}
    return {"lm": means["lm"], "gap": means["good"] - means["bad"], "kl": means["kl"]}


def two_pairs() -> list[module.ProgramPair]:
    return [module.ProgramPair([5, 9, 2, 7, 11, 3], [5, 9, 4, 11, 3], [False, False, True, True, False, False],
                               [False, False, True, False, False]),
            module.ProgramPair([8, 3, 6], [8, 1, 6], [False, True, False], [False, True, False])]


@pytest.mark.oracle("comparative_prefix")
def test_the_losses_of_a_pair_are_those_of_the_formula():
    llama, weights = DifferentiableLlama(pair("llama").target.parts), fitted()
    found = module.losses_of(llama, module.as_states(weights), two_pairs())
    for row, one in enumerate(two_pairs()):
        for name, expected in losses_by_hand(weights, one).items():
            assert float(found[name][row]) == pytest.approx(expected, rel=1e-5)


def test_identical_texts_cost_the_margin_and_swapped_ones_have_the_opposite_gap():
    llama, states = DifferentiableLlama(pair("llama").target.parts), module.as_states(fitted())
    one = two_pairs()[0]
    same = module.ProgramPair(one.good, one.good, one.good_mask, one.good_mask)
    swapped = module.ProgramPair(one.bad, one.good, one.bad_mask, one.good_mask)
    found = module.losses_of(llama, states, [same])
    assert float(found["gap"]) == pytest.approx(0, abs=1e-12)
    ranking = float(module.total_loss(found)) - float(found["lm"]) - float(found["kl"])
    assert ranking == pytest.approx(module.MARGIN)
    gaps = [float(module.losses_of(llama, states, [each])["gap"]) for each in (one, swapped)]
    assert gaps[0] == pytest.approx(-gaps[1])


@torch.no_grad()
def test_no_prefix_is_the_network_itself():
    llama, ids = DifferentiableLlama(pair("llama").target.parts), torch.tensor([[5, 9, 2, 7]])
    own = network("llama")(input_ids=ids).logits
    assert torch.allclose(after_states(llama, (), ids), own, atol=1e-5)


def test_training_makes_the_better_programs_likelier_and_leaves_the_network_alone(monkeypatch):
    monkeypatch.setattr(module, "DESCENT", module.Descent("loss", 16, 1e-1, 8, 1.0))
    monkeypatch.setattr(module, "HELD_OUT", 2)
    texts = texts_of(*(PROGRAM.replace("1", str(number)) for number in range(6)), "print(3)")
    before = copy.deepcopy(texts.model.network.state_dict())
    weights, events = finished(Prefix.calibrate(texts, 0))
    curve = [event.data["series"]["loss"] for event in events if not isinstance(event, Note)]
    assert curve[-1] < curve[0]
    assert {tuple(each.shape) for each in weights.values()} == {(LAYERS, KV_HEADS, module.VECTORS, D)}
    assert {each.dtype for each in weights.values()} == {torch.float16}
    assert all(torch.equal(own, before[name]) for name, own in texts.model.network.state_dict().items())
    assert "Of 2 held-out pairs" in events[-1].text


def test_texts_without_pairs_are_refused():
    with pytest.raises(Refusal, match="name more programs"):
        finished(Prefix.calibrate(texts_of("print(3)"), 0))
