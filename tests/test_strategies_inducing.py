"""Contrast with an induced stream: ICD, and LOL, which adds layers. Compared with an independent computation."""
from __future__ import annotations

import pytest
from registry import Collapse
from runs import alone, figures, random_rows, recorded, written
from tables import TableModel

from playground.algorithms.sampling import contrastive
from playground.contract import EarlyExit, make
from playground.contract.lane_config import LaneConfig
from playground.decoding.prompt import Prompt
from playground.events import Done
from support.contrasting import contrasted

GREEDY = LaneConfig("greedy")


COLLAPSES = {
    "icd": [Collapse(alone("icd", rho=1.0), GREEDY)],
    "lol": [
        Collapse(alone("lol", omega=0.0, gamma=-1.0), alone("icd")),
        Collapse(alone("lol", omega=0.0, gamma=-1.0, rho=0.3), alone("icd", rho=0.3)),
        Collapse(alone("lol", gamma=-1.0, layer=1.0), alone("icd")),
        Collapse(alone("lol", rho=1.0), GREEDY),
    ],
}


@pytest.mark.oracle("icd")
def test_the_contrast_equals_full_forwards_of_both_streams():
    for seed in range(5):
        model, text = TableModel("abcde", seed=seed), []
        for _ in range(10):
            p, a = (model.scores((*prompt, *text)).log_softmax(-1).tolist() for prompt in ([0, 1, 2], [3, 2]))
            text.append(contrasted(p, a, 0.1))
        assert written(alone("icd"), {"target": model}, [0, 1, 2], 10, other=[3, 2]) == text
    assert any(
        written(alone("icd"), {"target": TableModel("abcde", seed=s)}, [3, 2], 10, other=[0, 1, 2])
        != written(alone("icd"), {"target": TableModel("abcde", seed=s)}, [0, 1, 2], 10, other=[3, 2])
        for s in range(5)
    )


SAID = Prompt("The green bird")


@pytest.mark.parametrize("chat", [False, True])
def test_the_second_stream_has_the_instruction_before_the_question(chat):
    prompt = Prompt("The green bird", chat=chat, context="A bird.")
    whole = prompt.instructed("Sing.").whole()
    assert whole.endswith("Sing. The green bird" if chat else "Sing.\nThe green bird") and "A bird." in whole
    assert prompt.instructed("  ") == prompt


def test_the_instruction_changes_the_text_and_without_one_it_is_greedy():
    greedy = recorded(GREEDY, SAID)[0]
    assert recorded(alone("icd", instruction=""), SAID)[0] == greedy != recorded(alone("icd"), SAID)[0]
    for gamma in (-1.0, 0.0, 2.0):  # an empty instruction changes nothing, however it is amplified
        assert recorded(alone("lol", refocus="", gamma=gamma, omega=0.0), SAID)[0] == recorded(alone("icd"), SAID)[0]


@pytest.mark.oracle("lol")
def test_lol_sums_the_last_layer_the_lower_layer_and_the_truthfulness_contrast():
    lol = make("lol", omega=0.5, gamma=0.5, layer=0.75)
    own, induced = lol.inner(8, True)
    assert (own, induced) == (EarlyExit("target", 6), EarlyExit("induced", 6))
    rows = {name: random_rows(seed) for seed, name in enumerate(["target", "induced", "refocused", own, induced])}
    p, a, r, pl, al = (rows[name].log_softmax(-1) for name in ["target", "induced", "refocused", own, induced])
    expected, kept = 1.5 * r - 0.5 * p - a + 0.5 * (pl - al), contrastive.plausible(rows["target"], 0.1)
    assert (lol.mix(rows) - expected)[kept].abs().max() < 1e-4
    for wrong in (1.5 * r - 0.5 * p - a, 1.5 * r - 0.5 * p - a + 0.5 * (al - pl), r - a + 0.5 * (pl - al)):
        assert (lol.mix(rows) - wrong)[kept].abs().max() > 0.1


def test_samplers_that_read_different_layers_do_not_interfere():
    both = LaneConfig("greedy", {}, [("dola", {"layers": "low"}), ("lol", {"rho": 1.0})])
    _, events = recorded(both, SAID)
    assert isinstance(events[-1], Done)
    assert {
        label.split(":")[0]
        for data in figures(events, "first choice of each layer, by divergence")
        for label in data["labels"]
    } == {"layer 0"}
