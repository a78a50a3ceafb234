"""Validation of lanes: knobs are parsed as people write them, and invalid combinations are refused in one sentence."""
from __future__ import annotations

import pytest
from registry import registered

from playground.contract import Decoder, Drafter, Knob, Strategy, base, find, knob, make, slot
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal

Kind = type


def refused(strategy: str, *extras: str | tuple[str, dict], **knobs) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        assemble(LaneConfig(strategy, knobs, [(extra, {}) if isinstance(extra, str) else extra for extra in extras]))
    return refusal.value


# --- refusals ---

@pytest.mark.parametrize(
    "config, sentence, about",
    [
        (("gredy",), "There is no strategy named 'gredy'. Did you mean greedy", "gredy"),
        (("zzzz",), "There is no strategy named 'zzzz'. `python -m playground list` shows them all.", "zzzz"),
        (("greedy", "tok_p"), "There is no strategy named 'tok_p'. Did you mean top_p", "tok_p"),
        (
            ("top_p",),
            "Top-p (nucleus) is a sampler, not a decoder: add it to one that takes it, such as Greedy.",
            "top_p",
        ),
        (("sink_window",), "Attention sinks + window is a cache policy, not a decoder", "sink_window"),
        (
            ("greedy", "prompt_lookup"),
            "Greedy has no slot for Prompt lookup, a drafter: add it to one that takes it, such as Speculative decod",
            "prompt_lookup",
        ),
        (("greedy", "rejection"), "Greedy has no slot for Rejection sampling, a verifier", "rejection"),
        (("greedy", "sample"), "Greedy has no slot for Sampling, a decoder: choose it as the decoder of a", "sample"),
        (("greedy", "top_k", "top_k"), "Top-k is in this lane already", "top_k"),
        (
            ("sample", "top_k"),
            "Top-k is in this lane already, added or included by Sampling: remove one.",
            "top_k",
        ),
        (("greedy", "choice", "regex"), "A lane has one constraint: choose Choice list or Regular", "regex"),
        (("greedy", "sink_window", "sink_window"), "A lane has one cache policy", "sink_window"),
        (
            ("speculative", "prompt_lookup", "draft_model"),
            "Speculative decoding takes one drafter; Draft model is one too many: remove one.",
            "draft_model",
        ),
        (
            ("speculative", "rejection", "greedy_match"),
            "Speculative decoding takes one verifier; Greedy match is one too many: remove one.",
            "greedy_match",
        ),
        (
            ("speculative", "greedy_match", "top_k"),
            "Greedy match is exact only for greedy decoding",
            "greedy_match",
        ),
        (("greedy", ("top_k", {"p": 1})), "top_k has no knob 'p'; its knobs are k.", "p"),
        (("greedy", ("top_k", {"kk": 1})), "top_k has no knob 'kk'; did you mean k?", "kk"),
        (("greedy", ("top_k", {"name": 1})), "top_k has no knob 'name'", "name"),
        (("greedy", ("top_k", {"k": "many"})), "K must be a whole number, not 'many'.", "k"),
        (("greedy", ("top_k", {"k": 2.5})), "K must be a whole number, not 2.5.", "k"),
        (("greedy", ("top_k", {"k": -1})), "K must be between 0 and 1000, not -1.", "k"),
        (("greedy", ("top_p", {"p": "nan"})), "P must be between 0.0 and 1.0, not nan.", "p"),
        (("greedy", ("top_p", {"p": float("inf")})), "P must be between 0.0 and 1.0, not inf.", "p"),
        (
            ("speculative", ("prompt_lookup", {"occurrence": "last"})),
            "Occurrence must be one of earliest, latest, not 'last'.",
            "occurrence",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_configs_are_refused_in_one_sentence(config, sentence, about):
    strategy, *extras = config
    refusal = refused(strategy, *extras)
    assert str(refusal).startswith(sentence) and refusal.about == about
    assert "\n" not in str(refusal)


def test_a_decoders_own_knobs_are_validated_too():
    assert str(refused("greedy", speed=3)) == "greedy has no knob 'speed'; it has none."
    assert str(refused("sample", temperature=9)) == "Temperature must be between 0.0 and 5.0, not 9."
    assert str(refused("greedy", name="x")) == "greedy has no knob 'name'; it has none."


def test_a_slot_is_filled_by_name_as_well():
    decoder = assemble(LaneConfig("speculative", {"drafter": "prompt_lookup"})).decoder
    assert (decoder.drafter.name, decoder.verifier.name) == ("prompt_lookup", "rejection")


def test_a_slot_is_filled_once_and_by_its_own_kind():
    assert (
        str(refused("speculative", "prompt_lookup", drafter="draft_model"))
        == "Speculative decoding takes one drafter; Prompt lookup is one too many: remove one."
    )
    assert str(refused("speculative", drafter="top_k")) == "drafter takes a drafter, and top_k is a sampler."
    assert str(refused("speculative", drafter="nobody")).startswith("There is no strategy named 'nobody'.")
    assert str(refused("speculative", drafter=3)).startswith("There is no strategy named '3'.")


# --- assembly ---

def test_a_lane_is_its_decoder_its_fillings_its_samplers_and_its_toggles():
    assembly = assemble(
        LaneConfig(
            "speculative", {}, [("choice", {}), ("top_k", {"k": "7"}), ("sink_window", {}), ("prompt_lookup", {})]
        )
    )
    assert [part.name for part in assembly.parts()] == [
        "speculative",
        "prompt_lookup",
        "rejection",
        "top_k",
        "choice",
        "sink_window",
    ]
    assert next(part.knobs for part in assembly.parts() if part.name == "top_k") == {"k": 7}


def test_a_lane_needs_only_what_it_uses():
    assert assemble(LaneConfig("speculative")).needs() == {"draft"}
    assert assemble(LaneConfig("speculative", {}, [("prompt_lookup", {})])).needs() == set()


def test_a_config_creates_new_strategies_each_time():
    config = LaneConfig("speculative", {}, [("top_k", {})])
    first, second = assemble(config), assemble(config)
    assert first.samplers[0] is not second.samplers[0] and first.decoder.drafter is not second.decoder.drafter


def test_the_guarantees_of_a_lane_are_those_of_its_decoder_and_toggles():
    assert assemble(LaneConfig("speculative", {}, [("choice", {})])).guarantee() == [
        "greedy_identical",
        "distribution_identical",
        "constraint_sound",
    ]


T08 = ("temperature", {"t": 0.8})
SPECULATIVE = [("draft_model", {}), ("rejection", {})]


@pytest.mark.parametrize("config, claimed", [
    (LaneConfig("greedy"), ["greedy_identical"]),
    (LaneConfig("sample", {"temperature": 0.8, "top_p": 0.9}), []),
    (LaneConfig("greedy", {}, [T08]), []),
    (LaneConfig("greedy", {}, [("repetition_penalty", {})]), []),
    (LaneConfig("speculative", {}, SPECULATIVE), ["greedy_identical"]),
    (LaneConfig("speculative", {}, [*SPECULATIVE, T08]), ["distribution_identical"]),
    (LaneConfig("beam_search"), []),
], ids=lambda value: "" if isinstance(value, list) else f"{value.strategy}{len(value.extras)}")
def test_a_lane_is_greedy_identical_or_distribution_preserving_or_neither(config, claimed):
    same = ("greedy_identical", "distribution_identical")
    assert [claim for claim in assemble(config).claims() if claim in same] == claimed


def test_a_cache_policy_by_path_keeps_lossless_lanes_lossless_unless_a_compute_policy_leaves_layers_out():
    assert "greedy_identical" in assemble(LaneConfig("speculative", {}, [("h2o", {})])).guarantee()
    beside = assemble(LaneConfig("speculative", {}, [("h2o", {}), ("stop_exit", {})]))
    assert "greedy_identical" not in beside.guarantee() and "heuristic" in beside.guarantee()


# --- knobs ---

def knob_of(kind: type, default, **meta) -> Knob:
    low, high = meta.get("low"), meta.get("high")
    return Knob("it", kind, default, low, high, None, "", meta.get("choices", ()), False, False)


@pytest.mark.parametrize(
    "kind, written, read",
    [
        (int, "3", 3),
        (int, 3.0, 3),
        (int, " 4 ", 4),
        (float, "0.5", 0.5),
        (float, 1, 1.0),
        (float, "1e-3", 0.001),
        (bool, "yes", True),
        (bool, "False", False),
        (bool, "0", False),
        (bool, True, True),
        (bool, 0, False),
        (str, "a|b", "a|b"),
        (str, "", ""),
    ],
)
def test_a_knob_parses_text(kind, written, read):
    found = knob_of(kind, read).read(written)
    assert found == read and type(found) is kind


@pytest.mark.parametrize(
    "kind, written",
    [
        (int, "3.5"),
        (int, ""),
        (int, None),
        (int, [1]),
        (int, float("nan")),
        (int, float("inf")),
        (float, "much"),
        (float, "nan"),
        (float, None),
        (float, {}),
        (bool, "maybe"),
        (bool, ""),
    ],
)
def test_a_knob_refuses_invalid_text(kind, written):
    with pytest.raises(Refusal) as refusal:
        knob_of(kind, 0, low=0, high=9).read(written)
    assert refusal.value.about == "it"


def test_a_knob_with_choices_takes_one_of_them():
    assert knob_of(str, "a", choices=("a", "b")).read("b") == "b"
    with pytest.raises(Refusal, match="It must be one of a, b, not 'c'."):
        knob_of(str, "a", choices=("a", "b")).read("c")


@pytest.mark.parametrize("cls", registered(), ids=lambda cls: cls.name)
def test_both_ends_of_every_knob_can_be_set_and_nothing_beyond(cls):
    for each in cls.knobs():
        if each.min is None or each.max is None:
            continue
        for inside in (each.min, each.max, str(each.min), str(each.max)):
            assert each.read(inside) == float(inside)
            assert made_or_refused(cls.name, {each.name: inside})
        for outside in (each.min - 1, each.max + 1):
            with pytest.raises(Refusal):
                make(cls.name, **{each.name: outside})


def made_or_refused(name: str, knobs: dict) -> bool:
    """Contradicting knobs are refused, with a sentence that says what to change."""
    try:
        return make(name, **knobs).values().keys() >= knobs.keys()
    except Refusal as refusal:
        return find(name).check is not Strategy.check and str(refusal).endswith(".")


# --- the registry ---

def test_a_class_without_a_name_is_not_registered():
    class Nameless(Decoder):
        depth: int = knob(3, 0, 5, help="how deep")

    with pytest.raises(Refusal):
        find("")
    assert Nameless(depth=4).values() == {"depth": 4}


def test_a_name_is_taken_once():
    with pytest.raises(TypeError, match="strategy name 'greedy' is taken by strategies.sampling.greedy"):
        class Again(Decoder):
            name = "greedy"


@pytest.mark.parametrize("field, value", [("guarantee", ("perfect",)), ("needs", ("luck",))])
def test_an_unknown_guarantee_or_need_is_an_error(field, value):
    with pytest.raises(TypeError, match=value[0]):
        type("Odd", (Decoder,), {"name": "odd", field: value})
    with pytest.raises(Refusal):
        find("odd")


@pytest.mark.parametrize("taken", ["values", "check", "decode"])
def test_a_knob_cannot_have_the_name_of_what_every_strategy_has(taken):
    field = {"__annotations__": {taken: "int"}, taken: knob(3, 0, 5, help="how many")}
    with pytest.raises(TypeError, match=f"rename its knob '{taken}'"):
        type("Odd", (Decoder,), {"name": "odd", **field})
    with pytest.raises(Refusal):
        find("odd")


def test_a_strategy_may_change_the_default_of_a_knob_that_it_inherits(monkeypatch):
    monkeypatch.setattr(base, "REGISTERED", {})  # the class is registered for this test only

    class Deep(Decoder):
        depth: int = knob(3, 0, 5, help="how deep")

    class Deeper(Deep):
        name = "deeper"

        depth: int = knob(4, 0, 5, help="how deep")

    assert Deeper().values() == {"depth": 4}


def test_knobs_and_slots_come_in_the_order_they_are_written():
    class Deep(Strategy):
        drafter: Drafter = slot("draft_model")
        second: float = knob(0.5, 0.0, 1.0, help="b")
        first: int = knob(1, 0, 3, help="a")

    assert [each.name for each in Deep.knobs()] == ["second", "first"] and Deep.slots() == {"drafter": "drafter"}
