"""Reads the right answers of the effect `interventions` with each part off: would greedy decoding write them?

    python tools/measure_interventions.py [questions of each task]

Greedy decoding writes an answer word by word exactly if each of its tokens is the most probable after those before, so
one forward over question and answer tells, and `bench effects --only interventions`, which writes the answers and
takes long on a busy machine, is not needed for it. Prints the share of answers, the mean log-probability of an answer,
and for both the questions that got better and worse with the two-sided sign test.
"""
from __future__ import annotations

import sys

import torch

import playground
from playground.bench.effects.intervention_effect import ACTIVE, NAMED, OTHERS, TASKS, switched
from playground.bench.survey.results import sign_test
from playground.contract import make
from playground.decoding import fitted_weights
from playground.engine.model import Model
from playground.questions.world.show import items
from playground.training.calibration import CalibrationTexts, answered

Judged = list[tuple[float, float]]


def judged(model: Model, pairs: list[tuple[list[int], int]], parts: str) -> Judged:
    """For each text and the length of its question: whether greedy decoding writes the answer, and its
    log-probability in nats.
    """
    policy = make("switch_part", parts=parts)
    weights = fitted_weights.find(make("sae_features"), {"target": model})
    policy.begin(model.parts, weights)
    return [_read(CalibrationTexts(model, [ids]), ids, start, policy) for ids, start in pairs]


def _read(texts: CalibrationTexts, ids: list[int], start: int, policy) -> tuple[float, float]:
    logits, answer = texts.read(ids, policy.choices([], 0))[start - 1:-1].float(), torch.tensor(ids[start:])
    logp = logits.log_softmax(1).gather(1, answer[:, None]).sum()
    return float(logits.argmax(1).equal(answer)), float(logp)


def compared(name: str, found: Judged, plain: Judged) -> str:
    texts = []
    for number, word in enumerate(("written", "log-probability")):
        better = sum(one[number] > other[number] for one, other in zip(found, plain))
        worse = sum(one[number] < other[number] for one, other in zip(found, plain))
        mean = sum(each[number] for each in found) / len(found)
        texts.append(f"{word} {mean:.2f} ({better} better, {worse} worse, p {sign_test(better, worse):.2g})")
    return f"  {name}: " + "; ".join(texts)


def main(count: int) -> None:
    model = playground.load("pocket").target
    with torch.inference_mode():
        for task in TASKS:
            asked = items(task, count, 1, held_out=True)
            pairs = [(answered(model.tokens, item), len(model.tokens.encode_chat(item.prompt))) for item in asked]
            plain = judged(model, pairs, "")
            print(f"{task}, {len(pairs)} questions: written {sum(right for right, _ in plain) / len(pairs):.2f}")
            found = {name: judged(model, pairs, parts) for name, parts in switched(1).items()}
            for name, rows in found.items():
                print(compared(f"{name} off", rows, plain), flush=True)
            for other in (OTHERS, ACTIVE):
                print(compared(f"{NAMED} against {other}", found[NAMED], found[other]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
