"""An acceptance head: trained for one pair of models, and stored for this pair."""
from __future__ import annotations

import json

import pytest
import torch
from pairs import network, pair
from saved import save_models
from tables import TableModel, write
from torch import Tensor

from playground import load
from playground.algorithms.speculative.acceptance_head import (
    ACCEPTED,
    AcceptanceHead,
    DraftSamples,
    Training,
    constant_loss,
    learn,
    loss,
)
from playground.cli import main
from playground.decoding import fitted_weights as fitted
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Failed
from playground.questions.questions import ask
from playground.training import draft_rollouts as guesses
from playground.training.draft_rollouts import Sampling
from support.acceptance_heads import (  # noqa: F401
    NAME,
    SpecDec,
    Watched,
    alone,
    both,
    drafts,
    keep,
    random_head,
    streams,
    with_head,
)
from support.laws import AT_ONE
from support.speculation import speculative_lane
from support.speculative_runs import of, recorded, with_drafter

SHORT = Training(epochs=6, rate=3e-3, batch=32)


# --- training ---

def texts(count: int = 40, shuffled: bool = False, seed: int = 0) -> list[DraftSamples]:
    """100 draft tokens each. Their first component determines the acceptance probability, 0.9 on average, unless they
    are shuffled.
    """
    chance = torch.Generator().manual_seed(seed)
    states = torch.randn(count * 100, 6, generator=chance)
    chances = (4 + 3 * states[:, 0]).sigmoid()
    order = torch.randperm(len(chances), generator=chance) if shuffled else torch.arange(len(chances))
    return [DraftSamples(*part) for part in zip(states.split(100), chances[order].split(100))]


def learnt(given: list[DraftSamples], training: Training = SHORT, seed: int = 0) -> tuple[dict[str, Tensor], list]:
    """Weights, and the events of the training."""
    events, generator = [], learn(given, training, seed)
    while True:
        try:
            events.append(next(generator))
        except StopIteration as end:
            return end.value, events


def new_guesses(shuffled: bool = False) -> DraftSamples:
    """4000 more of the kind that `texts` gives."""
    return DraftSamples(*map(torch.cat, zip(*texts(shuffled=shuffled, seed=9))))


@pytest.mark.slow
def test_training_lowers_the_loss_on_held_out_texts():
    curve = [event.data["series"]["held-out loss"] for event in learnt(texts())[1] if event.kind == "figure"]
    assert len(curve) == SHORT.epochs + 1 and curve[-1] < curve[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True], ids=["true", "shuffled"])
def test_a_head_beats_a_constant_probability_only_if_states_are_informative(shuffled):
    """On 4000 fresh draft tokens. Of the loss of one constant over the true probabilities, the head recovers nine
    tenths, or nothing.
    """
    head, fresh = AcceptanceHead.of(learnt(texts(shuffled=shuffled))[0]), new_guesses(shuffled)
    constant, best = (
        constant_loss(fresh.chances),
        float(loss(fresh.chances.clamp(1e-6, 1 - 1e-6).logit(), fresh.chances)),
    )
    won = (constant - float(loss(head(fresh.states), fresh.chances))) / (constant - best)
    assert won < 0.05 if shuffled else won > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("put_right", [True, False])
@pytest.mark.parametrize("weight", [1.0, 6.0])
def test_rejections_have_a_higher_weight_in_training_and_probabilities_are_calibrated_afterwards(weight, put_right):
    """On fresh draft tokens the predicted acceptance rate is right within 0.02; without correcting the weight it is far
    too low.
    """
    weights = learnt(texts(), Training(epochs=6, rate=3e-3, batch=32, weight=weight))[0]
    if not put_right:
        weights["read.bias"][ACCEPTED] -= torch.tensor(weight).log()
    fresh = new_guesses()
    off = float(AcceptanceHead.of(weights).chances(fresh.states).mean() - fresh.chances.mean())
    assert (abs(off) < 0.02) == (put_right or weight == 1)
    assert put_right or weight == 1 or off < -0.05


def test_the_loss_is_the_papers_weighted_sum():
    odds, chances = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1.0, 0.25, 0.0])
    a = odds.sigmoid()
    by_hand = -sum(c * a_i.log() + 6 * (1 - c) * (1 - a_i).log() for c, a_i in zip(chances, a)) / (
        chances.sum() + 6 * (1 - chances).sum()
    )
    assert float(loss(odds, chances, 6.0)) == pytest.approx(float(by_hand))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_head():
    one, same, other = (learnt(texts(), seed=seed)[0]["read.weight"] for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_block_is_residual():
    head, state = AcceptanceHead(3, 2), torch.tensor([[1.0, -2.0, 0.5]])
    head.read.weight.data = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert head(state).item() == pytest.approx(-0.5), "blocks that know nothing change nothing"
    head.blocks[0].bias.data[:] = 1.0
    assert head(state).item() == pytest.approx(-0.5 + 3 * 1 / (1 + torch.tensor(-1.0).exp().item()))


def test_too_few_texts_are_refused():
    with pytest.raises(Refusal, match="at least 20 texts"):
        learnt(texts(19))


# --- training data ---

PROMPT = [5, 9, 2, 7]


def again(answer: list[int], mixed: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The draft's samples and states, and the target's distribution at each position [n, V], by the library."""
    chance = torch.Generator().manual_seed(seed)
    q = guesses.read(pair().draft, PROMPT + answer)[0][len(PROMPT) - 1:-1].softmax(-1)
    drawn = q.multinomial(1, generator=chance)[:, 0]
    own = torch.rand(len(answer), generator=chance) < mixed
    return drawn, torch.where(own, torch.tensor(answer), drawn), (by_library(answer).softmax(-1) / q).clamp(max=1)


def by_library(answer: list[int]) -> Tensor:
    """The target's logits [n, V] before each token of an answer, by the library."""
    with torch.inference_mode():
        return network("llama")(input_ids=torch.tensor([PROMPT + answer]), use_cache=False).logits[
            0, len(PROMPT) - 1 : -1
        ]


@pytest.mark.parametrize("mixed", [0.0, 0.5, 1.0])
def test_training_pairs_are_draft_states_and_acceptance_with_p_over_q(mixed):
    answer = guesses.answers(pair().target, [PROMPT], 40, Sampling(3))[0]
    found = guesses.rollout(pair(), PROMPT, answer, Sampling(1), mixed)
    drawn, fed, standing = again(answer, mixed, 1)
    places = (drawn == fed).nonzero()[:, 0]
    assert (len(places) == 40) == (mixed == 0) and len(places) > 3
    assert torch.allclose(found.chances, standing[places, drawn[places]], atol=1e-9)
    head = pair().draft.network.get_output_embeddings()
    logits = guesses.read(pair().draft, PROMPT + fed.tolist())[0][len(PROMPT):]
    with torch.no_grad():
        assert (head(found.states) - logits[places]).abs().max() < 1e-9


def test_greedily_a_draft_token_is_accepted_if_it_is_both_argmaxes():
    answer = guesses.answers(pair().target, [PROMPT], 40, Sampling(sampled=False))[0]
    assert answer == by_library(answer).argmax(-1).tolist(), "the answer is the greedy one"
    found = guesses.rollout(pair(), PROMPT, answer, Sampling(sampled=False), 0.0)
    best = guesses.read(pair().draft, PROMPT + answer)[0][len(PROMPT) - 1:-1].argmax(-1)
    assert found.chances.tolist() == (best == torch.tensor(answer)).double().tolist() and 0 < found.chances.mean() < 1


def test_answers_are_sampled_from_the_target_up_to_its_end_token():
    """400 answers of two tokens by a table: each first token comes as often as it should, within 0.1, four standard
    errors; 'c' ends a text.
    """
    table = TableModel("abc", ends="c")
    found = guesses.answers(table, [[0, 1]] * 400, 2, Sampling(0))
    shares = torch.tensor([sum(answer[0] == token for answer in found) / 400 for token in range(3)])
    assert (shares - table.scores((0, 1)).softmax(-1)).abs().max() < 0.1
    assert all((len(answer) == 1) == (answer[0] == 2) for answer in found)


def test_a_target_without_a_draft_is_refused(tmp_path):
    with pytest.raises(Refusal, match="has none"):
        list(guesses.rollouts(Models(pair().target), [PROMPT], Sampling(), tmp_path / "kept"))


def test_held_out_questions_are_not_among_its_prompts():
    class Spelled:
        tokens = type(
            "Tokens",
            (),
            {"tokenizer": type("T", (), {"chat_template": ""}), "encode": staticmethod(lambda text: [text])},
        )

    asked = {prompt[0] for prompt in guesses.world_prompts(Spelled, 0, 20)}
    assert not asked & {question.prompt for question in ask("records", 50, 1)} and len(asked) > 100


# --- storage ---

def test_weights_are_found_by_the_models_they_were_trained_for(alone):
    models = streams(pair())
    keep(models, random_head(pair().draft.width))
    found = fitted.find(SpecDec(predictor="head"), models)
    assert all(torch.equal(found[name], weights) for name, weights in both(random_head(pair().draft.width)).items())


@pytest.mark.parametrize("stream", ["target", "draft"])
def test_a_head_for_other_weights_is_refused_before_the_run_with_the_proxy_as_alternative(
    alone, monkeypatch, stream
):
    keep(streams(pair()), random_head(pair().draft.width))
    monkeypatch.setattr(getattr(pair(), stream), "revision", "trained anew")
    (failed,) = of(Failed, recorded(with_head())[1])
    assert "other weights of llama with noise and llama" in failed.message and "fit specdec_plus_plus" in failed.message
    assert "set predictor to proxy" in failed.message and failed.message.count(". ") == 0
    assert not of(Failed, recorded(speculative_lane(NAME))[1]), "the proxy runs"


@pytest.mark.slow
def test_by_default_the_head_predicts_if_there_is_one_and_the_proxy_otherwise(alone):
    proxy = drafts(speculative_lane(NAME, predictor="proxy"))
    assert drafts(speculative_lane(NAME)) == proxy
    keep(streams(pair()), random_head(pair().draft.width, bias=-3.0))
    assert drafts(speculative_lane(NAME)) == drafts(speculative_lane(NAME, predictor="head")) != proxy


def test_without_a_head_the_refusal_says_how_to_train_one(alone):
    (failed,) = of(Failed, recorded(with_head())[1])
    assert "has not been fitted" in failed.message and "set predictor to proxy" in failed.message


def test_a_damaged_file_is_named(alone):
    place = fitted.local_path(NAME, streams(pair()))
    place.parent.mkdir()
    place.write_bytes(b"no tensors")
    (failed,) = of(Failed, recorded(with_head())[1])
    assert place.name in failed.message and "damaged" in failed.message


def test_a_local_head_precedes_the_bundled_one_unless_it_does_not_fit(
    alone, monkeypatch
):
    models = streams(pair())
    monkeypatch.setattr(fitted, "BUNDLED_FITTED", alone / "bundled")
    fitted.save(alone / "bundled" / fitted.file_name(NAME, models), random_head(4, bias=1.0), models)
    own, asked = fitted.local_path(NAME, models), SpecDec(predictor="head")
    fitted.save(own, random_head(4, bias=2.0), models)
    assert float(fitted.find(asked, models)["read.bias"][1]) == 2.0
    fitted.save(own, random_head(4, bias=2.0), {**models, "target": Older()})
    assert float(fitted.find(asked, models)["read.bias"][1]) == 1.0


class Older:
    name, revision, quantization = "llama", "older", "none"


# --- the bundled pair ---

@pytest.fixture(scope="module")
def bundled() -> Models:
    return load()


@pytest.mark.slow
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_the_bundled_head_beats_a_constant_probability_on_held_out_questions(
    bundled, samplers
):
    """Eight answers, chains of eight, more than a hundred tested draft tokens; the constant is fitted to them
    afterwards.
    """
    noted, questions = [], [*ask("records", 4, 7), *ask("programs", 4, 7)]
    for number, question in enumerate(questions):
        assembly = with_drafter(Watched(predictor="head", h=1.0, most=8), *samplers)
        lane = write(
            assembly,
            streams(bundled),
            bundled.target.tokens.encode_chat(question.prompt),
            Limits(number, 60),
            Draws(number),
        )
        noted += lane.assembly.decoder.drafter.noted
    said, came = torch.tensor(noted).T
    assert len(noted) > 100
    assert float(loss(said.clamp(1e-6, 1 - 1e-6).logit(), came)) < 0.9 * constant_loss(came)


# --- the command ---

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def words(saved, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setattr(guesses, "ROOM", 12)
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": f"Bird number {i} sang of {i * 7} trees."}) for i in range(30))
    )
    return ["--model", saved.target, "--draft", saved.draft, "--texts", str(tmp_path / "texts.jsonl")]


@pytest.mark.slow
def test_the_command_trains_a_head_that_lanes_find(alone, words, capsys):
    assert main(["fit", NAME, *words]) == 0
    out = capsys.readouterr().out
    assert "held-out loss" in out and "Trained on" in out and str(alone / "fitted") in out
    run = ["run", "speculative", "--prompt", "Bird", "--max-new-tokens", "8", *words[:4]]
    assert main([*run, "--with", f"{NAME}:predictor=head"]) == 0
    with_head = capsys.readouterr().out
    assert main([*run, "--with", NAME]) == 0
    assert capsys.readouterr().out.splitlines()[0] == with_head.splitlines()[0], "the text is the target's"


@pytest.mark.slow
def test_the_command_writes_to_the_given_file_and_says_so_as_json(alone, words, tmp_path, capsys):
    assert main(["fit", NAME, *words, "--out", str(tmp_path / "head.safetensors"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(tmp_path / "head.safetensors") and (tmp_path / "head.safetensors").stat().st_size < 1e6
    assert set(facts["weights"]) == {"target", "draft"} and not (alone / "fitted").exists()


def test_the_command_refuses_a_draft_with_other_tokens_and_no_draft(alone, words, saved, capsys):
    for draft, says in ((saved.stranger, "another vocabulary"), ("none", "--draft")):
        assert main(["fit", NAME, "--model", saved.target, "--draft", draft, *words[4:]]) == 2
        assert says in capsys.readouterr().err
