"""Calibration for the study `pac_sets`: how much of a program must be removed until the right one matches the rest.

    python tools/calibrate.py --items 80 > assets/texts/calibration.json

The bundled model writes held-out programs greedily; the calibration is printed as JSON.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import playground  # noqa: E402
from playground.algorithms.programs.partial_programs import Calibration  # noqa: E402
from playground.decoding.models import Models  # noqa: E402
from playground.questions.questions import PROGRAMS, ask  # noqa: E402
from playground.trace import Trace  # noqa: E402

HOLES = 4
LENGTH = 112  # tokens, enough for the longest of these programs


def pairs(models: Models, items: int, seed: int) -> Iterator[tuple[Trace, str]]:
    """The model's trace and the right answer, for each question."""
    for question in ask(PROGRAMS, items, seed):
        yield (
            playground.run("greedy", question.prompt, models=models, chat=True, max_new_tokens=LENGTH).trace,
            question.answer,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=80, help="programs")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    about = f"{options.items} held-out programs of the small world, seed {options.seed}"
    print(Calibration.of(pairs(playground.load(), options.items, options.seed), about, HOLES).json())


if __name__ == "__main__":
    main()
