"""The text of a game as plain data, the settings of the run behind it, and the texts on offer."""
from __future__ import annotations

import json
import math
from typing import Any

from playground.algorithms.fairy_tales import TALES
from playground.events import Failed, Step
from playground.player.frames import Facts, trace_of
from playground.trace import Trace
from playground.trace.transcript import Token, sequences
from playground.ui.components.settings import Settings

SCORE = "score"  # the strategy in a link of this page if the text is given
# temperature 1 and no truncation, so that tokens are sampled with the probabilities shown
KNOBS = {"greedy": {}, "sample": {"temperature": 1.0, "top_p": 1.0}, SCORE: {}}
STARTS = (("the sea", 0), ("snow", 2), ("a fox and a crow", 0), ("a king", 3), ("Mia", 3))
"""Stories to sample, as (subject, seed): with the bundled model the texts read well, and several tokens of each have an
entropy above 1 bit. Most other stories are nearly deterministic after their beginning, or become incoherent."""
STORY = "Tell me a story about {}."
TALES_OFFERED = 3  # tales in the menu of examples
LENGTH = 64  # tokens of a text in the menu
OPENING = 480  # characters of a tale that are scored, up to the end of a sentence


def game_text(trace: Trace, reads: bool) -> dict[str, Any]:
    """The text before the first token, and every token whose probabilities are known, as plain data.

    reads: the text was scored, so it begins with its own first token.
    """
    header = trace.headers[0]
    written = sequences(trace.lane(header.lane).events)[0]
    known = [
        _token(token, written.steps[place]) for place, token in enumerate(written.tokens) if place in written.steps
    ]
    opening = header.prompt_pieces if reads else [header.prompt]
    return {"opening": opening, "asked": header.chat and not reads, "ids": header.prompt_ids, "tokens": known}


def _token(token: Token, step: Step) -> dict[str, Any]:
    """A token with the probabilities before masks and processors, and their entropy over the vocabulary, in bits."""
    top = [{"id": candidate.id, "piece": candidate.piece, "p": candidate.raw} for candidate in step.top]
    return {
        "id": token.id,
        "piece": token.piece,
        "p": math.exp(token.logprob),
        "entropy": step.entropy / math.log(2),
        "top": top,
    }


def failure(headers: Facts, events: Facts) -> str:
    """The error message of a lane that failed; empty if it did not."""
    lane = trace_of(headers, list(events)).lane(headers[0]["lane"]) if headers else None
    return (
        next((stamped.event.message for stamped in lane.events if isinstance(stamped.event, Failed)), "")
        if lane
        else ""
    )


# --- settings of a game ---

def settings_of(way: str, prompt: str, mode: str, length: int, seed: int) -> Settings:
    """The settings of the run behind a game. A given text is scored as raw text."""
    lane = {"strategy": way if way in KNOBS else SCORE, "knobs": KNOBS.get(way, {})}
    return Settings(prompt=prompt, mode="raw" if way == SCORE else mode, length=length, seed=seed, lanes=[lane])


def way_of(settings: Settings) -> str:
    """How the text is made: "greedy", "sample" or "score"."""
    name = settings.lanes[0]["strategy"] if settings.lanes else "greedy"
    return name if name in KNOBS else "greedy"


def lanes_link(settings: Settings) -> str:
    """A link to the playground with the same run in a lane; a given text becomes the prompt."""
    lanes = settings.lanes if way_of(settings) != SCORE else Settings().lanes
    shown = Settings(settings.prompt, settings.mode, seed=settings.seed, length=settings.length, lanes=lanes)
    return f"./?s={shown.to_code()}"


def offers() -> list[tuple[str, Settings]]:
    """The menu of examples as (name, settings): stories to generate, and tales to score. The page starts with the
    first.
    """
    sampled = [(STORY.format(subject), "sample", seed) for subject, seed in STARTS]
    greedy = (STORY.format("Mia"), "greedy", 0)
    return [*(_story(*start) for start in (*sampled, greedy)), *_tales()]


def _story(prompt: str, way: str, seed: int) -> tuple[str, Settings]:
    name = prompt if way == "sample" else f"{prompt.rstrip('.')}, greedy"
    return name, settings_of(way, prompt, "chat", LENGTH, seed)


def _tales() -> list[tuple[str, Settings]]:
    lines = TALES.read_text(encoding="utf-8").splitlines()[:TALES_OFFERED]
    return [
        (f"To score: {tale['title']}", settings_of(SCORE, _opening(tale["text"]), "raw", LENGTH, 0))
        for tale in map(json.loads, lines)
    ]


def _opening(text: str) -> str:
    """The first sentences."""
    return text[:OPENING].rpartition(". ")[0] + "." if ". " in text[:OPENING] else text[:OPENING]
