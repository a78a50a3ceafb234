"""A small model writes most of a text while it is sure. Entropy Adaptive Decoding, Simonds 2025, arXiv 2502.06833."""
from __future__ import annotations

from collections.abc import Iterable

from playground.bench.charts import Chart
from playground.bench.effects.effect import Effect, Verdict
from playground.bench.effects.reading import NEARLY, PLAIN, against, keeps, levels, of, score, value
from playground.bench.survey import Answer, Entrant
from playground.questions import ask
from playground.recipe import Recipe

THRESHOLDS = (0.1, 0.2, 0.4, 0.8, 1.6)  # bits
ALONE, HALF = "draft alone", 0.5


def switching(count: int = 30, seed: int = 1) -> Effect:
    """A model that is asked only where the small one is unsure."""
    entrants = [Entrant(PLAIN, Recipe("greedy")), Entrant(ALONE, Recipe("ead", {"threshold": 8.0, "start": "small"})),
                *(Entrant(switched(bits), Recipe("ead", {"threshold": bits, "start": "small"})) for bits in THRESHOLDS)]
    questions = [question for task in ("arithmetic", "records", "context_qa") for question in ask(task, count, seed)]
    return Effect(
        "switching", "A decoder that switches by entropy writes most tokens with the small model and scores nearly as the large one.",
        f"The threshold that asks the target least while it loses at most {NEARLY} is chosen on every other question. On the questions between, it "
        f"writes at most half of the tokens with the target, loses at most {NEARLY}, and beats the draft alone by more than {NEARLY}.",
        entrants, questions, 260, shown, chart)


def switched(bits: float) -> str:
    return f"ead, {bits:g} bits"


def shown(answers: list[Answer]) -> Verdict:
    chosen_on = [answer for answer in answers if answer.number % 2 == 0]
    tested_on = [answer for answer in answers if answer.number % 2]
    near = [name for name in map(switched, THRESHOLDS) if keeps(against(chosen_on, name, PLAIN))]
    if not near:
        return Verdict(False, {f"{name} against {PLAIN}": against(answers, name, PLAIN) for name in map(switched, THRESHOLDS)})
    chosen = min(near, key=lambda name: target_share(of(chosen_on, name)))
    share, loss, gain = target_share(of(tested_on, chosen)), against(tested_on, chosen, PLAIN), against(tested_on, chosen, ALONE)
    holds = share <= HALF and keeps(loss) and gain is not None and gain.mean > NEARLY
    return Verdict(holds, {f"{chosen}, share of tokens by the target": share, f"{chosen} against {PLAIN}": loss, f"{chosen} against {ALONE}": gain,
                           PLAIN: score(tested_on, PLAIN), ALONE: score(tested_on, ALONE)})


def target_share(answers: Iterable[Answer]) -> float:
    """Of all tokens, those that were chosen from a row of the target; 1 where nothing was written."""
    wrote = [answer.wrote for answer in answers if not answer.failure]
    whole = sum(sum(each.values()) for each in wrote)
    return sum(each.get("target", 0) for each in wrote) / whole if whole else 1.0


def chart(answers: list[Answer]) -> Chart:
    names = [switched(bits) for bits in THRESHOLDS]
    series = {"score": [value(score(answers, name)) for name in names], "tokens by the target": [(target_share(of(answers, name)), 0.0) for name in names]}
    return Chart("Entropy Adaptive Decoding", "threshold, bits", "share", [f"{bits:g}" for bits in THRESHOLDS], series, levels(answers, (PLAIN, ALONE)))
