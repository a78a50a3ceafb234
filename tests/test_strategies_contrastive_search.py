"""Contrastive search, with every state recomputed by the library."""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from pairs import network, pair
from torch import Tensor

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Forward, Note
from support.lookahead_runs import contrastive, figures, run

# log-probabilities [V] after a text, and the states [tokens, width] of all of it
Sees = Callable[[list[int]], tuple[Tensor, Tensor]]


def searched(
    sees: Sees, text: list[int], length: int, k: int, alpha: float, ignored: int = 0, worth: Callable | None = None
) -> list[int]:
    """What contrastive search writes; the first `ignored` tokens do not count in the similarity."""
    text, start = list(text), len(text)
    for _ in range(length):
        logp, said = sees(text)
        candidates = logp.topk(k).indices.tolist()
        found = [
            contrast(sees([*text, token])[1][-1], said[ignored:], float(logp[token].exp()), alpha, worth)
            for token in candidates
        ]
        text.append(candidates[found.index(max(found))])
    return text[start:]


def contrast(new: Tensor, said: Tensor, p: float, alpha: float, worth: Callable | None) -> float:
    cosines = torch.cosine_similarity(new[None], said)
    return worth(p, cosines, alpha) if worth else (1 - alpha) * p - alpha * float(cosines.max())


@cache
def library_sees(architecture: str) -> Sees:
    library = network(architecture)

    @cache
    def sees(text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            found = library(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
        return found.logits[0, -1].log_softmax(-1), found.hidden_states[-1][0]

    return lambda text: sees(tuple(text))


PROMPT = [54, 71, 71, 9]


@pytest.mark.oracle("contrastive_search")
@pytest.mark.parametrize("k, alpha", [(4, 0.6), (3, 0.9), (5, 1.0)])
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_contrastive_search_chooses_by_the_librarys_hidden_states(architecture, k, alpha):
    lane, events = run(contrastive(k=k, alpha=alpha), {"target": pair(architecture).target}, PROMPT, 10)
    assert lane.main.written == searched(library_sees(architecture), PROMPT, 10, k, alpha)
    forwards = [event for event in events if isinstance(event, Forward)]
    assert [event.tokens for event in forwards if event.stream == "target"] == [4] + [k] * 10
    assert [event.tokens for event in forwards if event.stream != "target"] == [4]


WRONG_SEARCHES = {
    "the mean likeness in place of the largest": {
        "worth": lambda p, cosines, alpha: (1 - alpha) * p - alpha * float(cosines.mean())
    },
    "likeness as a reward": {"worth": lambda p, cosines, alpha: (1 - alpha) * p + alpha * float(cosines.max())},
    "log-probability in place of probability": {
        "worth": lambda p, cosines, alpha: (1 - alpha) * math.log(p) - alpha * float(cosines.max())
    },
    "the weights swapped": {"worth": lambda p, cosines, alpha: alpha * p - (1 - alpha) * float(cosines.max())},
    "a prompt that nobody looks back at": {"ignored": 2},
}


@pytest.mark.refuses("contrastive_search")
@pytest.mark.parametrize("wrong", WRONG_SEARCHES.values(), ids=WRONG_SEARCHES)
def test_a_wrong_search_changes_the_text(wrong):
    sees = library_sees("llama")
    prompts = [PROMPT, [9, 80, 71, 33, 71], [100, 101, 102], [60, 61, 60, 61, 60]]
    found = [
        run(contrastive(k=5, alpha=0.7), {"target": pair().target}, prompt, 4)[0].main.written for prompt in prompts
    ]
    assert found == [searched(sees, prompt, 4, 5, 0.7) for prompt in prompts]
    assert found != [searched(sees, prompt, 4, 5, 0.7, **wrong) for prompt in prompts]


def logs_for_probabilities(self, rows):
    tree, p = right_candidates(self, rows)
    return tree, p.log()


right_candidates = find("contrastive_search")._candidates
CONTRASTIVE = {
    "products in place of cosines": ("directions", lambda hidden: hidden),
    "log-probability in place of probability": ("ContrastiveSearch._candidates", logs_for_probabilities),
}


@pytest.mark.refuses("contrastive_search")
@pytest.mark.parametrize("part, wrong", CONTRASTIVE.values(), ids=CONTRASTIVE)
def test_a_wrong_contrastive_search_is_refused(part, wrong, monkeypatch):
    monkeypatch.setattr(f"strategies.sampling.contrastive_search.{part}", wrong)
    with pytest.raises(AssertionError):
        test_contrastive_search_chooses_by_the_librarys_hidden_states("llama", 4, 0.6)


def test_a_rejected_first_choice_is_reported_with_both_similarities():
    _, events = run(contrastive(k=4, alpha=0.9), {"target": pair().target}, PROMPT, 8)
    tables, notes = figures(events, "candidates"), [event.text for event in events if isinstance(event, Note)]
    overruled = [data for data in tables if max(data["values"], key=lambda row: row[2]) != data["values"][0]]
    assert len(tables) == 8 and len(notes) == len(overruled) > 0
    assert f"against {overruled[0]['values'][0][1]:.2f}" in notes[0]
    assert all(row[2] == pytest.approx(0.1 * row[0] - 0.9 * row[1]) for data in tables for row in data["values"])


def test_tokens_forced_by_a_grammar_count_in_the_similarity_too():
    config = LaneConfig("contrastive_search", {"k": 3}, [("regex", {"pattern": "(green|gray|blue){4}"})])
    session = prepare(pair(), [config], Prompt("The green bird"), Limits(0, 40))
    events = [stamped.event for stamped in session]
    reads = [event for event in events if isinstance(event, Forward) and event.stream == "reading"]
    assert len(reads) > 1 and [event.tokens for event in reads] == sorted(event.tokens for event in reads)
    assert all(-1.0001 <= row[1] <= 1.0001 for data in figures(events, "candidates") for row in data["values"])
