"""What every overlay promises: the text is to the bit that of a lane without it, which pays nothing."""
from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import replace
from functools import cache

import pytest
import torch
from pairs import TOKENIZER, VOCABULARY, pair, pair_for
from recurrent_networks import recurrent
from registry import registered
from tables import TableModel

import playground
from playground.contract import LooksAhead, ReadsAnotherText, ReadsChannels, ReadsExperts, ReadsHeads, find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding import fitted_weights
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.engine.cache.kv_cache import KVCache
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Done, Figure, Forward, Note, Step, event_from_json
from playground.trace import check
from playground.ui.play.gallery import examples
from support.encoder_decoder_pairs import encoder_decoders

OVERLAYS = [cls.name for cls in registered("overlay")]
every_overlay = pytest.mark.parametrize("name", OVERLAYS)
PLAIN = "greedy"
LANES = {
    "greedy": LaneConfig("greedy"),
    "sampled": LaneConfig("greedy", {}, [("temperature", {"t": 1.0})], seed=3),
    "speculative": LaneConfig("speculative", {}, [("draft_model", {}), ("greedy_match", {})]),
    "beams": LaneConfig("beam_search"),
}


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """Overlays that are fitted to a model find random weights for the small ones of these tests."""
    found, width = fitted_weights.stored, pair().target.width
    monkeypatch.setattr(fitted_weights, "stored", lambda name, models: (
        find(name).untrained(width) if name in OVERLAYS and hasattr(find(name), "untrained") else found(name, models)
    ))


def overlaid_alone(name: str) -> LaneConfig:
    """A lane with only this overlay: a greedy one, unless it watches another decoder."""
    return overlaid(LANES[PLAIN] if takes(PLAIN, name) else LANES["beams"], name)


def takes(lane: str, name: str) -> bool:
    try:
        assemble(overlaid(LANES[lane], name))
    except Refusal:
        return False
    return True


@cache
def recurrent_pair() -> Models:
    network = recurrent("mamba", vocab_size=VOCABULARY, tie_word_embeddings=False, eos_token_id=None)
    model = Model(network, TOKENIZER, "mamba")
    return Models(model, model)


def models_for(*configs: LaneConfig) -> Models:
    needs = {need for config in configs for need in assemble(config).needs()}
    if "encoder" in needs:
        return encoder_decoders("t5")
    return recurrent_pair() if "state_space" in needs else pair_for(*configs)


def run(*configs: LaneConfig, models: Models | None = None, length: int = 12) -> Session:
    session = prepare(models or models_for(*configs), list(configs), Prompt("The green bird"), Limits(0, length))
    deque(session, maxlen=0)
    return session


def overlaid(config: LaneConfig, *names: str) -> LaneConfig:
    return replace(config, extras=[*config.extras, *((name, {}) for name in names)])


def events_of(session: Session, lane: int = 0) -> list:
    return [stamped.event for stamped in session.trace.events if stamped.lane == lane]


def written(session: Session, lane: int = 0) -> list:
    """Tokens, log-probabilities and recorded distributions of a lane."""
    return [event.to_json() for event in events_of(session, lane) if isinstance(event, Commit | Step)]


def without_overlays(session: Session, lane: int = 0) -> list:
    """The events before the reading, without measured times."""
    events = [event for event in events_of(session, lane) if not isinstance(event, Figure | Done)]
    own = [event for event in events if not (isinstance(event, Forward) and event.stream == "overlay")]
    return [{key: value for key, value in event.to_json().items() if key != "seconds"} for event in own]


@pytest.mark.parametrize("name, lane", [(name, lane) for name in OVERLAYS for lane in LANES if takes(lane, name)])
def test_text_and_probabilities_are_to_the_bit_those_without_it(name, lane):
    config = overlaid(LANES[lane], name)
    models = models_for(config)
    plain, with_it = run(LANES[lane], models=models), run(config, models=models)
    assert len(written(plain)) > 8 and written(with_it) == written(plain)
    store, own = (session._runners[0].lane.target.store for session in (plain, with_it))
    for part in ("keys", "values"):
        for buffer, other in zip(getattr(store, part), getattr(own, part)):
            assert buffer.rows[:, :store.length].equal(other.rows[:, :store.length])


@every_overlay
def test_lanes_beside_it_write_to_the_bit_what_they_write_beside_a_plain_one(name):
    config = overlaid_alone(name)
    models, alone = models_for(config), replace(config, extras=[])
    plain, with_it = (run(first, LANES["sampled"], models=models) for first in (alone, config))
    for lane in (0, 1):
        assert written(with_it, lane) == written(plain, lane)


@every_overlay
def test_a_lane_draws_once_its_text_is_complete_in_a_consistent_trace(name):
    session = run(overlaid_alone(name))
    events = events_of(session)
    assert check(session.trace) == [] and isinstance(events[-1], Done)
    last = max(index for index, event in enumerate(events) if isinstance(event, Commit))
    figures = [index for index, event in enumerate(events) if isinstance(event, Figure)]
    reads = [index for index, event in enumerate(events) if isinstance(event, Forward) and event.stream == "overlay"]
    assert reads and min(reads) > last
    assert [index for index in figures if index > max(reads)], "it draws nothing"
    for event in events:
        assert event_from_json(json.loads(json.dumps(event.to_json(), allow_nan=False))) == event


@every_overlay
def test_its_spans_are_generated_tokens_and_its_shades_are_shares(name):
    found = [event for event in events_of(run(overlaid_alone(name))) if isinstance(event, Figure)]
    spans = [span for figure in found if figure.data.get("shades") for span in figure.data["spans"]]
    assert spans and all(0 <= first < end <= 12 and 0 <= value <= 1 for first, end, _, value in spans)


NAMING = ("attention_entropy", "lm_head_neurons", "pointer", "sae_features")


def named_parts(name: str, **knobs) -> list[list[str]]:
    """The parts that an overlay names, for each span that colours a token."""
    plain = LANES[PLAIN]
    found = [event for event in events_of(run(replace(plain, extras=[(name, knobs)]))) if isinstance(event, Figure)]
    shaded = [figure.data for figure in found if figure.data.get("shades")]
    for data in shaded:
        assert "parts" not in data or len(data["parts"]) == len(data["spans"])
    return [parts for data in shaded for parts in data.get("parts", [])]


@pytest.mark.parametrize("name", NAMING[:3])
def test_a_part_that_it_names_can_be_switched_off_by_that_name(name):
    parts = {part for named in named_parts(name, **({"z": 3.0} if name == "lm_head_neurons" else {})) for part in named}
    assert parts
    for part in sorted(parts)[:3]:
        switched = run(LaneConfig("greedy", {}, [("switch_part", {"parts": part})]), models=pair())
        assert isinstance(events_of(switched)[-1], Done)


def test_features_can_be_switched_off_where_an_autoencoder_is_fitted(monkeypatch):
    assert named_parts("sae_features") == [], "no layer writes the embeddings"
    weights = find("sae_features").untrained(pair().target.width) | {"layer": torch.tensor(2)}
    monkeypatch.setattr(fitted_weights, "stored", lambda name, models: weights)
    parts = {part for named in named_parts("sae_features") for part in named}
    assert parts and all(re.fullmatch(r"feature \d+", part) for part in parts)
    switched = run(LaneConfig("greedy", {}, [("switch_part", {"parts": min(parts)})]), models=pair())
    assert isinstance(events_of(switched)[-1], Done)
    monkeypatch.setattr(fitted_weights, "stored", lambda name, models: None)
    assert named_parts("sae_features") == [], "random directions are no features"


def test_no_part_is_named_of_a_model_whose_parts_cannot_be_switched():
    for name in ("attention_entropy", "pointer"):
        session = run(LaneConfig("greedy", {}, [(name, {})]), models=pair("gpt_neox"))
        figures = [event.data for event in events_of(session) if isinstance(event, Figure)]
        assert any(data.get("shades") for data in figures) and not any("parts" in data for data in figures)


def test_a_lane_without_overlays_pays_nothing(monkeypatch):
    """No hook in any KV cache, no watched row and no forward that the text does not need."""
    stores: list[KVCache] = []
    made = type(pair().target).new_store
    monkeypatch.setattr(
        type(pair().target), "new_store", lambda model, *given: stores.append(made(model, *given)) or stores[-1]
    )
    session = run(LANES["greedy"], models=pair())
    forwards = [event for event in events_of(session) if isinstance(event, Forward)]
    assert len(forwards) == 12 and {event.stream for event in forwards} == {"target"}
    assert len(stores) == 1 and stores[0].on_query_heads is None and not stores[0].attention
    assert session._runners[0]._reading is None


@every_overlay
def test_a_reading_is_one_pass_over_the_text_unless_it_looks_ahead(name):
    session = run(overlaid_alone(name))
    reads = [event for event in events_of(session) if isinstance(event, Forward) and event.stream == "overlay"]
    own = not issubclass(find(name), ReadsAnotherText)
    assert reads[0].tokens == len(session._runners[0].lane.tokens) or not own
    assert reads[0].phase == "decode" and reads[0].flops > 0 and (len(reads) == 1 or issubclass(find(name), LooksAhead))


def test_several_overlays_share_one_pass():
    apart = (LooksAhead, ReadsExperts, ReadsAnotherText)
    names = [name for name in OVERLAYS if takes(PLAIN, name) and not issubclass(find(name), apart)
             and not {"state_space", "encoder"} & set(find(name).needs)]
    reads = [event for event in events_of(run(overlaid(LANES["greedy"], *names)))
             if isinstance(event, Forward) and event.stream == "overlay"]
    assert len(names) > 1 and len(reads) == 1


@every_overlay
def test_a_lane_that_is_stopped_while_it_is_read_has_its_whole_text(name):
    config = overlaid_alone(name)
    session = prepare(models_for(config), [config], Prompt("The green bird"), Limits(0, 6))
    while session._runners[0].lane.generated < 6:
        session.advance()
    session.stop()
    assert isinstance(events_of(session)[-1], Done) and events_of(session)[-1].reason == "length"
    assert check(session.trace) == []


# --- what cannot work ---

@every_overlay
@pytest.mark.parametrize("beside", ["h2o", "ffn_skip"])
def test_beside_a_policy_it_is_refused(name, beside):
    with pytest.raises(Refusal, match="lets the whole model read the text"):
        assemble(LaneConfig(overlaid_alone(name).strategy, {}, [(name, {}), (beside, {})]))


def test_beside_other_experts_of_the_target_or_another_prompt_it_is_refused():
    kept = LaneConfig("greedy", {}, [("moe_routing", {}), ("scmoe", {"strong": 0})])
    assert [overlay.name for overlay in assemble(kept).overlays] == ["moe_routing"]
    for other in (
        replace(kept, extras=[("moe_routing", {}), ("scmoe", {"strong": 1})]),
        LaneConfig("refrag", {}, [("markov_view", {})]),
    ):
        with pytest.raises(Refusal, match="lets the whole model read the text"):
            assemble(other)


@every_overlay
def test_twice_in_a_lane_or_on_a_canvas_it_is_refused(name):
    with pytest.raises(Refusal, match="in this lane already"):
        assemble(LaneConfig(overlaid_alone(name).strategy, {}, [(name, {}), (name, {})]))
    with pytest.raises(Refusal, match="does not work with an overlay such as"):
        assemble(LaneConfig("masked_diffusion", {}, [(name, {})]))


class Unreadable(TableModel):
    """Attention runs elsewhere, feed-forward networks stay whole, and there are no experts."""

    attends, parts, experts, recurrence, has_encoder = False, None, 0, None, False


@every_overlay
def test_a_model_without_what_it_reads_is_refused_in_one_sentence(name):
    made = find(name)()
    made.check_target(models_for(overlaid_alone(name)).target)  # accepted
    if not (made.needs or isinstance(made, ReadsHeads | ReadsExperts | ReadsChannels)):
        return  # it reads what every model has
    with pytest.raises(Refusal) as found:
        made.check_target(Unreadable())
    sentence = str(found.value)
    assert sentence.endswith(".") and sentence.count(". ") == 0 and "choose" in sentence and found.value.about == name


# --- the gallery ---

NOT_BUNDLED = {"ssm_dynamics", "cross_attention"}  # no bundled model has a state space or an encoder


def shown(name: str) -> list[dict]:
    """Examples of the gallery with this overlay."""
    return [example for example in examples() for lane in example["lanes"] if [name] == [
        extra for extra, _ in lane.get("extras", []) if extra == name]]


def test_every_overlay_that_a_bundled_model_has_the_parts_for_has_an_example():
    assert {name for name in OVERLAYS if not shown(name)} == NOT_BUNDLED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pointer", "pawn", "ast_probe"])
def test_what_an_example_says_of_its_overlay_is_true_of_its_run(name, monkeypatch):
    monkeypatch.undo()  # the bundled fits, in place of random weights
    example = shown(name)[0]
    lanes = [LaneConfig(lane["strategy"], lane.get("knobs", {}), lane["extras"]) for lane in example["lanes"]]
    prompt = Prompt(example["prompt"], chat=example["mode"] == "chat")
    session = prepare(playground.load(None, playground.NO_DRAFT), lanes, prompt, Limits(0, example["length"]))
    deque(session, maxlen=0)
    drawn = [{figure.name: figure.data for figure in events_of(session, lane) if isinstance(figure, Figure)}
             for lane in range(len(lanes))]
    notes = [" ".join(event.text for event in events_of(session, lane) if isinstance(event, Note))
             for lane in range(len(lanes))]
    SAID[name](session, drawn, notes)


def copied_name(session, drawn, notes) -> None:
    """The new name is pointed at, and so is most of the text."""
    (counted,), (pieces,) = drawn, [[piece for event in events_of(session) if isinstance(event, Commit)
                                     for piece in event.pieces]]
    labels = {at: label for at, _, label, _ in counted["largest attention to earlier occurrences"]["spans"]}
    at = len("".join(pieces).partition("Garolm")[0])
    name = next(number for number in range(len(pieces)) if len("".join(pieces[:number + 1])) > at)
    assert labels[name].startswith("copied")
    assert counted["tokens"]["values"][0] > len(pieces) / 2


def one_score_for_both(session, drawn, notes) -> None:
    """The detector gives both lanes one score, and their mean log-probabilities are two nats apart."""
    scores = [re.search(r"PAWN gives this text ([\d.]+)", note)[1] for note in notes]
    plain = [each["scores without training, nats"]["values"][0] for each in drawn]
    assert scores[0] == scores[1] == "1.00" and plain[0] > plain[1] + 2


def most_of_the_tree(session, drawn, notes) -> None:
    """A tree is drawn to the last line, most of it right, and the controls stand beside its score."""
    (figures,) = drawn
    labels, tree = (figures["syntax tree as read; 1: so in the program"][part] for part in ("labels", "values"))
    assert "Return: return sum ( items )" in labels
    scores = figures["F1 of trees of held-out programs"]["values"]
    assert len(tree) > 20 and sum(tree) / len(tree) > 0.6 and scores[0] > max(scores[1:]) + 0.1


SAID = {"pointer": copied_name, "pawn": one_score_for_both, "ast_probe": most_of_the_tree}
