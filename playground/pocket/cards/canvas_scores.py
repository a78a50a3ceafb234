"""Scores of the masked denoiser: held-out items of every task, each in a canvas lane of the playground."""
import random

import playground
from playground.decoding.models import Models
from playground.engine.canvas.denoiser import MaskedDenoiser
from playground.questions.world import TASKS, score

ROWS = {                # row of the table: (task, grades, positions of the canvas)
    "records": ("records", (1, 2, 3, 4), 112), "programs 1": ("programs", (1,), 80), "edit 1": ("edit", (1,), 64),
    "lists": ("lists", (1, 2, 3, 4), 64), "arithmetic 1": ("arithmetic", (1,), 48),
    "arithmetic 2": ("arithmetic", (2,), 64), "needle": ("needle", (1, 2, 3), 16),
}


def as_denoiser(network, tokenizer, name="pocket-diffusion"):
    """The playground's denoiser of a trained network."""
    return MaskedDenoiser(network.float().eval(), tokenizer, name)


def exam(count, seed=11):
    """`count` held-out items for every row: {row: items}; the same seed gives the same items."""
    rng = random.Random(seed)
    return {
        row: [TASKS[task].generate(rng, True, rng.choice(grades)) for _ in range(count)]
        for row, (task, grades, _) in ROWS.items()
    }


def scores(denoiser, strategy, knobs, count, seed=11):
    """{row: score, right, tokens_per_forward, seconds} of one strategy. Tokens are those of the text; seconds are the
    lane's own, per item.
    """
    return {row: _pooled(denoiser, items, (strategy, knobs, ROWS[row][2])) for row, items in exam(count, seed).items()}


def _pooled(denoiser, items, lane):
    strategy, knobs, room = lane
    given = dict(models=Models(denoiser), knobs=knobs, chat=True, max_new_tokens=room)
    found = [(item, playground.run(strategy, item.prompt, **given)) for item in items]
    points = [score(item, result.text) for item, result in found]
    tokens = sum(len(result.token_ids) for _, result in found)
    forwards = sum(result.metrics["target_forwards"] for _, result in found)
    return dict(
        score=sum(points) / len(points), right=sum(point == 1 for point in points) / len(points),
        tokens_per_forward=tokens / forwards, forwards=forwards / len(found),
        seconds=sum(result.metrics["seconds"] for _, result in found) / len(found), items=len(found),
    )


def table(measured):
    """Markdown table of `scores`."""
    lines = ["| task | score | right | tokens per forward | forwards | s per item |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(
        f"| {row} | {m['score']:.2f} | {m['right']:.0%} | {m['tokens_per_forward']:.2f} | {m['forwards']:.0f} "
        f"| {m['seconds']:.2f} |" for row, m in measured.items()
    )])
