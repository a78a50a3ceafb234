"""The page of prompts that repair compressed lanes. Imports neither torch nor gradio."""
from __future__ import annotations

from statistics import fmean
from typing import Any

from playground.bench.report_text import Rows, facts_table, markdown_page, number, section

FORMAT, VERSION = "decoding-playground-repair", 1
NONE, OWN, OTHER = "none", "chosen", "chosen, of the loaded model"
WAYS: dict[str, dict[str, Any]] = {
    NONE: {},
    OWN: {},
    "chosen, each before the text": {"mode": "separate"},
    "the first": {"only": 1},
    "the last": {"only": 8},
    OTHER: {},
}
AIM = 1 / 3  # of what compression costs
LOADED = "none"
COMMAND = "python -m playground bench repair --page docs/weights-repair.md"
INTRODUCTION = (
    "# Prompts for compressed lanes",
    "`idp` puts learnt vectors before the text of a lane with compressed weights. Do they give back what compression "
    "cost, or do they teach the model the texts that they were trained on, as they would teach the model that is not "
    "compressed? So the same prompts, trained in the same way, stand before the loaded model as well. Written by `"
    + COMMAND + "`, from prompts that `python -m playground fit idp --quantization rtn:bits=3` trains.",
)
NOTES = (
    "*Questions* and *answers*: loss of their tokens, in nats per token, over held-out questions of all tasks of the "
    "small world with their known answers; prompts were trained on both. *KL*: from the loaded model without prompts, "
    "over the tokens of answers. *Score*: mean over the tasks, of answers that a greedy lane writes. *Prompts*: which "
    "of the prompts of 8 and of 16 vectors stands before the text: chosen by the attention of the first layer, or "
    "always the same; `of the loaded model` are those trained for the model that is not compressed.",
)
RECOVERED = (
    "*By itself*: how much of the cost of compression the chosen prompt gives back, as if the loaded model had none: "
    "more than 100 % would be better than the loaded model. *Beside its control*: how much smaller the distance to "
    "the loaded model is if both have the prompts trained for them; this is repair, the rest is learning the texts. "
    "A negative share is a loss.",
)


def table(rows: list[dict[str, Any]]) -> Rows:
    """A line for each row of the measurement, header first."""
    return [["weights", "prompts", "questions", "answers", "KL", "score"],
            *([f"`{row['weights']}`" if row["weights"] != LOADED else "loaded", row["prompts"],
               *(number(row[name], 4) for name in ("questions", "answers", "KL")), number(_score(row), 3)]
              for row in rows)]


def shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By weights and measure, what compression costs and the shares of it that prompts give back."""
    found = []
    for weights in dict.fromkeys(row["weights"] for row in rows if row["weights"] != LOADED):
        for name in ("questions", "answers", "KL", "score"):
            before, after, loaded, control = (
                _value(_row(rows, *which), name)
                for which in ((weights, NONE), (weights, OWN), (LOADED, NONE), (LOADED, OWN))
            )
            if None in (before, after, loaded, control):
                continue
            cost = before - loaded
            found.append({"weights": weights, "measure": name, "cost": cost,
                          "by itself": (before - after) / cost if cost else None,
                          "beside its control": 1 - (after - control) / cost if cost and name != "KL" else None})
    return found


def share_table(rows: list[dict[str, Any]]) -> Rows:
    return [["weights", "measure", "cost", "by itself", "beside its control"],
            *([f"`{row['weights']}`", row["measure"], number(row["cost"], 4), _percent(row["by itself"]),
               _percent(row["beside its control"])] for row in shares(rows))]


def verdict(rows: list[dict[str, Any]]) -> str:
    """Which of the shares reach the aim, in words."""
    each = []
    for row in shares(rows):
        said = [f"{_percent(row[way])} {way}" for way in ("by itself", "beside its control") if row[way] is not None]
        reached = all(row[way] >= AIM for way in ("by itself", "beside its control") if row[way] is not None)
        each.append(f"`{row['weights']}`, {row['measure']}: {' and '.join(said) or 'nothing was lost'}"
                    + (", " + ("reached" if reached else "missed") if said else ""))
    return f"Aim: at least a third of what three bits cost, both ways of counting. {'; '.join(each)}."


def document(facts: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, **facts, "rows": rows, "recovered": shares(rows)}


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    return markdown_page(*INTRODUCTION, section("Recovered", share_table(rows), *RECOVERED, verdict(rows)),
                         section("Losses and scores", table(rows), *NOTES), facts_table(facts))


def _row(rows: list[dict[str, Any]], weights: str, prompts: str) -> dict[str, Any]:
    return next((row for row in rows if (row["weights"], row["prompts"]) == (weights, prompts)), {})


def _value(row: dict[str, Any], name: str) -> Any:
    """The lower the better: a score counts as what is missing to 1."""
    if name == "score":
        score = _score(row)
        return None if score is None else 1 - score
    return row.get(name)


def _score(row: dict[str, Any]) -> float | None:
    return fmean(row["scores"].values()) if row.get("scores") else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
