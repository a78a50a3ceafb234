"""Monitors: after a dot only attributes of the value, in any tokenisation; everywhere else scores are
unchanged.
"""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from tables import TableModel, watch, write

from playground.contract import make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.constrained import monitors
from strategies.constrained.monitors import PART, Spelling

PIECES = [
    "ba",
    "balance",
    "balance(",
    "balanse",
    "lance",
    "b",
    "(",
    ".",
    "get",
    "_all",
    "get_all",
    "getX",
    "X",
    "_",
    "e",
    "t",
    "x",
    "\n",
    "a",
    "l",
    "n",
    "c",
    "s",
    "größe",
    "gr",
    "ö",
    "ße",
    " ",
    "#",
    ").",
    "balance.",
    "deposit(1)",
    ".ba",
    "$",
]
ENDS = "$"
NAMES = ("balance", "get", "get_all", "größe")

COLLAPSES = {
    "monitors": [
        Collapse(LaneConfig("greedy", {}, [("monitors", {"mask": "soft", "nats": 0})]), LaneConfig("greedy")),
        # letters without a dot
        Collapse(LaneConfig("sample", {}, [("monitors", {})]), LaneConfig("sample")),
    ]
}


@pytest.fixture
def knows(monkeypatch):
    """An analysis that gives every program the same names, or None; returns what sets them, and the list of programs
    it was asked about.
    """
    def teach(names) -> list[str]:
        asked: list[str] = []

        def answer(program, below, seconds, task=None) -> list[str] | None:
            asked.extend([program] if program else [])  # an empty one only starts the process
            return names and list(names)

        monkeypatch.setattr(monitors, "attributes", answer)
        return asked
    return teach


def spelled() -> list[bytes]:
    return [b"" if piece in ENDS else piece.encode() for piece in PIECES]


def may_follow(token: int, rests: list[bytes]) -> bool:
    """The definition, token by token."""
    text = spelled()[token]
    if not text:
        return b"" in rests
    return any(rest.startswith(text) or text.startswith(rest) and text[len(rest)] not in PART for rest in rests)


def legal_after(rests: list[bytes], spelling=Spelling) -> set[int]:
    made = spelling(spelled(), frozenset([PIECES.index(ENDS)]))
    return {token for rest in rests for token in made.legal(rest)}


RESTS = [[name.encode()[cut:]] for name in NAMES for cut in range(len(name.encode()) + 1)] + [
    [b"", b"_all"], [b"e", b"balance"], [name.encode() for name in NAMES]]


@pytest.mark.oracle("monitors")
@pytest.mark.parametrize("rests", RESTS, ids=str)
def test_the_mask_equals_its_definition_over_the_whole_vocabulary(rests):
    assert legal_after(rests) == {token for token in range(len(PIECES)) if may_follow(token, rests)}


class NeverPastTheName(Spelling):
    """Ignores that a token may hold the end of a name and what follows."""

    def legal(self, rest):
        return [token for token in super().legal(rest) if not rest or rest.startswith(self.spelled[token])]


class AnythingPastTheName(Spelling):
    """Ignores that what follows a name must not continue it."""

    def legal(self, rest):
        return [
            token
            for token, text in enumerate(self.spelled)
            if rest and (rest.startswith(text) or text.startswith(rest))
        ] or super().legal(rest)


class AlwaysOpenEnd(Spelling):
    """Lets a text end in the middle of a name."""

    def legal(self, rest):
        return [*super().legal(rest), PIECES.index(ENDS)]


@pytest.mark.refuses("monitors")
@pytest.mark.parametrize("wrong", [NeverPastTheName, AnythingPastTheName, AlwaysOpenEnd])
def test_a_mask_that_is_wrong_differs_from_the_definition(wrong):
    assert any(
        legal_after(rests, wrong) != {token for token in range(len(PIECES)) if may_follow(token, rests)}
        for rests in RESTS
    )


# --- a model that prefers missing names ---

def wanting(*wishes: str) -> TableModel:
    """Scores that always prefer these pieces, the first the most."""
    row = torch.zeros(len(PIECES), dtype=torch.float64)
    for rank, wish in enumerate(reversed(wishes), 1):
        row[PIECES.index(wish)] = rank
    return TableModel(PIECES, ends=ENDS, rule=lambda context: row)


def tokens(text: str) -> list[int]:
    found = []
    while text:
        piece = max((piece for piece in PIECES if text.startswith(piece)), key=len)
        found.append(PIECES.index(piece))
        text = text[len(piece):]
    return found


def text(model: TableModel, prompt: str, length: int = 6, decoder: str = "greedy", **knobs) -> str:
    config = LaneConfig(
        decoder, {}, [("monitors", knobs), *([("temperature", {})] if decoder == "speculative" else [])]
    )
    return (
        prompt
        + write(
            assemble(config),
            {"target": model, "draft": TableModel(PIECES, ends=ENDS, seed=5)},
            tokens(prompt),
            Limits(1, length),
            Draws(1),
        ).text
    )


@pytest.mark.parametrize(
    "wishes, begins",
    [
        (["balanse", "b", "X", "a", "l"], "x.bal"),
        (["balanse", "balance("], "x.balance("),
        (["balanse", "getX", "get", "X", "("], "x.get("),
        (["get", "_", "X", "_all", "("], "x.get_all("),
        (["getX", "ße", "gr", "ö"], "x.größe"),
    ],
)
def test_a_missing_attribute_is_replaced_by_an_existing_one_in_any_tokenisation(knows, wishes, begins):
    knows(NAMES)
    assert text(wanting(*wishes), "x.").startswith(begins)


@pytest.mark.parametrize("decoder", ["greedy", "speculative", "sample"])
@pytest.mark.parametrize("seed", range(4))
def test_every_decoder_writes_existing_names_only(knows, decoder, seed):
    knows(NAMES)
    written = text(TableModel(PIECES, ends=ENDS, seed=seed), "x.", 12, decoder)
    name = monitors.re.match(r"x\.(\w+)", written)[1]
    assert name in NAMES or any(known.startswith(name) for known in NAMES) and written == f"x.{name}"


def test_a_text_may_end_only_after_a_whole_name(knows):
    knows(NAMES)
    assert text(wanting("$", "ba", "lance"), "x.") == "x.balance"


def test_a_single_name_is_forced_and_then_all_tokens_are_allowed(knows):
    knows(["balance"])
    assert text(wanting("X", "ba", "lance", "("), "x.", 4) == "x.balance(X"


def test_an_attribute_chain_is_followed_with_one_analysis_per_dot(knows):
    asked = knows(["balance", "deposit"])
    assert text(wanting("balanse", "balance."), "x.", 3) == "x.balance.balance.balance."
    assert asked == ["x.", "x.balance.", "x.balance.balance."]


def test_a_prompt_may_end_inside_a_name(knows):
    asked = knows(NAMES)
    assert text(wanting("X", "lance"), "x.ba", 1) == "x.balance" and asked == ["x."]


@pytest.mark.parametrize("prompt", ["x", "x.balance(", "x #", "x.\n"])
def test_outside_names_after_a_dot_scores_are_unchanged(knows, prompt):
    knows(NAMES)
    assert untouched(prompt)


def test_if_the_analysis_finds_nothing_scores_are_unchanged(knows):
    knows([])
    assert untouched("x.") and text(wanting("balanse"), "x.", 1) == "x.balanse"


def untouched(prompt: str) -> bool:
    scores = torch.randn(1, len(PIECES), generator=torch.Generator().manual_seed(0))
    return masked(prompt, scores) is scores


def masked(prompt: str, scores: torch.Tensor, **knobs) -> torch.Tensor:
    """The scores after a prompt, as a lane computes them."""
    return consulted(monitor(prompt, **knobs), prompt).apply(scores, [tokens(prompt)])


def consulted(made, prompt: str):
    if consultation := made.consult([tokens(prompt)]):
        consultation.work()
    return made


def monitor(prompt: str, **knobs):
    """A monitor with its lane."""
    lane = next(
        watch(
            assemble(LaneConfig("greedy", {}, [("monitors", knobs)])),
            {"target": TableModel(PIECES, ends=ENDS)},
            tokens(prompt),
            Limits(),
            Draws(0),
        )
    )
    return lane.assembly.samplers[0]


def test_a_soft_mask_subtracts_a_constant_from_all_unlisted_tokens(knows):
    knows(NAMES)
    scores = torch.randn(1, len(PIECES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fallen = (scores - masked("x.", scores, mask="soft", nats=3))[0]
    wanted = [0.0 if may_follow(token, [name.encode() for name in NAMES]) else 3.0 for token in range(len(PIECES))]
    assert fallen.tolist() == pytest.approx(wanted)


def test_if_a_grammar_removed_every_name_the_row_is_unchanged(knows):
    knows(["balance"])
    scores = torch.full((1, len(PIECES)), float("-inf"))
    scores[0, PIECES.index("X")] = 1.0
    assert torch.equal(masked("x.", scores), scores)


@pytest.mark.parametrize(
    "underscores, names", [("none", {"balance"}), ("own", {"balance", "_all"}), ("all", {"balance", "_all", "_get"})]
)
def test_private_names_are_offered_on_request(knows, underscores, names):
    made = monitor("x", underscores=underscores)
    made.known["_all = 1\nx."] = ["balance", "_all", "_get"]
    assert set(made._names("_all = 1\nx.")) == names


@pytest.mark.parametrize(
    "history, program",
    [
        ("x.", "x."),
        ("x.ba", "x."),
        ("a$x.", "x."),
        ("balance.a$x.b", "x."),
        ("x.\n```py\nx.", "x."),
        ("x.\n```py\nx.\n```\nb.", ""),
    ],
)
def test_the_program_is_what_follows_the_last_special_token_or_in_an_open_fence(history, program, monkeypatch):
    monkeypatch.setattr("test_strategies_monitors.PIECES", [*PIECES, "```", "p", "y"])
    assert monitor("x")._program(tokens(history)) == program


# --- events ---

def recorded(prompt: str, wishes: list[str], token: str):
    made, row = consulted(monitor(prompt), prompt), wanting(*wishes).scores(())
    return list(made.explain(row, tokens(prompt), PIECES.index(token)))


def test_names_are_reported_with_their_probabilities_and_the_models_argmax(knows):
    knows(["balance", "get"])
    figure, note = recorded("x.", ["balanse", "get"], "get")
    p = wanting("balanse", "get").scores(()).softmax(0)
    odds = {
        name: float(sum(p[token] for token in range(len(PIECES)) if may_follow(token, [name.encode()])))
        for name in ("balance", "get")
    }
    assert isinstance(figure, Figure) and dict(zip(figure.data["labels"], figure.data["values"])) == pytest.approx(odds)
    assert "2 names" in note.text and "'balanse'" in note.text and "it got 'get'" in note.text


def test_an_empty_analysis_is_reported_at_the_dot_only(knows):
    knows([])
    assert (
        [type(event) for event in recorded("x.", ["b"], "b")] == [Note]
        and recorded("x.b", ["a"], "a") == []
        and recorded("x", ["a"], "a") == []
    )


def test_an_analysis_that_failed_is_reported_as_such(knows):
    knows(None)
    (note,) = recorded("x.", ["b"], "b")
    assert "took too long" in note.text and untouched("x.")


def test_without_the_library_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jedi", None)
    with pytest.raises(Refusal, match="pip install"):
        next(make("monitors").prepare(None))
