"""IDP: learnt prompts before the text, of which the first attention layer chooses one."""
from __future__ import annotations

import copy

import pytest
import torch
from pairs import VOCABULARY, network, pair
from runs import figures, run
from torch import Tensor

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache import prefix_before_text
from playground.contract import find, make
from playground.errors import Refusal
from playground.events import Note, Step
from playground.training.calibration import CalibrationTexts
from strategies.kv_cache import idp
from support.budget_policies import roomy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.policy_fits import finished, training_texts
from support.wrong_variants import refused, variants_of

IDP = find("idp")
COLLAPSES = {"idp": [*roomy("idp"), *roomy("idp", prompts=0)]}
SIZES = (6, 2, 4)  # vectors of the prompts
SEEDS = range(4)


def fitted(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> dict[str, Tensor]:
    chance, width = torch.Generator().manual_seed(seed), network("llama").config.hidden_size
    return {f"prompt.{number}": torch.randn(size, width, generator=chance, dtype=torch.float64)
            for number, size in enumerate(sizes)}


def policy_with(weights: dict[str, Tensor], cls: type = IDP, **knobs):
    policy = cls(**knobs)
    policy.begin_fitted(weights)
    return policy


# --- the library's network as oracle: prompts are read as input embeddings, the whole input for every token ---

def attention_by_hand(prompts: list[Tensor]) -> list[float]:
    """By prompt, what the library's first layer pays to a vector of it, mean over heads and rows of the text."""
    model, before = network("llama"), sum(map(len, prompts))
    model.set_attn_implementation("eager")
    inputs = torch.cat([*prompts, model.get_input_embeddings()(torch.tensor(PROMPT))])[None]
    weights = model(inputs_embeds=inputs, output_attentions=True, use_cache=False).attentions[0][0, :, before:]
    return [float(part.mean()) for part in weights[:, :, :before].split(list(map(len, prompts)), -1)]


@torch.inference_mode()
def chosen_by_hand(weights: dict[str, Tensor], mode: str) -> int:
    pool = list(weights.values())
    scores = attention_by_hand(pool) if mode == "joint" else [attention_by_hand([prompt])[0] for prompt in pool]
    return scores.index(max(scores))


@torch.inference_mode()
def text_by_hand(prompt: Tensor, length: int = LENGTH) -> list[int]:
    model, written = network("llama"), []
    for _ in range(length):
        text = model.get_input_embeddings()(torch.tensor([*PROMPT, *written]))
        logits = model(inputs_embeds=torch.cat([prompt, text])[None], use_cache=False).logits
        written.append(int(logits[0, -1].argmax()))
    return written


def check(cls: type) -> None:
    for mode in ("joint", "separate"):
        for seed in SEEDS:
            weights = fitted(seed)
            expected = text_by_hand(weights[f"prompt.{chosen_by_hand(weights, mode)}"])
            assert course(alone(policy_with(weights, cls, mode=mode)), models())[0] == expected


class MostAttentionInAll(IDP):
    """Attention is summed over the vectors of a prompt, which long prompts win."""

    def attend_memory(self, layer, query_states, query_positions, seen):
        if self._pool and not self.states:
            each = idp.mean_attention(query_states, seen.total, self._first, self.mode == "joint")
            sums = [score * keys.shape[1] for score, keys in zip(each, self._first)]
            self._use(1 + sums.index(max(sums)))
        return super().attend_memory(layer, query_states, query_positions, seen)


class LeastAttention(IDP):
    def attend_memory(self, layer, query_states, query_positions, seen):
        if self._pool and not self.states:
            each = idp.mean_attention(query_states, seen.total, self._first, self.mode == "joint")
            self._use(1 + each.index(min(each)))
        return super().attend_memory(layer, query_states, query_positions, seen)


class AllPromptsStay(IDP):
    """The states of those that were not chosen stay as well."""

    def begin(self, parts):
        super().begin(parts)
        self.states = [tuple(torch.cat(states, 1) for states in zip(*layer)) for layer in zip(*self._pool)]


class OnTopOfTheText(IDP):
    """Keys keep the positions 0 to n - 1, which the text has as well."""

    def begin(self, parts):
        class Still:
            def __getattr__(self, name):
                return getattr(parts, name)

            def rotate_back(self, rows, positions):
                return rows

        with pytest.MonkeyPatch.context() as patch:
            right = DifferentiableLlama(parts)
            patch.setattr(idp, "DifferentiableLlama", lambda parts: right)
            super().begin(Still())


@pytest.mark.oracle("idp")
def test_a_run_writes_what_the_library_writes_after_the_chosen_prompt():
    assert len({chosen_by_hand(fitted(seed), "joint") for seed in SEEDS}) > 1
    assert any(chosen_by_hand(fitted(seed), "joint") != chosen_by_hand(fitted(seed), "separate") for seed in SEEDS)
    check(IDP)


@pytest.mark.refuses("idp")
@pytest.mark.parametrize("wrong", variants_of(IDP, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_choice_or_place_is_refused(wrong):
    refused(check, wrong)


# --- the choice ---

def scores_of(weights: dict[str, Tensor], mode: str) -> list[float]:
    """As the run shows them."""
    events = run(alone(policy_with(weights, mode=mode)), models(), PROMPT, 2)[1]
    return list(figures(events, "mean attention per vector")[0]["series"].values())


@torch.inference_mode()
def test_the_scores_that_are_shown_are_the_attention_of_the_librarys_first_layer():
    weights = fitted()
    assert scores_of(weights, "joint") == pytest.approx(attention_by_hand(list(weights.values())), rel=1e-6)
    assert scores_of(weights, "separate") == pytest.approx(
        [attention_by_hand([prompt])[0] for prompt in weights.values()], rel=1e-6)


def test_each_before_the_text_the_order_of_the_prompts_does_not_matter():
    weights = fitted()
    other = {f"prompt.{at}": weights[f"prompt.{number}"] for at, number in enumerate((2, 0, 1))}
    first, second, third = scores_of(weights, "separate")
    assert scores_of(other, "separate") == pytest.approx([third, first, second], rel=1e-6)


def test_equal_prompts_tie_and_the_first_wins_unless_they_stand_one_after_the_other():
    same = {f"prompt.{number}": fitted()["prompt.0"] for number in range(2)}
    first, second = scores_of(same, "separate")
    assert first == second
    policy = policy_with(same, mode="separate")
    notes = [event.text for event in run(alone(policy), models(), PROMPT, 2)[1] if isinstance(event, Note)]
    assert "Prompt 1 of 2" in " ".join(notes)
    first, second = scores_of(same, "joint")
    assert first != second, "distance changes attention"


def test_a_prompt_whose_keys_are_what_rows_look_for_wins():
    query = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = query.unflatten(0, (2, 2)).mean((1, 2))[:, None]  # the mean query of each KV head
    keys = [torch.zeros_like(wanted), wanted * 4, -wanted]
    for joint in (True, False):
        scores = idp.mean_attention(query, torch.zeros(4, 5), keys, joint)
        assert scores.index(max(scores)) == 1


def test_a_prompt_that_is_named_stands_alone_before_the_text():
    weights = fitted()
    for number in (1, 2, 3):
        own = weights[f"prompt.{number - 1}"]
        assert course(alone(policy_with(weights, only=number)), models())[0] == text_by_hand(own)
        assert course(alone(policy_with({"prompt.0": own})), models())[0] == text_by_hand(own)
    assert course(alone(policy_with(weights, only=8)), models())[0] == text_by_hand(weights["prompt.2"])
    assert course(alone(policy_with(weights, prompts=1)), models())[0] == text_by_hand(weights["prompt.0"])


def test_speculative_decoding_writes_the_same():
    weights = fitted()
    chosen = weights[f"prompt.{chosen_by_hand(weights, 'joint')}"]
    assert course(alone(policy_with(weights), "speculative"), models())[0] == text_by_hand(chosen)


# --- what it takes, and what it leaves alone ---

def test_without_prompts_every_distribution_is_that_of_the_plain_lane_to_the_bit():
    def steps(lane) -> list[Step]:
        return [event for event in run(lane, models(), PROMPT, LENGTH)[1] if isinstance(event, Step)]

    plain = steps(alone(None))
    assert plain and steps(alone(policy_with(fitted(), prompts=0))) == plain
    assert steps(alone(make("idp"))) == plain
    assert steps(alone(policy_with(fitted()))) != plain


def test_only_the_chosen_prompt_takes_memory():
    lane = run(alone(policy_with(fitted(), only=2)), models(), PROMPT, 3)[0]
    config = network("llama").config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert lane.target.store.memory_bytes == SIZES[1] * numbers * 8


def test_a_run_without_a_fit_says_how_to_train_prompts():
    events = run(alone(make("idp")), models(), PROMPT, 2)[1]
    assert any("fit idp --quantization" in event.text for event in events if isinstance(event, Note))


def target(texts: list[list[int]]) -> CalibrationTexts:
    return CalibrationTexts(pair("llama", dtype=torch.float32).target, texts)


@torch.no_grad()
def test_the_loss_that_is_trained_is_the_librarys_after_the_same_embeddings():
    texts = [[5, 9, 2, 7, 11], [8, 3, 4], [6, 1, 12, 13]]
    prompt, model = fitted()["prompt.0"], network("llama")
    found = prefix_before_text.mean_loss(DifferentiableLlama(pair("llama").target.parts), prompt, texts)
    losses = []
    for ids in texts:
        inputs = torch.cat([prompt, model.get_input_embeddings()(torch.tensor(ids))])[None]
        logp = model(inputs_embeds=inputs, use_cache=False).logits[0, len(prompt):].log_softmax(-1)
        losses += [-float(logp[row, token]) for row, token in enumerate(ids[1:])]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_training_lowers_the_loss_of_each_prompt_and_leaves_the_network_alone(monkeypatch):
    monkeypatch.setattr(idp, "DESCENT", idp.Descent("loss", 24, 5e-2, 6, 1.0))
    monkeypatch.setattr(idp, "HELD_OUT", 4)
    monkeypatch.setattr(idp, "LENGTHS", (2, 3))
    texts = target([[7, 9, 2, 7, 11, 30] * 3 for _ in range(8)])
    before = copy.deepcopy(texts.model.network.state_dict())
    weights, events = finished(IDP.calibrate(texts, 0))
    curve = [event.data["series"]["loss"] for event in events if not isinstance(event, Note)]
    assert curve[3] < curve[0] and curve[7] < curve[4]
    assert [tuple(each.shape) for each in weights.values()] == [(2, 32), (3, 32)]
    assert {each.dtype for each in weights.values()} == {torch.float16}
    assert all(torch.equal(own, before[name]) for name, own in texts.model.network.state_dict().items())
    assert "without a prompt" in events[-1].text


def test_a_prompt_after_training_is_a_function_of_the_seed(monkeypatch):
    monkeypatch.setattr(idp, "DESCENT", idp.Descent("loss", 3, 5e-2, 3, 1.0))
    monkeypatch.setattr(idp, "HELD_OUT", 4)
    monkeypatch.setattr(idp, "LENGTHS", (2,))
    texts = training_texts()
    first, again, other = (finished(IDP.calibrate(target(texts), seed))[0]["prompt.0"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_texts_that_lack_their_beginning_are_not_trained_on_if_most_have_one():
    mark = pair("llama").target.tokens.encode("a")[0]

    class Texts:
        def __init__(self, *texts):
            self.texts = list(texts)

        begins = staticmethod(lambda ids: ids[0] == mark)

    whole, cut = [mark, 5, 6], [5, 6, 7]
    assert idp.whole_texts(Texts(whole, cut, whole)) == [whole, whole]
    assert idp.whole_texts(Texts(cut, cut, whole)) == [cut, cut, whole], "a model without special tokens"


def test_a_text_begins_with_a_special_token_or_does_not():
    texts = target([])
    special = next(token for token in range(VOCABULARY) if texts.model.tokens.is_special(token))
    ordinary = next(token for token in range(VOCABULARY) if not texts.model.tokens.is_special(token))
    assert texts.begins([special, ordinary]) and not texts.begins([ordinary, special])
    assert texts.last_turn([special, ordinary]) == ([special], texts.piece(ordinary))
    assert texts.last_turn([ordinary]) == ([], texts.piece(ordinary))


def test_too_few_texts_are_refused():
    chance = torch.Generator().manual_seed(0)
    few = torch.randint(VOCABULARY, (3, 8), generator=chance).tolist()
    with pytest.raises(Refusal, match="name more text"):
        finished(IDP.calibrate(target(few), 0))
