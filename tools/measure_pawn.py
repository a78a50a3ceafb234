"""AUC of the fitted PAWN detector on texts of models that it was not trained on, beside the mean log-probability.

`python tools/measure_pawn.py` takes a few minutes on a CPU. The held-out tales and their continuations are those of
`fit pawn`; pocket scores all of them.
"""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from playground import load  # noqa: E402
from playground.algorithms.fairy_tales import tales  # noqa: E402
from playground.decoding.fitted_weights import stored  # noqa: E402
from playground.training.calibration import CalibrationTexts, windows  # noqa: E402
from strategies.overlays.pawn import HELD_OUT, LENGTH, OPENING, RULES, continued, evidence_in  # noqa: E402
from strategies.overlays.pawn.detector import area, judge  # noqa: E402

WRITERS = ("pocket", "pocket-draft", "pocket-moe")


def main() -> None:
    reader = load("pocket").target
    weights = {name: tensor.float() for name, tensor in stored("pawn", {"target": reader}).items()}
    pieces = [ids[at:at + OPENING + LENGTH] for ids in windows(reader, [tales()])
              for at in range(0, len(ids) - OPENING - LENGTH + 1, OPENING + LENGTH)]
    pieces = pieces[len(pieces) * (HELD_OUT - 1) // HELD_OUT:]
    reading = CalibrationTexts(reader, [])
    human = [_scores(weights, evidence_in(reading, ids)) for ids in pieces]
    for name in WRITERS:
        written = continued(CalibrationTexts(load(name).target, []), [ids[:OPENING] for ids in pieces], seed=1)
        machine = [_scores(weights, evidence_in(reading, ids)) for ids in written]
        for at, rule in enumerate(RULES):
            found, plain = (area(list(own[at::len(RULES)]), list(other))
                            for own, other in zip(zip(*machine), zip(*human)))
            print(f"{name}, {rule}: {found:.3f}; mean log-probability {plain:.3f}; {len(human)} tales")


def _scores(weights, evidence) -> tuple[float, float]:
    """The detector's score and the mean log-probability."""
    return float(judge(weights, evidence).logit), float(evidence.metrics[:, 2].mean())


if __name__ == "__main__":
    main()
