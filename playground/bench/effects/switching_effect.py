"""A small model writes most of a text, as long as it is confident.

Big Little Decoder, Kim et al. 2023, arXiv 2302.07863, switches to the large model before the uncertain token; Entropy
Adaptive Decoding, Simonds 2025, arXiv 2502.06833, after it.
"""
from __future__ import annotations

from collections.abc import Iterable

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import (
    NEARLY,
    PLAIN,
    against,
    answers_of,
    levels,
    not_worse,
    score,
    value,
)
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.survey.survey import Answer, Entrant
from playground.lane_fields import LaneConfig
from playground.questions.questions import ask

ALONE, HALF = "draft alone", 0.5
CERTAIN, BITS = (0.5, 0.7, 0.9, 0.97), (0.1, 0.4, 1.6)  # probability of the best token; mean entropy
NEVER, EARLY = 20.0, 2.0  # surprisal in nats from which a token is rolled back; the authors use 2 to 5
TICKS = 10  # chart ticks up to one forward per token
FAMILIES = {
    "bild": {f"bild below {p:g}": LaneConfig("bild", {"fallback": p, "rollback": NEVER}) for p in CERTAIN},
    "bild, taking back": {
        f"bild below {p:g}, taking back": LaneConfig("bild", {"fallback": p, "rollback": EARLY}) for p in CERTAIN
    },
    "ead": {f"ead above {bits:g} bits": LaneConfig("ead", {"threshold": bits, "start": "small"}) for bits in BITS},
}
SWITCHES = {name: config for family in FAMILIES.values() for name, config in family.items()}


def switching(count: int = 30, seed: int = 1) -> Effect:
    """A large model that is used only if the small one is uncertain."""
    entrants = [
        Entrant(PLAIN, LaneConfig("greedy")),
        Entrant(ALONE, LaneConfig("ead", {"threshold": 8.0, "start": "small"})),
        *(Entrant(name, config) for name, config in SWITCHES.items()),
    ]
    questions = [question for task in ("arithmetic", "records", "context_qa") for question in ask(task, count, seed)]
    return Effect(
        "switching",
        "A decoder that switches between two models writes most tokens with the small one and scores nearly as well as "
        "the large one.",
        f"The setting with the fewest target forwards that loses at most {NEARLY} is chosen on every other question. "
        "On the remaining questions it takes at most one target forward per two tokens, loses at most "
        f"{NEARLY}, and beats the draft alone by more than {NEARLY}.",
        entrants,
        questions,
        260,
        shown,
        chart,
    )


def shown(answers: list[Answer]) -> EffectVerdict:
    chosen_on = [answer for answer in answers if answer.number % 2 == 0]
    tested_on = [answer for answer in answers if answer.number % 2]
    near = [name for name in SWITCHES if not_worse(against(chosen_on, name, PLAIN))]
    if not near:
        return EffectVerdict(False, {f"{name} against {PLAIN}": against(answers, name, PLAIN) for name in SWITCHES})
    chosen = min(near, key=lambda name: target_forwards(answers_of(chosen_on, name)))
    share = target_forwards(answers_of(tested_on, chosen))
    loss, gain = against(tested_on, chosen, PLAIN), against(tested_on, chosen, ALONE)
    holds = share <= HALF and not_worse(loss) and gain is not None and gain.mean > NEARLY
    return EffectVerdict(
        holds,
        {
            f"{chosen}, target forwards per token": share,
            f"{chosen} against {PLAIN}": loss,
            f"{chosen} against {ALONE}": gain,
            PLAIN: score(tested_on, PLAIN),
            ALONE: score(tested_on, ALONE),
        },
    )


def target_forwards(answers: Iterable[Answer]) -> float:
    """Target forwards per token after the first; 1 if there is no such token."""
    good = [answer for answer in answers if not answer.failure]
    tokens = sum(len(answer.token_ids) - 1 for answer in good)
    return sum(answer.forwards.get("target", 0) for answer in good) / tokens if tokens else 1.0


def chart(answers: list[Answer]) -> Chart:
    """The score of each setting against its target forwards, from 0 to 1 per token."""
    series = {family: [value(score(answers, name)) for name in names] for family, names in FAMILIES.items()}
    at = {
        family: [TICKS * target_forwards(answers_of(answers, name)) for name in names]
        for family, names in FAMILIES.items()
    }
    ticks = [f"{tick / TICKS:g}" for tick in range(TICKS + 1)]
    return Chart(
        "Switching models", "target forwards per token", "score", ticks, series, levels(answers, (PLAIN, ALONE)), at=at
    )
