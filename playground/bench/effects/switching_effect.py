"""A small model writes most of a text while it is sure.

Big Little Decoder, Kim et al. 2023, arXiv 2302.07863, hands over before the token it is unsure of; Entropy Adaptive
Decoding, Simonds 2025, arXiv 2502.06833, after it.
"""
from __future__ import annotations

from collections.abc import Iterable

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import NEARLY, PLAIN, against, keeps, levels, of, score, value
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.questions import ask
from playground.bench.survey import Answer, Entrant
from playground.contract.lane_config import LaneConfig

ALONE, HALF = "draft alone", 0.5
CERTAIN, BITS = (0.5, 0.7, 0.9, 0.97), (0.1, 0.4, 1.6)  # probability of the best token; mean entropy
NEVER, EARLY = 20.0, 2.0  # surprise in nats from which a token is taken back; the authors name 2 to 5
TICKS = 10  # of the chart, for one forward a token
FAMILIES = {
    "bild": {f"bild below {p:g}": LaneConfig("bild", {"fallback": p, "rollback": NEVER}) for p in CERTAIN},
    "bild, taking back": {
        f"bild below {p:g}, taking back": LaneConfig("bild", {"fallback": p, "rollback": EARLY}) for p in CERTAIN
    },
    "ead": {f"ead above {bits:g} bits": LaneConfig("ead", {"threshold": bits, "start": "small"}) for bits in BITS},
}
SWITCHES = {name: recipe for family in FAMILIES.values() for name, recipe in family.items()}


def switching(count: int = 30, seed: int = 1) -> Effect:
    """A model that is asked only where the small one is unsure."""
    entrants = [
        Entrant(PLAIN, LaneConfig("greedy")),
        Entrant(ALONE, LaneConfig("ead", {"threshold": 8.0, "start": "small"})),
        *(Entrant(name, recipe) for name, recipe in SWITCHES.items()),
    ]
    questions = [question for task in ("arithmetic", "records", "context_qa") for question in ask(task, count, seed)]
    return Effect(
        "switching",
        "A decoder that switches between two models writes most tokens with the small one and scores nearly as the large one.",
        f"The switch that asks the target least while it loses at most {NEARLY} is chosen on every other question. On the questions between, it "
        f"asks the target for at most every second token, loses at most {NEARLY}, and beats the draft alone by more than {NEARLY}.",
        entrants,
        questions,
        260,
        shown,
        chart,
    )


def shown(answers: list[Answer]) -> EffectVerdict:
    chosen_on = [answer for answer in answers if answer.number % 2 == 0]
    tested_on = [answer for answer in answers if answer.number % 2]
    near = [name for name in SWITCHES if keeps(against(chosen_on, name, PLAIN))]
    if not near:
        return EffectVerdict(False, {f"{name} against {PLAIN}": against(answers, name, PLAIN) for name in SWITCHES})
    chosen = min(near, key=lambda name: asked(of(chosen_on, name)))
    share, loss, gain = (
        asked(of(tested_on, chosen)),
        against(tested_on, chosen, PLAIN),
        against(tested_on, chosen, ALONE),
    )
    holds = share <= HALF and keeps(loss) and gain is not None and gain.mean > NEARLY
    return EffectVerdict(
        holds,
        {
            f"{chosen}, target forwards a token": share,
            f"{chosen} against {PLAIN}": loss,
            f"{chosen} against {ALONE}": gain,
            PLAIN: score(tested_on, PLAIN),
            ALONE: score(tested_on, ALONE),
        },
    )


def asked(answers: Iterable[Answer]) -> float:
    """Forwards of the target for each token after the first; 1 where there is none."""
    good = [answer for answer in answers if not answer.failure]
    tokens = sum(len(answer.token_ids) - 1 for answer in good)
    return sum(answer.forwards.get("target", 0) for answer in good) / tokens if tokens else 1.0


def chart(answers: list[Answer]) -> Chart:
    """The score of each switch over what it asked of the target, from nothing to one forward a token."""
    series = {family: [value(score(answers, name)) for name in names] for family, names in FAMILIES.items()}
    at = {family: [TICKS * asked(of(answers, name)) for name in names] for family, names in FAMILIES.items()}
    ticks = [f"{tick / TICKS:g}" for tick in range(TICKS + 1)]
    return Chart(
        "Handing over", "target forwards a token", "score", ticks, series, levels(answers, (PLAIN, ALONE)), at=at
    )
