"""Selection among samples, and superposed decoding."""
from __future__ import annotations

import pytest
from tables import TableModel, Text, distance, law

from support.search_runs import chosen_by_brute_force, entire, logp, of


@pytest.mark.oracle("best_of_n")
@pytest.mark.parametrize("score", ["mean", "sum"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_best_of_n_has_the_distribution_of_a_choice_among_independent_texts(score, n):
    model, prompt = TableModel("ab.", ".", seed=3), [0, 1]

    def choose(texts: list[Text]) -> Text:
        return max(
            entire(texts, model), key=lambda text: logp(model, prompt, text) / (len(text) if score == "mean" else 1)
        )

    ours = law(of("best_of_n", n=n, score=score, temperature=1.0), {"target": model}, prompt, 2)
    assert distance(ours, chosen_by_brute_force(model, prompt, 2, n, choose)) < 1e-9
