"""FastDraft: the draft it makes, and its measurements beside those of real speculative lanes."""
from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from toys import byte_tokenizer, network

from playground.contract import make
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Draft, Figure, Note, Verdict
from strategies.variants.fastdraft import Answers, acceptance, answer_loss, continued, ends_of, keep_layers, rounds
from support.speculation import speculative_lane

PROMPT = "The green bird"
SMALL = {"layers": 1, "answers": 8, "held_out": 2, "prompt": 6, "length": 10, "batch": 4, "lr": 3e-3}


def texts(count: int = 12, size: int = 16) -> list[list[int]]:
    return torch.randint(3, 320, (count, size), generator=torch.Generator().manual_seed(0)).tolist()


def made(target=None, seed: int = 0, **knobs):
    """A draft, and the events of its making."""
    target = target or network()
    return target, list(make("fastdraft", **{**SMALL, **knobs}).make(target, texts(), seed))


# --- the measurements ---

def lane_counts(target, draft, length: int, gamma: int) -> tuple[int, int, int]:
    """Accepted and drafted tokens and rounds of a real greedy lane."""
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.eos_token = None  # as the simulation, which ends nowhere before the length
    models = Models(Model(target, tokenizer, "target"), Model(draft, tokenizer, "draft"))
    lane = speculative_lane("draft_model", "greedy_match", depth=gamma)
    events = [s.event for s in prepare(models, [lane], Prompt(PROMPT), Limits(0, length))]
    drafts = [len(event.tokens) for event in events if isinstance(event, Draft)]
    kept = [len(event.kept) for event in events if isinstance(event, Verdict)]
    commits = [event for event in events if isinstance(event, Commit) and event.ids]
    return sum(kept), sum(drafts), len(commits)


def simulated(target, draft, length: int, gamma: int, counting=rounds) -> tuple[int, int, int]:
    """The same from the target's greedy answer, in one forward of the draft."""
    prompt = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    with torch.inference_mode():
        ids = continued(target, prompt, length, 0.0, torch.Generator())
        best = draft(input_ids=ids).logits[0, prompt.shape[1] - 1:-1].argmax(-1)
    found = counting((best == ids[0, prompt.shape[1]:]).tolist(), gamma)
    written = torch.arange(ids.shape[1])[None] >= prompt.shape[1]
    if counting is rounds:
        assert acceptance(draft, Answers(ids, prompt.shape[1], written), gamma, 4) == found
    return found.accepted, found.drafted, found.rounds


def alike():
    """A target, and a draft that is mostly right."""
    target = network().double()
    draft = deepcopy(target)
    torch.manual_seed(5)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += torch.randn_like(weights) * weights.std() * 0.15
    # never drafted, so every draft has its full length
    target.config.eos_token_id = target.generation_config.eos_token_id = [319]
    return target, draft


def again_after_a_rejection(hits, gamma):
    """Wrong: the place that the target filled after a rejection is tested again."""
    at, found = 0, rounds([], gamma)
    while at < len(hits):
        depth = min(gamma, len(hits) - at - 1)
        run = next((i for i in range(depth) if not hits[at + i]), depth)
        found = found._replace(accepted=found.accepted + run, drafted=found.drafted + depth, rounds=found.rounds + 1)
        at += max(1, run)
    return found


@pytest.mark.slow
@pytest.mark.oracle("fastdraft")
@pytest.mark.parametrize("gamma", [1, 3])
def test_acceptance_is_that_of_a_real_speculative_lane(gamma):
    target, draft = alike()
    found = lane_counts(deepcopy(target), deepcopy(draft), 40, gamma)
    assert found == simulated(target, draft, 40, gamma)
    assert 0 < found[0] < found[1]


@pytest.mark.slow
@pytest.mark.refuses("fastdraft")
def test_testing_a_place_twice_is_detected():
    target, draft = alike()
    found = lane_counts(deepcopy(target), deepcopy(draft), 40, 3)
    assert found != simulated(target, draft, 40, 3, again_after_a_rejection)


def test_a_draft_that_is_always_right_gives_gamma_tokens_and_one_more():
    found = rounds([True] * 12, 3)
    assert found.rate == 1 and found.efficiency == 4
    assert rounds([False] * 5, 3).efficiency == 1 and rounds([], 3).rate == 0


# --- the training ---

def test_only_answers_up_to_their_end_are_learned():
    model, ids = network(), torch.tensor(texts(3, 12))
    written = torch.zeros_like(ids, dtype=torch.bool)
    written[:, 5:9] = True
    loss = answer_loss(model, Answers(ids, 5, written))
    logits = model(input_ids=ids).logits.log_softmax(-1)
    by_hand = [-float(logits[row, at - 1, ids[row, at]].detach()) for row in range(3) for at in range(5, 9)]
    assert float(loss.detach()) == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-5)


class WithPrompts(Answers):
    """Wrong: prompts are learned too."""

    @property
    def written(self):
        return torch.ones_like(self.ids, dtype=torch.bool)


@pytest.mark.refuses("fastdraft")
def test_learning_prompts_gives_another_loss():
    model, ids = network(), torch.tensor(texts(3, 12))
    written = torch.arange(12).expand(3, 12) >= 6
    right, wrong = (float(answer_loss(model, kind(ids, 6, written)).detach()) for kind in (Answers, WithPrompts))
    assert abs(right - wrong) > 1e-3


@pytest.mark.slow
def test_the_draft_learns_what_the_target_writes():
    target, events = made(epochs=15, lr=1e-2, data="target")
    figures = [event.data["series"] for event in events if isinstance(event, Figure)]
    assert figures[-1]["training loss"] < 0.5 * figures[1]["training loss"]
    assert len([event for event in events if isinstance(event, Note)]) == 2
    assert target.config.num_hidden_layers == 1 and len(target.model.layers) == 1


# --- the pre-training ---

def first_pretraining_loss(**knobs) -> float:
    """The loss of one pass in which all texts are one batch, before the weights change."""
    _, events = made(pretraining=1, epochs=0, batch=64, **knobs)
    found = [event.data["series"] for event in events if isinstance(event, Figure)]
    return next(series["pretraining loss"] for series in found if "pretraining loss" in series)


def mean_loss(rows: list[list[int]], first: int = 1) -> float:
    """Mean cross-entropy of the tokens of rows from `first` on, by the target's first layer, token by token."""
    draft = network()
    keep_layers(draft, 1)
    logp = draft(input_ids=torch.tensor(rows)).logits.log_softmax(-1)
    losses = [-float(logp[i, at - 1, row[at]].detach()) for i, row in enumerate(rows) for at in range(first, len(row))]
    return sum(losses) / len(losses)


@pytest.mark.oracle("fastdraft")
@pytest.mark.refuses("fastdraft")
def test_pretraining_predicts_every_next_token_of_the_texts_that_are_not_held_out():
    found, rows = first_pretraining_loss(), texts()
    assert found == pytest.approx(mean_loss(rows[:10]), abs=1e-5)
    with_held_out, answers_only = mean_loss(rows), mean_loss(rows[:10], first=6)
    assert abs(found - with_held_out) > 1e-4 < abs(found - answers_only)


def weights_of(model) -> torch.Tensor:
    return torch.cat([part.detach().flatten() for part in model.parameters()])


def test_from_scratch_nothing_of_the_target_is_kept():
    chance = torch.get_rng_state()
    first, again, other = (weights_of(made(start="scratch", epochs=0, seed=seed)[0]) for seed in (11, 11, 12))
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(chance, torch.get_rng_state())
    kept = network()
    keep_layers(kept, 1)
    same = (weights_of(kept) == first)[(weights_of(kept) != 1) & (weights_of(kept) != 0)]  # but for norms and padding
    assert not same.any()


@pytest.mark.slow
def test_a_fresh_draft_learns_the_texts():
    _, events = made(start="scratch", pretraining=20, pretraining_lr=1e-2, epochs=0)
    losses = [event.data["series"].get("pretraining loss") for event in events if isinstance(event, Figure)][1:]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    assert any("come before the answers" in event.text for event in events if isinstance(event, Note))


def test_a_quarter_of_the_answers_is_greedy_and_the_rest_is_sampled():
    target, windows = network(), torch.tensor(texts())
    method = make("fastdraft", **SMALL)
    answers = method._answers(target, windows, torch.Generator().manual_seed(0))
    greedy = continued(target, windows[:, :6], 10, 0.0, torch.Generator())
    same = [any(torch.equal(row, other) for other in greedy) for row in answers.ids]
    assert same[:3] == [True] * 3 and not all(same[3:])


def test_an_answer_ends_with_its_end_token():
    target = network()
    end = int(continued(target, torch.tensor([texts(1)[0][:6]]), 4, 0.0, torch.Generator())[0, 8])
    target.generation_config.eos_token_id = end
    answers = make("fastdraft", **SMALL).answered(target, torch.tensor(texts(1)), 0.0, torch.Generator())
    assert ends_of(target) == {end}
    assert answers.ids[0, answers.written[0]].tolist().index(end) == int(answers.written.sum()) - 1


@pytest.mark.slow
def test_a_seed_says_which_weights_come_out():
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([part.detach().flatten() for part in made(seed=seed, epochs=1, answers=4)[0].parameters()])

    assert torch.equal(weights(3), weights(3)) and not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_the_first_layers_of_a_network_are_a_network(architecture):
    whole, part = network(architecture), network(architecture)
    keep_layers(part, 1)
    ids = torch.tensor([[5, 6, 7]])
    layer = whole(input_ids=ids, output_hidden_states=True).hidden_states[1]
    seen: list[torch.Tensor] = []
    final = part.transformer.ln_f if architecture == "gpt2" else part.model.norm
    final.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    part(input_ids=ids)
    assert torch.allclose(seen[0], layer, atol=1e-6)


def test_as_many_layers_as_the_target_has_are_refused():
    with pytest.raises(Refusal, match="no smaller"):
        made(layers=2)


def test_too_little_text_is_refused():
    with pytest.raises(Refusal, match="add text"):
        made(held_out=12)
