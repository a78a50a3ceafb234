"""An acceptance head: trained for one pair of models, stored for this pair, and used by SpecDec++ to stop a draft."""
from __future__ import annotations

import json
from pathlib import Path

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
from playground.contract import find
from playground.decoding import fitted_weights as fitted
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Done, Draft, Failed, Verdict
from playground.questions.questions import ask
from playground.training import draft_rollouts as guesses
from playground.training.draft_rollouts import Sampling
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import GREEDY, first_drafts, speculative_lane
from support.speculative_runs import DropsDoubtful, figures, law_distance, of, recorded, with_drafter

NAME = "specdec_plus_plus"
SpecDec = find(NAME)
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

@pytest.fixture
def alone(home, monkeypatch) -> Path:
    """An empty folder for locally trained heads, without the bundled ones."""
    monkeypatch.setattr(fitted, "BUNDLED_FITTED", home / "none")
    return home


def streams(models: Models) -> dict:
    return {"target": models.target, "draft": models.draft}


def keep(models: dict, weights: dict[str, Tensor], best: dict[str, Tensor] | None = None) -> None:
    """Weights of the head for drawn tokens, and of that for best ones, where it is another."""
    fitted.save(fitted.local_path(NAME, models), both(weights, best), models)


def both(weights: dict[str, Tensor], best: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return {
        f"{rule}.{name}": tensor
        for rule, head in (("drawn", weights), ("best", best or weights))
        for name, tensor in head.items()
    }


def random_head(width: int, bias: float = 0.0, scale: float = 1.0) -> dict[str, Tensor]:
    """An untrained head with high predictions."""
    head = AcceptanceHead(width, 2, torch.Generator().manual_seed(5))
    for i, weights in enumerate(head.parameters()):
        torch.nn.init.normal_(weights, std=scale, generator=torch.Generator().manual_seed(i))
    head.read.bias.data = torch.tensor([0.0, bias])
    return head.requires_grad_(False).state_dict()


def with_head(*samplers, verifier: str = "rejection", **knobs):
    return speculative_lane(NAME, verifier, *samplers, predictor="head", **knobs)


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


def drafts(lane) -> list[Draft]:
    return of(Draft, recorded(lane)[1])


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


# --- stopping a chain ---

def predicting(*chances: float) -> dict:
    """Draft models whose state after n draft tokens is the log-probability that the last one is accepted; the most
    probable token is always the first.
    """
    def scores(context):
        chance = chances[min(len(context), len(chances)) - 1]
        return torch.tensor([9.0, 0.0, torch.tensor(chance).logit().item()], dtype=torch.float64)

    return {"target": TableModel("abc"), "draft": TableModel("abc", rule=scores)}


def read_third() -> dict[str, Tensor]:
    head = AcceptanceHead(3, 0)
    head.read.weight.data = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    return head.requires_grad_(False).state_dict()


def chain_length(cls, models: dict, **knobs) -> int:
    """Of the first chain, in a lane of 30 tokens behind a prompt of one."""
    lengths = []

    class Watched(cls):
        def observe(self, tree, rows, verdict):
            lengths.append(len(tree))
            super().observe(tree, rows, verdict)

    keep(models, read_third())
    write(
        with_drafter(Watched(predictor="head", **knobs), verifier="greedy_match"), models, [0], Limits(0, 30), Draws(0)
    )
    return lengths[0]


class StopsOnTheProduct(SpecDec):
    """Compares h with the probability that all are accepted."""

    def _should_stop(self, tree):
        return len(tree) >= self.least and self.survival(self._chances(tree))[-1] > self.h


class StopsOnTheLast(SpecDec):
    """Considers each draft token separately."""

    def survival(self, chances):
        return chances


class WithoutLag(SpecDec):
    """Takes the state before a draft token for the state that has read it."""

    def _predict(self, lm, node):
        self._predicted[node + 1] = float(self._head.chances(lm.stream("draft").seen.hidden[-1]))

    def survival(self, chances):
        return super().survival([*chances, 1.0])


@pytest.mark.parametrize("cls, guesses", [(SpecDec, 4), (StopsOnTheProduct, 1), (WithoutLag, 1)])
def test_a_chain_ends_one_draft_token_after_the_doubtful_one(alone, cls, guesses):
    """1 - .9 = .1, 1 - .72 = .28, 1 - .36 = .64. The first number is of the prompt, and counts for nothing."""
    assert chain_length(cls, predicting(.4, .9, .8, .5, .99), h=0.5, least=1) == guesses


@pytest.mark.parametrize("cls, right", [(SpecDec, True), (StopsOnTheLast, False)])
def test_many_fairly_certain_draft_tokens_are_doubtful_together(alone, cls, right):
    assert (chain_length(cls, predicting(.9), h=0.5, least=1, most=20) == 8) == right  # .9 ^ 7 = .48


@pytest.mark.parametrize(
    "chance, knobs, guesses",
    [
        (1e-9, {"least": 1}, 2),
        (1e-9, {"least": 1, "h": 0.0}, 2),
        (1e-9, {"least": 4}, 4),
        (1e-9, {"h": 1.0, "most": 7}, 7),
        (0.999, {"most": 9}, 9),
    ],
    ids=str,
)
def test_a_pessimistic_head_drafts_two_tokens_and_an_optimistic_one_the_maximum(
    alone, chance, knobs, guesses
):
    assert chain_length(SpecDec, predicting(chance), **knobs) == guesses


@pytest.mark.slow
def test_sampling_and_greedy_lanes_use_different_heads(alone):
    models = tables("abc")
    keep(models, random_head(3, 50.0, 0.0), random_head(3, -50.0, 0.0))
    lengths = [
        {len(tree) for _, tree, _ in first_drafts(with_head(*samplers, least=1, most=4), models, 20)}
        for samplers in ((AT_ONE,), ())
    ]
    assert lengths == [{4}, {2}]


@pytest.mark.slow
def test_with_h_one_the_chains_are_those_of_a_fixed_length(alone):
    models = tables("abc")
    keep(models, random_head(3))
    chains = [[tree.tokens for _, tree, _ in first_drafts(config, models, 20)] for config in
              (with_head(AT_ONE, h=1.0, most=4), speculative_lane("draft_model", "rejection", AT_ONE, depth=4))]
    assert chains[0] == chains[1] != []


# --- what it does not change ---

@pytest.mark.slow
@pytest.mark.parametrize(
    "bias, scale", [(0.0, 1.0), (-50.0, 0.0), (50.0, 0.0)], ids=["random", "trusts nothing", "trusts all"]
)
def test_the_greedy_text_is_plain_greedys_whatever_the_head_says(alone, bias, scale):
    keep(streams(pair()), random_head(pair().draft.width, bias, scale))
    plain, guessed = (
        recorded(config)[0]._runners[0].lane.tokens for config in (GREEDY, with_head(verifier="greedy_match", least=1))
    )
    assert plain == guessed


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [{"h": 0.5, "least": 1, "most": 3}, {"h": 0.2, "least": 1}, {"h": 0.9, "least": 2, "most": 4}], ids=str
)
def test_the_output_distribution_is_the_targets_with_an_untrained_head(alone, knobs):
    keep(tables("ab"), random_head(2))
    assert law_distance(with_drafter(SpecDec(predictor="head", **knobs), AT_ONE), tables("ab")) < EXACT


class DropsWhatTheHeadDoubts(DropsDoubtful):
    """Lets the draft process its last draft token too, and withdraws it if its own probability is small."""

    def propose(self, lm, budget):
        tree = yield from SpecDec.propose(self, lm, budget)
        if not len(tree):
            return tree
        yield lm.stream("draft").extend(tree)
        self._predict(lm, len(tree) - 1)
        return tree.only(list(range(len(tree) - 1))) if self._predicted[len(tree) - 1] < 0.5 else tree


@pytest.mark.slow
def test_withdrawing_a_draft_token_by_its_prediction_changes_the_distribution(alone):
    keep(tables("ab"), random_head(2))
    assert (
        law_distance(
            with_drafter(DropsWhatTheHeadDoubts(predictor="head", h=0.5, least=1, most=3), AT_ONE), tables("ab")
        )
        > WRONG
    )


@pytest.mark.parametrize("beside", [("knn_lm", {"tokens": 16}), ("dola", {})], ids=lambda added: added[0])
def test_samplers_that_mix_target_rows_do_not_affect_the_draft(alone, beside):
    keep(streams(pair()), random_head(pair().draft.width))
    plain, guessed = (
        recorded(config, length=12)[1]
        for config in (with_drafted(GREEDY, beside), with_drafted(with_head(verifier="greedy_match"), beside))
    )
    assert [event.reason for event in of(Done, guessed)] == [event.reason for event in of(Done, plain)] == ["length"]


def with_drafted(config, beside):
    return type(config)(config.strategy, config.knobs, [*config.extras, beside])


# --- what is shown ---

@pytest.mark.slow
def test_tested_draft_tokens_are_reported_with_prediction_and_outcome(alone):
    keep(streams(pair()), random_head(pair().draft.width))
    events = recorded(with_head(verifier="greedy_match", h=0.9, least=3), length=40)[1]
    shown = figures(events, "predicted and actual acceptance")
    verdicts, drafts = of(Verdict, events), of(Draft, events)
    came = [
        [float(test.kept) for test in verdict.tests if test.node < len(draft.tokens) - 1]
        for verdict, draft in zip(verdicts, drafts)
    ]
    assert len(shown) > 3 and [data["values"][1] for data in shown] == [row for row in came if row][:len(shown)]
    assert all(0 <= chance <= 1 for data in shown for chance in data["values"][0])


# --- the bundled pair ---

@pytest.fixture(scope="module")
def bundled() -> Models:
    return load()


class Watched(SpecDec):
    """Records the prediction for each tested draft token, and the outcome."""

    def __post_init__(self):
        super().__post_init__()
        self.noted = []

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, verdict)
        self.noted += [
            (self._predicted[test.node], float(test.kept)) for test in verdict.tests if test.node in self._predicted
        ]


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
