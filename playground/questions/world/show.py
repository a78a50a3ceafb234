"""The output of `python -m playground.pocket world`."""
import json
import random
from dataclasses import asdict

from playground.errors import Refusal
from playground.questions.world import TASKS


def items(task, count, seed=1, *, grade=None, held_out=False):
    """`count` items of a task, reproducible by seed. Raises Refusal for an unknown task or grade, or for count < 1."""
    if task not in TASKS:
        raise Refusal(f"There is no task {task!r}; choose one of {', '.join(TASKS)}.", "task")
    if grade is not None and grade not in TASKS[task].GRADES:
        raise Refusal(f"{task} has the grades {', '.join(map(str, TASKS[task].GRADES))}, not {grade}.", "grade")
    if count < 1:
        raise Refusal(f"Ask for at least one item, not for {count}.", "n")
    rng = random.Random(seed)
    return [TASKS[task].generate(rng, held_out, grade) for _ in range(count)]


def as_json(item):
    """An item with all its fields as one line of JSON."""
    return json.dumps(asdict(item), ensure_ascii=False)


def as_text(item):
    """The conversation in readable form, under a header line."""
    words = "held-out wording" if item.kept_words else "training wording"
    lines = [f"--- {item.task}, {item.meta['kind']}, grade {item.grade}, {words}"]
    for prompt, answer in [*item.before, (item.prompt, item.answer)]:
        lines += [f"Q: {prompt}", f"A: {answer}"]
    return "\n".join(lines)
