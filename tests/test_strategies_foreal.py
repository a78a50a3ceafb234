"""A leader and a follower model that write a text in turns: against exact distributions."""
from __future__ import annotations

import pytest
from registry import Collapse
from tables import TableModel

import playground
from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.rng import Draws
from playground.events import Forward, Step, Switch
from support.search_runs import of
from support.speculation import GREEDY, MODEL


def drawing(name: str, **knobs) -> LaneConfig:
    return LaneConfig(name, knobs, [("temperature", {"t": 1.0})])


COLLAPSES = {
    "foreal": [
        Collapse(of("foreal", n=1024, p=1.0), GREEDY),
        Collapse(of("foreal", n=0), GREEDY, on="draft"),
        Collapse(of("foreal", p=0.0), GREEDY, on="draft"),
        Collapse(of("foreal", n=1, p=0.5, cap=2), GREEDY, twins=True),
        Collapse(drawing("foreal", n=2, p=0.5, cap=3), MODEL, twins=True),
    ],
}


@pytest.mark.parametrize(
    "text, over",
    [
        ("3.14 is", False),
        ("It is 3.", False),
        ("In 1990. Then", True),
        ("in 3. 5", False),
        ("a\n\n", True),
        ("What?!", True),
        ('He said "no."', True),
        ("Hello. ", True),
        ("", False),
        ("!", False),
        ("e.g. x", False),
        ("end。", True),
    ],
)
def test_sentence_ends_are_recognised(text, over):
    assert find("foreal").decode.__globals__["is_sentence"](text) is over


def led(n: int, p: float, seed: int, cap: int = 128, length: int = 40):
    """A lane over letters and stops, and who wrote each token."""
    models = {
        "target": TableModel(["a", "b", ". ", "c"], seed=seed, spread=0.7),
        "draft": TableModel(["a", "b", ". ", "c"], seed=seed + 50, spread=0.7),
    }
    lane = Lane(
        [0, 1],
        models,
        assemble(drawing("foreal", n=n, p=p, cap=cap)),
        Limits(seed, length),
        Silent(models["target"].tokens),
    )
    runner, recorded = Runner(lane, lane.assembly), []
    while not runner.finished:
        recorded += runner.advance()
    switches = {event.position: event.to for event in recorded if isinstance(event, Switch)}
    writers, current = [], ""
    for position in range(lane.generated):
        current = switches.get(position, current)
        writers.append(current)
    return models, lane, writers


def sentences_of(lane: Lane, writers: list[str]) -> list[list[str]]:
    """Writers by sentence; a sentence ends at a stop after at least one letter."""
    found, letters = [[]], False
    for token, writer in zip(lane.main.written, writers):
        found[-1].append(writer)
        letters = letters or token != 2
        if token == 2 and letters:
            found.append([])
            letters = False
    return [sentence for sentence in found if sentence]


@pytest.mark.oracle("foreal")
@pytest.mark.parametrize("n", [1, 3])
def test_a_guided_sentence_begins_with_at_most_n_tokens_of_the_leader(n):
    for seed in range(8):
        _, lane, writers = led(n, 1.0, seed)
        for sentence in sentences_of(lane, writers):
            assert sentence == (["leader"] * n + ["draft"] * len(sentence))[:len(sentence)]


@pytest.mark.refuses("foreal")
@pytest.mark.parametrize(
    "wrong",
    [lambda text: False, lambda text: text.endswith("."), lambda text: "b" in text],
    ids=["never", "a stop alone", "at a letter"],
)
def test_other_sentence_ends_change_the_text(wrong, monkeypatch):
    monkeypatch.setitem(find("foreal").decode.__globals__, "is_sentence", wrong)
    recorded = [(sentence, (["leader"] * 3 + ["draft"] * len(sentence))[:len(sentence)]) for seed in range(8)
            for sentence in sentences_of(*led(3, 1.0, seed)[1:])]
    assert any(sentence != due for sentence, due in recorded)


@pytest.mark.oracle("foreal")
def test_every_token_is_its_models_argmax_after_the_whole_text():
    for seed in range(6):
        models, lane, writers = led(2, 0.5, seed, cap=4)
        assert len(set(writers)) == 2
        for i, writer in enumerate(writers):
            context = tuple(lane.tokens[:2 + i])
            p = models["target" if writer == "leader" else "draft"].scores(context).softmax(-1)
            assert lane.tokens[2 + i] == Draws(seed).pick(p, "token", 2 + i)


@pytest.mark.slow
def test_the_share_of_guided_sentences_is_the_given_probability():
    """About 240 sentences: two and a half standard errors of a share of 0.3 are 0.075."""
    leads = [sentence[0] == "leader" for seed in range(30) for sentence in sentences_of(*led(2, 0.3, seed)[1:])]
    assert len(leads) > 200 and abs(sum(leads) / len(leads) - 0.3) < 0.08


@pytest.mark.slow
def test_on_a_switch_the_other_models_tokens_are_read_in_one_forward():
    recorded = playground.run(
        "foreal", "Tell me a story about Mia.", models=playground.load(), chat=True, max_new_tokens=40, knobs={"n": 4}
    )
    forwards = [stamped.event for stamped in recorded.trace.events if isinstance(stamped.event, Forward)]
    steps = [stamped.event for stamped in recorded.trace.events if isinstance(stamped.event, Step)]
    assert len(forwards) == len(steps) and {event.stream for event in steps} == {"target", "draft"}
    for stream in ("target", "draft"):
        read = [event for event in forwards if event.stream == stream]
        assert all(later.context == earlier.context + earlier.tokens for earlier, later in zip(read, read[1:])), (
            "no token is read twice, none left out"
        )


@pytest.mark.parametrize("policy", ["q_filters", "h2o"])
def test_a_cache_policy_has_nothing_to_evict_while_the_follower_writes_the_start(policy):
    """Until the leader reads the text, its KV cache is empty."""
    models = playground.load()
    result = playground.run("foreal", "Tell me a story.", knobs={"p": 0.0}, extras=[policy], models=models,
                            max_new_tokens=6)
    assert result.reason == "length" and len(result.token_ids) == 6
