"""Rewards of searches: the fitted networks, sequence-classification models, and likelihood."""
from __future__ import annotations

import math

import pytest
import torch
from pairs import TOKENIZER, network, pair
from runs import run
from tables import TableModel, distance, law
from toys import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from playground.algorithms.search.reward_head import (
    GradedAnswer,
    RewardHead,
    separation,
    train_reward_head,
)
from playground.algorithms.search.rewards import FittedReward
from playground.contract import Decoder, RewardedText, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.engine.sequence_classifier import load_classifier
from playground.errors import Refusal
from playground.events import Forward
from support.scripted_rewards import Scripted, hashed
from support.search_runs import chosen_by_brute_force, entire

WIDTH = 32
PROMPT = [54, 71, 71, 54, 9]


# --- networks on hidden states ---

def answers(seed: int, questions: int = 60) -> list[GradedAnswer]:
    """Answers whose grade is whether the first number of their last state is positive; earlier states are noise."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for question in range(questions):
        for _ in range(4):
            states = torch.randn(5, WIDTH, generator=chance)
            found.append(GradedAnswer(question, states.half(), -1.0, float(states[-1, 0] > 0)))
    return found


def trained(seed: int = 0, questions: int = 120) -> tuple[dict, list]:
    events, steps = [], train_reward_head(answers(1, questions), seed)
    while True:
        try:
            events.append(next(steps))
        except StopIteration as end:
            return end.value, events


def test_a_reward_model_learns_what_right_answers_have_in_common():
    weights, events = trained()
    head, fresh = RewardHead.of(weights), answers(2)
    right = torch.tensor([answer.grade == 1 for answer in fresh])
    scores = torch.cat([head("outcome", answer.states[-1:].float()) for answer in fresh])
    assert separation(scores, right) > 0.9
    assert separation(torch.cat([head("outcome", a.states[:1].float()) for a in fresh]), right) < 0.65
    assert all(tensor.dtype == torch.float16 for tensor in weights.values()) and "ROC" in events[-1].text


def test_the_same_seed_gives_the_same_weights():
    first, second = trained(3, 20)[0], trained(3, 20)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_separation_counts_pairs():
    scores, right = torch.tensor([3.0, 1.0, 2.0, 1.0]), torch.tensor([True, True, False, False])
    assert separation(scores, right) == (1 + 1 + 0 + 0.5) / 4


class Asking(Decoder):
    """Commits tokens, and asks a reward about texts with and without their states."""

    reads_hidden = ("target",)

    def __init__(self, reward):
        self.reward, self.found = reward, []

    def decode(self, lm):
        rows = yield lm.prefill()
        for _ in range(3):
            text = RewardedText(list(lm.tokens), state=rows.hidden[-1])
            others = [RewardedText([*lm.tokens, 7, 8]), RewardedText([*lm.tokens, 9])]
            self.found.append((yield from self.reward.scores(lm, [text, RewardedText(list(lm.tokens)), *others])))
            yield lm.keep(lm.pick(rows))
            rows = yield lm.extend()


def test_a_state_at_hand_and_a_text_read_anew_have_the_same_reward():
    torch.manual_seed(0)
    head = RewardHead(WIDTH)
    model = pair().target
    lane, _ = run(Assembly(Asking(FittedReward(head, "process"))), {"target": model}, PROMPT, 4)
    own, truth = network("llama"), []
    for number, found in enumerate(lane.assembly.decoder.found):
        assert found[0] == pytest.approx(found[1], abs=1e-6)
        with torch.inference_mode():
            ids = torch.tensor([[*lane.tokens[:len(PROMPT) + number], 7, 8]])
            hidden = own.model(input_ids=ids, use_cache=False).last_hidden_state[0]
            truth.append(float(head("process", hidden[-1:].float()).sigmoid()))
        assert found[2] == pytest.approx(truth[-1], abs=1e-5)
    assert max(truth) - min(truth) > 0.01, "texts differ in their rewards"


# --- sequence-classification models ---

@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A random reward model, one with three labels, and a language model, as saved by the library."""
    sizes = dict(vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                 num_attention_heads=2, pad_token_id=0)
    made = {
        "reward": LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1)),
        "labels": LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=3)),
        "language": LlamaForCausalLM(LlamaConfig(**sizes)),
    }
    found = {}
    for name, model in made.items():
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tokenizer = byte_tokenizer()
        if name == "reward":
            tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.mark.parametrize("name", ["reward", "labels"])
def test_a_classifier_gives_the_librarys_probability(folders, name):
    network = LlamaForSequenceClassification.from_pretrained(folders[name]).eval()
    judged = load_classifier(folders[name], "cpu").judge("red fox", "sings")
    turns = [{"role": "user", "content": "red fox"}, {"role": "assistant", "content": "sings"}]
    chat = TOKENIZER.apply_chat_template(turns, return_tensors="pt", return_dict=True)
    ids = TOKENIZER("red fox", "sings", return_tensors="pt") if name == "reward" else chat
    with torch.inference_mode():
        logits = network(**ids).logits[0]
    expected = logits[0].sigmoid() if name == "reward" else logits.softmax(0)[-1]
    assert judged.probability == pytest.approx(float(expected), abs=1e-5) and judged.tokens == ids["input_ids"].shape[1]


def test_a_language_model_without_a_classifier_is_refused(folders):
    with pytest.raises(Refusal, match="no trained classifier"):
        load_classifier(folders["language"], "cpu")


def test_best_of_n_keeps_the_text_that_a_sequence_classification_model_prefers(folders):
    knobs = {"n": 4, "score": "classifier", "classifier": folders["reward"], "temperature": 2.0}
    model = pair().target
    lane, events = run(LaneConfig("best_of_n", knobs), {"target": model}, PROMPT, 5)
    reward = load_classifier(folders["reward"], "cpu")
    asked = [event for event in events if isinstance(event, Forward) and event.stream == "reward"]
    shown = next(e.data["values"] for e in events if getattr(e, "name", "") == "reward of each text")
    own = reward.judge(lane.text_of(PROMPT), lane.text_of(lane.main.written)).probability
    assert own == pytest.approx(max(shown)) and len(asked) == len(shown) and all(e.flops > 0 for e in asked)


def test_a_classifier_has_to_be_named():
    with pytest.raises(Refusal, match="name one in classifier"):
        make("best_of_n", score="classifier")


def test_reward_models_are_not_loaded_for_visitors(monkeypatch):
    monkeypatch.setenv("PLAYGROUND_PUBLIC", "1")
    with pytest.raises(Refusal, match="public page"):
        make("a_star", reward="classifier", classifier="someone/model")


# --- selection by a reward ---

MODEL = TableModel("ab.", ".", seed=3)


def lane_of(name: str, cls: type | None = None, **knobs) -> Assembly:
    assembly = assemble(LaneConfig(name, {"n": 2, "temperature": 1.0, "classifier": "any", **knobs}))
    if cls:
        assembly.decoder = cls(**assembly.decoder.values())
    assembly.decoder._reward = Scripted(hashed)
    return assembly


def best(texts):
    return max(entire(texts, MODEL), key=lambda text: hashed((0, 1, *text)))


def elected(texts):
    voters = entire(texts, MODEL)
    answering = [text for text in voters if text != (2,)]
    return max(answering or voters, key=lambda text: voters.count(text) * hashed((0, 1, *text)))


def error(assembly: Assembly, choose) -> float:
    found = law(assembly, {"target": MODEL}, [0, 1], 2)
    return distance(found, chosen_by_brute_force(MODEL, [0, 1], 2, assembly.decoder.n, choose))


@pytest.mark.oracle("best_of_n", "self_consistency")
def test_a_reward_chooses_among_independent_texts():
    assert error(lane_of("best_of_n", score="classifier"), best) < 1e-9
    assert error(lane_of("self_consistency", vote="classifier", answer="text"), elected) < 1e-9


class LowestReward(find("best_of_n")):
    def rewards(self, lm, texts):
        return [-score for score in (yield from super().rewards(lm, texts))]


class CountsHeads(find("self_consistency")):
    def _weigh(self, lm, voters):
        yield from ()


@pytest.mark.refuses("best_of_n", "self_consistency")
def test_the_lowest_reward_and_a_plain_majority_fail():
    assert error(lane_of("best_of_n", LowestReward, score="classifier"), best) > 1e-3
    assert error(lane_of("self_consistency", CountsHeads, vote="classifier", answer="text"), elected) > 1e-3


def test_likelihood_is_the_geometric_mean_of_the_tokens_probabilities():
    lm = type("Lane", (), {"prompt_length": 2})()
    steps = make("a_star", reward="likelihood")._opened(lm)
    next(steps)
    with pytest.raises(StopIteration) as end:
        next(steps)
    scores = end.value.value.scores(lm, [RewardedText([0, 1, 2, 3], math.log(0.25)), RewardedText([0, 1])])
    with pytest.raises(StopIteration) as end:
        next(scores)
    assert end.value.value == pytest.approx([0.5, 1.0])
