"""The small world: synthetic tasks with known answers, generated without limit from a seed.

A task is a module with `TASK` (its name), `GRADES` (levels of difficulty, from 1),
`generate(rng, held_out=False, grade=None) -> Item` and `score(item, text) -> float`, 0 to 1.
To add a task, write the module and list it in `MODULES`. `python -m playground.pocket world` prints items.
"""
from playground.questions.world import (
    arithmetic,
    chat,
    context_qa,
    edit,
    facts,
    lists,
    needle,
    programs,
    records,
    stories,
)
from playground.questions.world.item import Item, is_held_out

MODULES = (facts, context_qa, arithmetic, records, edit, lists, programs, needle, stories, chat)
TASKS = {module.TASK: module for module in MODULES}


def score(item, text):
    """Score of a text as the answer to an item, 0 to 1, by the metric of the item's task."""
    return TASKS[item.task].score(item, text)


__all__ = ["Item", "TASKS", "is_held_out", "score"]
