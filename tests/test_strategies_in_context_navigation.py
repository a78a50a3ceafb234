"""Diverse answers by repeating the prompt with the answers found: against the procedure written out,
with every context recomputed.
"""
from __future__ import annotations

import math

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, Text, watch

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.events import Figure, Note
from strategies.sampling.in_context_navigation import CUE, ranks, winner
from strategies.sampling.in_context_navigation import lm_head_geometry as keys
from strategies.sampling.in_context_navigation.asked_prompts import LIST, WAYS
from support.search_runs import run

LETTERS, PROMPT = 'abcdefgh"', [0, 1]


def navigation(**knobs) -> LaneConfig:
    return LaneConfig("in_context_navigation", knobs)


COLLAPSES = {
    "in_context_navigation": [
        Collapse(navigation(n_run=1, n_tol=3), navigation(n_run=1, n_tol=3, navigate=False)),
        Collapse(navigation(n_run=1, n_tol=3, completion="navigated"), navigation(n_run=1, n_tol=3)),
        Collapse(navigation(n_run=3, navigate=False, completion="navigated"), navigation(n_run=3, navigate=False)),
        Collapse(navigation(task="ways", n_cot=1, path=9), navigation(task="ways", n_cot=1, path=9, navigate=False))],
}


def ordered(model: TableModel, context: list[int]) -> list[int]:
    scores = model.scores(tuple(context)).tolist()
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def greedily(model: TableModel, context: list[int], first: int, stop: str, longest: int) -> list[int]:
    text = [first]
    while len(text) < longest and stop not in model.letters[text[-1]]:
        text.append(ordered(model, [*context, *text])[0])
    return text


def listed(
    model: TableModel, runs: int, tol: int, navigate: bool = True, clean: bool = True, by: str = "strings"
) -> tuple[list[str], list[str]]:
    """Answers and first tokens, as specified; `by` says what makes two first tokens the same."""
    spell, answers, tried = model.tokens.encode, [], []
    for _ in range(runs):
        full = [*PROMPT, *spell(LIST.put(answers if navigate else []))]
        base = [*PROMPT, *spell(LIST.put([]))] if clean else full
        new = []
        for token in ordered(model, full):
            name = model.letters[token] if by == "strings" else model.letters[token].strip()
            if name not in tried and len(new) < tol:
                tried.append(name)
                new.append(token)
        texts = ["".join(model.letters[token] for token in greedily(model, base, first, '"', 6)) for first in new]
        answers = answers + [text.split('"')[0] for text in texts if '"' in text and text[0] != '"']
    return answers, tried


def figures(recorded, name: str) -> list[dict]:
    return [event.data for event in recorded.of(Figure) if event.name == name]


def answers_of(recorded) -> list[str]:
    shown = figures(recorded, "answers, and the query that found them")
    return [label.removesuffix(" (again)") for label in shown[-1]["labels"]] if shown else []


@pytest.mark.oracle("in_context_navigation")
@pytest.mark.parametrize("knobs", [{}, {"navigate": False}, {"completion": "navigated"}], ids=str)
def test_the_list_equals_the_algorithm_by_hand(knobs):
    book, others = {"navigate": knobs.get("navigate", True), "clean": "completion" not in knobs}, []
    for seed in range(8):
        model = TableModel(LETTERS, seed=seed)
        recorded = run(navigation(n_run=3, n_tol=2, longest=6, **knobs), model, PROMPT, 40)
        answers, _ = listed(model, 3, 2, **book)
        assert answers_of(recorded) == answers
        assert (
            recorded.lane.text == "".join(letter for letter in LIST.put(answers, open_one=False) if letter in LETTERS)
            or not answers
        )
        others.append(
            any(
                answers != listed(model, 3, 2, **wrong)[0]
                for wrong in ({**book, name: not value} for name, value in book.items())
            )
        )
    assert sum(others) > 4, "where all ways to ask give the same list, they are not recorded apart"


@pytest.mark.refuses("in_context_navigation")
@pytest.mark.parametrize("wrong", ["asks without the answers", "completes after the answers"])
def test_confusing_the_two_prompts_of_a_search_is_detected(wrong, monkeypatch):
    cls, one = find("in_context_navigation"), 0 if wrong.startswith("asks") else 1
    asked = cls._query_nodes

    def confused(self, *about):
        nodes = yield from asked(self, *about)
        return nodes and (nodes[one], nodes[one])

    monkeypatch.setattr(cls, "_query_nodes", confused)
    models = [TableModel(LETTERS, seed=seed) for seed in range(8)]
    wrongly = [answers_of(run(navigation(n_run=3, n_tol=2, longest=6), model, PROMPT, 40)) for model in models]
    assert sum(found != listed(model, 3, 2)[0] for found, model in zip(wrongly, models)) > 4


def test_navigation_changes_the_first_tokens_from_the_best_of_one_query():
    apart = 0
    for seed in range(8):
        model = TableModel(LETTERS, seed=seed)
        best = [model.letters[token] for token in ordered(model, [*PROMPT, *model.tokens.encode(LIST.put([]))])[:6]]
        walked, asked = (
            tried_of(run(navigation(n_run=3, n_tol=2, navigate=navigate), model, PROMPT, 40))
            for navigate in (False, True)
        )
        assert walked == best and asked[:2] == best[:2] and len(set(asked)) == len(asked)
        apart += asked != best
    assert apart > 4


def tried_of(recorded) -> list[str]:
    return [name for figure in figures(recorded, "ranks of the new first tokens") for name in figure["rows"]]


@pytest.mark.parametrize("strip", [False, True])
def test_first_tokens_are_distinct_as_text(strip):
    """Two tokens with equal text count once, and with `strip` also two that differ by a space."""
    letters = ["a", "a", " a", "b", '"']
    recorded = run(navigation(n_run=4, n_tol=2, navigate=False, strip=strip), TableModel(letters, seed=1), PROMPT, 20)
    tried = tried_of(recorded)
    assert sorted(name.strip() for name in tried) == (
        sorted(["a", "b", '"']) if strip else sorted(["a", "a", "b", '"'])
    )


def test_an_answer_without_a_closing_quote_is_discarded():
    model = TableModel("abcd", seed=2)
    recorded = run(navigation(n_run=2, n_tol=2, longest=5), model, PROMPT, 9)
    assert not answers_of(recorded) and "2 had no closing quote" in next(
        note.text for note in recorded.of(Note) if "Query 1" in note.text
    )
    assert list(recorded.texts()[0]) == greedily(model, PROMPT, ordered(model, PROMPT)[0], '"', 5)


def avoiding(context: Text) -> torch.Tensor:
    """A model that follows the instruction: letters already in the prompt are less likely."""
    scores = torch.linspace(2, 0, len(LETTERS), dtype=torch.float64)
    scores[-1] = 5.0 if len(context) > 3 and context[-1] < 8 else -5.0
    for token in set(context[len(PROMPT):-1]) - {8}:
        scores[token] -= 1.0
    return scores


@pytest.mark.parametrize("navigate", [True, False])
def test_the_figure_shows_the_query_moving_away_from_tried_tokens(navigate):
    recorded = run(navigation(n_run=3, n_tol=2, navigate=navigate), TableModel(LETTERS, rule=avoiding), PROMPT, 60)
    for name, further in (("rank", 1), ("score", -1)):
        means = [data["series"] for data in figures(recorded, f"mean {name} of first tokens tried before")]
        assert len(means) == 2
        for series in means:
            moved = further * (series["with answers"] - series["clean prompt"])
            assert moved > 0 if navigate else moved == 0


def test_known_answers_are_in_every_prompt_and_their_first_tokens_are_skipped():
    model = TableModel(LETTERS, seed=3)
    recorded = run(navigation(n_run=2, n_tol=2, known="ab\nca"), model, PROMPT, 60)
    assert answers_of(recorded)[:2] == ["ab", "ca"] and not {"a", "c"} & set(tried_of(recorded))
    best = [
        letter
        for letter in (
            model.letters[t] for t in ordered(model, [*PROMPT, *model.tokens.encode(LIST.put(["ab", "ca"]))])
        )
        if letter not in "ac"
    ]
    assert tried_of(recorded)[:2] == best[:2]


# --- lm_head rows ---

class Planted(TableModel):
    """The lm_head rows of a to c have one direction, all others different ones."""

    @property
    def lm_head_weights(self):
        keys = torch.eye(len(LETTERS), dtype=self.dtype)
        keys[1], keys[2] = 3 * keys[0], keys[0]
        return keys


def falling(context: Text) -> torch.Tensor:
    """Answers of one letter, the first letter being the best."""
    scores = torch.linspace(2, 0, len(LETTERS), dtype=torch.float64)
    scores[-1] = -5.0 if LETTERS[context[-1]] == '"' else 5.0
    return scores


def compared(recorded) -> list[list]:
    [figure] = [event.data for event in recorded.of(Figure) if ", by cluster" in event.name]
    return figure["values"]


def test_runner_up_tokens_are_compared_by_clusters_of_lm_head_rows():
    config = navigation(n_run=1, n_tol=1, longest=4, clusters=9, main=2, ranked=10, right="D\ne\nf\ng\nh")
    inside, elsewhere = compared(run(config, Planted(LETTERS, rule=falling), PROMPT, 30))
    assert inside == [1, 3.0, 0.0]
    assert elsewhere == [6, 6.5, pytest.approx(5 / 6)]
    assert (
        compared(
            run(navigation(n_run=1, n_tol=1, clusters=9, main=2, ranked=10), Planted(LETTERS, rule=falling), PROMPT, 30)
        )[1][2]
        is None
    )


LONG_AND_SHORT = torch.tensor([[1.0, 0.0], [1.0, 0.3], [0.0, 10.0], [1.0, 10.0]])


def test_lm_head_rows_are_compared_by_direction(monkeypatch):
    def groups():
        return keys.cluster_of(LONG_AND_SHORT, keys.clusters(LONG_AND_SHORT, 2)).tolist()

    assert groups() == [0, 0, 1, 1]
    monkeypatch.setattr(keys, "_unit", lambda rows: rows)
    assert groups() != [0, 0, 1, 1], "products with keys as they are go by length"


def test_if_all_clusters_are_main_ones_no_token_is_outside_them(monkeypatch):
    """If the clusters of all tokens count as main ones, the comparison is empty."""
    monkeypatch.setattr(keys.Atlas, "main", lambda atlas, count: set(atlas.cluster))
    assert compared(
        run(navigation(n_run=1, n_tol=1, clusters=9, main=2, ranked=10), Planted(LETTERS, rule=falling), PROMPT, 30)
    )[1] == [0, None, None]


def test_tokens_with_equal_lm_head_rows_have_equal_scores_and_one_cluster():
    model = pair("llama").target
    head, generator = model.lm_head_weights.clone(), torch.Generator().manual_seed(0)
    head[7] = head[3]
    states = torch.randn(5, model.width, generator=generator, dtype=head.dtype)
    scores, centres = states @ head.T, keys.clusters(head, 16)
    assert torch.equal(scores[:, 3], scores[:, 7])
    assert len(keys.cluster_of(head[[3, 7]], centres).unique()) == 1 < len(keys.cluster_of(head, centres).unique())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_logits_are_products_of_the_state_with_the_lm_head_rows(architecture):
    class Looks(Decoder):
        reads_hidden = ("target",)

        def decode(self, lm):
            rows = yield lm.prefill()
            found.append((rows.hidden @ lm.lm_head_weight.T, rows.raw))
            yield lm.keep(lm.pick(rows))

    found = []
    model = pair(architecture).target
    for _ in watch(Assembly(Looks()), {"target": model}, [54, 71, 9], Limits(0, 1), Draws(0)):
        pass
    [(products, raw)] = found
    assert torch.allclose(products.to(raw.dtype), raw, atol=1e-5)


def test_separated_groups_become_the_clusters():
    generator = torch.Generator().manual_seed(1)
    middles = torch.eye(8)[:4] * 5
    head = torch.cat([middle + 0.1 * torch.randn(20, 8, generator=generator) for middle in middles])
    groups = keys.cluster_of(head, keys.clusters(head, 4)).reshape(4, 20)
    assert all(len(set(group.tolist())) == 1 for group in groups) and len(set(groups[:, 0].tolist())) == 4


def test_the_projection_preserves_distances_and_queries_point_to_high_scores():
    generator = torch.Generator().manual_seed(2)
    flat, turn = (
        torch.randn(30, 2, generator=generator) * torch.tensor([3.0, 1.0]),
        torch.linalg.qr(torch.randn(8, 8, generator=generator)).Q,
    )
    head = flat @ turn[:2] + 1.0
    plane = keys.Plane.through(head)
    places = torch.tensor(plane.places(head))
    assert torch.allclose(torch.cdist(places, places), torch.cdist(flat, flat), atol=1e-3)
    query = turn[0] - 0.5 * turn[1]
    along = places @ torch.tensor(plane.arrow(query))
    assert torch.equal(along.argsort(), (head @ query).argsort())


@pytest.mark.parametrize("navigate", [True, False])
def test_the_figure_marks_tried_tokens_and_draws_an_arrow_per_query(navigate):
    recorded = run(navigation(n_run=3, n_tol=2, navigate=navigate), TableModel(LETTERS, rule=avoiding), PROMPT, 60)
    first, *queries = [event.data for event in recorded.of(Figure) if event.shape == "points"]
    assert sorted(point[2] for point in first["points"]) == sorted(LETTERS) and not any(
        point[4] for point in first["points"]
    )
    assert [point[2] for data in queries for point in data["points"] if point[4]] == tried_of(recorded)
    arrows = [tuple(data["path"][0]) for data in queries]
    assert [arrow[2] for arrow in arrows] == ["query 1", "query 2", "query 3"]
    assert len({arrow[:2] for arrow in arrows}) == (3 if navigate else 1)


def test_without_clusters_the_answers_are_the_same_and_no_figure_is_drawn():
    with_, without = (
        run(navigation(n_run=3, n_tol=2, clusters=clusters), TableModel(LETTERS, seed=4), PROMPT, 60)
        for clusters in (4, 0)
    )
    assert [event for event in with_.of(Figure) if event.shape == "points"] and not [
        event for event in without.of(Figure) if event.shape == "points"
    ]
    assert with_.texts() == without.texts() and answers_of(with_) == answers_of(without)


def test_no_figure_is_drawn_if_the_lm_head_is_no_plain_matrix(monkeypatch):
    monkeypatch.setattr(TableModel, "lm_head_weights", None)
    recorded = run(navigation(n_run=2, n_tol=2), TableModel(LETTERS, seed=4), PROMPT, 60)
    assert answers_of(recorded) and not [event for event in recorded.of(Figure) if event.shape == "points"]


# --- reasoning paths ---

DIGITS = 'ab12#"'


def voted(model: TableModel, count: int, path: int, cue: str = CUE) -> tuple[list[str], list[str]]:
    spell, ways, numbers, tried = model.tokens.encode, [], [], []
    clean = [*PROMPT, *spell(WAYS.put([]))]
    for _ in range(count):
        first = next(token for token in ordered(model, [*PROMPT, *spell(WAYS.put(ways))]) if token not in tried)
        tried.append(first)
        ways.append("".join(model.letters[token] for token in greedily(model, clean, first, "#", path)).split("#")[0])
        after = [*clean, *spell(f"{ways[-1]}\n{cue}")]
        said = "".join(
            model.letters[token] for token in greedily(model, after, ordered(model, after)[0], '"', 8)
        ).split('"')[0]
        numbers.append("".join(letter for letter in said if letter.isdigit()))
    return ways, numbers


@pytest.mark.parametrize("cue", [CUE, "b1"])
def test_paths_and_votes_equal_the_algorithm_by_hand(cue):
    outvoted = 0
    for seed in range(8):
        model = TableModel(DIGITS, seed=seed, context=2048)
        recorded = run(navigation(task="ways", n_cot=4, path=5, cue=cue), model, PROMPT, 500)
        ways, numbers = voted(model, 4, 5, cue)
        best = winner(numbers)
        expected = WAYS.put([]) + ways[best] + "\n" + cue + numbers[best] + '"'
        assert recorded.lane.text == "".join(letter for letter in expected if letter in DIGITS)
        outvoted += best > 0
    assert outvoted, "where the first way always wins, there was no vote"


def test_the_first_answer_with_most_votes_wins_and_paths_without_a_number_do_not_vote():
    assert (
        winner(["7", "8", "", "8"]) == 1
        and winner(["7", "8"]) == 0
        and winner(["", "", "5"]) == 2
        and winner(["", ""]) == 0
    )


# --- on networks ---

@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_after_the_search_rows_equal_those_of_a_plain_run(architecture):
    model, prompt = pair(architecture).target, [54, 71, 9]
    recorded = run(navigation(n_run=2, n_tol=3, longest=6), model, prompt, 24)
    text = recorded.texts()[0]
    assert text
    rows = model.forward([ForwardInput(model.new_store(), [*prompt, *text], list(range(-1, 2 + len(text))))])[0][
        0
    ].log_softmax(-1)
    assert recorded.lane.main.logprobs == pytest.approx(
        [float(rows[2 + i, token]) for i, token in enumerate(text)], abs=1e-5
    )


def test_ranks_start_at_one_and_ties_go_to_the_lower_id():
    assert ranks(torch.tensor([0.5, 2.0, 0.5, -1.0])) == [2, 1, 3, 4]
    assert math.isclose(sum(ranks(torch.randn(50, generator=torch.Generator().manual_seed(0)))), 50 * 51 / 2)
