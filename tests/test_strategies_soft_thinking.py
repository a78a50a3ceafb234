"""Soft thinking: mixtures and texts against the library with a hook on its embeddings, and wrong variants."""
from __future__ import annotations

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from runs import figures
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import playground
from playground.contract import find, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.errors import Refusal
from playground.events import Commit, Note
from playground.questions.questions import ask, judge
from support.speculation import GREEDY
from support.wrong_variants import refused

SoftThinking = find("soft_thinking")
NEVER = "~|~|~"  # an end tag that these texts do not have
COLLAPSES = {
    "soft_thinking": [
        Collapse(LaneConfig("soft_thinking", {"mixed": 1, "start": "", "end": "de"}), GREEDY),
        Collapse(LaneConfig("soft_thinking", {"least": 1.0, "start": "", "end": "de"}), GREEDY),
        Collapse(LaneConfig("soft_thinking", {}), GREEDY),  # these texts have no tags
    ],
}
PROMPT, WRITTEN = "The green bird sings to the fox.", 12
STEPS = {"start": "", "end": "####"}
SUM = "Gecost buys 6 boxes of 7 keys. Then 3 of the keys are gone. How many keys does Gecost have now?"


def decoded(decoder, architecture: str = "llama", length: int = WRITTEN):
    target, assembly = pair(architecture).target, Assembly(decoder)
    lane = Lane(target.tokens.encode(PROMPT), {"target": target}, assembly, Limits(0, length), Recorder(target.tokens))
    runner, events = Runner(lane, assembly), []
    while not runner.finished:
        events += runner.advance()
    return lane, events


# --- the mixture and the text ---

def weights_by_library(logits: torch.Tensor, t: float, k: int, p: float, least: float, mixed: int) -> torch.Tensor:
    """Weights of all tokens, [V], with the library's own processors."""
    scores, ids = logits[None], torch.zeros(1, 1, dtype=torch.long)
    for warper in (TemperatureLogitsWarper(t), TopKLogitsWarper(k), TopPLogitsWarper(p), MinPLogitsWarper(least)):
        scores = warper(ids, scores)
    probabilities = scores[0].softmax(-1)
    best = probabilities.topk(mixed)
    return torch.zeros_like(probabilities).index_copy(0, best.indices, best.values / best.values.sum())


@torch.no_grad()
def check_text(cls, end: str = NEVER, architecture: str = "llama") -> int:
    """Each token is the best one, and its log-probability the library's, after a forward over the whole text in which a
    hook puts sum p_i E[i] in place of each token that was thought; returns how many tokens were thought.
    """
    lane, events = decoded(cls(start="", end=end, mixed=4), architecture)
    library, own = network(architecture), lane.tokens[lane.prompt_length:]
    table, mixtures = library.get_input_embeddings()(torch.arange(lane.vocabulary)), []

    def mixed_in(module, args, embeddings):
        if mixtures:
            embeddings[0, lane.prompt_length:lane.prompt_length + len(mixtures)] = torch.stack(mixtures)
        return embeddings

    library.get_input_embeddings().register_forward_hook(mixed_in)
    thinks, text = True, ""
    logprobs = [each for event in events if isinstance(event, Commit) for each in event.logprobs]
    for place, (token, logprob) in enumerate(zip(own, logprobs, strict=True)):
        ids = torch.tensor([lane.tokens[:lane.prompt_length + place]])
        logits = library(input_ids=ids, use_cache=False).logits[0, -1]
        assert token == int(logits.argmax())
        assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=2e-6)
        text += lane.piece(token)
        thinks = thinks and end not in text
        if thinks:
            mixtures.append(weights_by_library(logits, 0.6, 30, 0.95, 0.001, 4) @ table)
    return len(mixtures)


class ReadsTheBest(SoftThinking):
    def embedded(self, lm, mixture):
        return lm.embed(mixture.tokens)[0]


class LosesWeight(SoftThinking):
    """Does not renormalise after the best tokens are chosen."""

    def mixture(self, logits):
        found, lost = super().mixture(logits), make("soft_thinking", mixed=30).mixture(logits)
        return found._replace(weights=lost.weights[:len(found.tokens)])


class WithoutTemperature(SoftThinking):
    def mixture(self, logits):
        self.temperature = 1.0
        return super().mixture(logits)


class MixesTheTag(SoftThinking):
    """Goes on with mixtures after the end tag."""

    def decode(self, lm):
        self.end = NEVER
        return super().decode(lm)


@pytest.mark.oracle("soft_thinking")
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])  # these attend in float64
def test_the_text_is_the_librarys_after_mixed_embeddings(architecture):
    assert check_text(SoftThinking, architecture=architecture) == WRITTEN


@pytest.mark.refuses("soft_thinking")
@pytest.mark.parametrize("wrong", [ReadsTheBest, LosesWeight, WithoutTemperature])
def test_other_mixtures_are_noticed(wrong):
    refused(check_text, wrong)


def end_within_the_text() -> str:
    """The piece of a token in the middle that no earlier token has."""
    lane, _ = decoded(make("soft_thinking", start="", end=NEVER, mixed=4))
    pieces = [lane.piece(token) for token in lane.tokens[lane.prompt_length:]]
    return next(piece for i, piece in enumerate(pieces) if i > 3 and piece not in "".join(pieces[:i]))


@pytest.mark.oracle("soft_thinking")
def test_from_the_end_tag_on_tokens_are_read_as_they_are():
    assert 3 < check_text(SoftThinking, end_within_the_text()) < WRITTEN - 1


@pytest.mark.refuses("soft_thinking")
def test_an_answer_that_is_mixed_is_noticed():
    end = end_within_the_text()
    with pytest.raises(AssertionError):
        check_text(MixesTheTag, end)


def test_weights_are_those_of_the_librarys_processors():
    rows = torch.randn(40, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    for mixed in (1, 3, 10):
        for row in rows:
            found = make("soft_thinking", mixed=mixed).mixture(row)
            whole = torch.zeros(50, dtype=torch.float64).index_copy(0, torch.tensor(found.tokens), found.weights)
            assert torch.allclose(whole, weights_by_library(row, 0.6, 30, 0.95, 0.001, mixed))


# --- where it is plain decoding ---

def test_mixing_one_token_writes_the_plain_text_to_the_bit():
    plain = playground.run("greedy", SUM, chat=True)
    soft = playground.run("soft_thinking", SUM, chat=True, knobs={**STEPS, "mixed": 1})
    assert soft.token_ids == plain.token_ids and soft.logprobs == plain.logprobs


# --- the end of the thinking ---

def test_thinking_ends_after_many_certain_tokens_in_a_row():
    lane, events = decoded(make("soft_thinking", start="", end="fox", certain=1.0, temperature=0.05, patience=3))
    notes = [event.text for event in events if isinstance(event, Note)]
    assert "3 tokens in a row were certain: the end of the thinking part is written." in notes
    assert len(figures(events, "mixture")) == 3 and lane.tokens[lane.prompt_length + 3:][:len(lane.spell("fox"))] == \
        lane.spell("fox")


@pytest.mark.parametrize("toggle", [("regex", {"pattern": "a*"}), ("pointer", {})])
def test_what_follows_the_text_is_refused(toggle):
    with pytest.raises(Refusal, match="Soft thinking does not work with"):
        assemble(LaneConfig("soft_thinking", {}, [toggle]))


def test_a_part_needs_an_end():
    with pytest.raises(Refusal, match="needs an end"):
        make("soft_thinking", end="")


# --- what it is worth ---

@pytest.mark.slow
def test_on_the_bundled_model_it_solves_no_more_sums():
    """As its summary says, on the first twenty of the hundred sums."""
    models, right, same = playground.load(draft="none", progress=False), [], 0
    for question in ask("arithmetic", 20, 7, grade=3):
        texts = [playground.run(name, question.prompt, chat=True, knobs=knobs, models=models).text
                 for name, knobs in (("greedy", {}), ("soft_thinking", STEPS))]
        right.append([judge(question, text) for text in texts])
        same += texts[0] == texts[1]
    plain, soft = map(sum, zip(*right, strict=True))
    assert soft <= plain and plain >= 14 and same >= 18
