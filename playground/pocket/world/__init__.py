"""The small world: tasks with known answers, made without end from a seed.

A task is a module with `TASK` (its name), `GRADES` (how hard its items can be made, from 1 on),
`generate(rng, held_out=False, grade=None) -> Item` and `score(item, text) -> float`, 0 to 1.
To add one, write the module and name it in `MODULES`. `python -m playground.pocket world` prints items.
"""
from playground.pocket.world import arithmetic, chat, context_qa, edit, facts, lists, needle, programs, records, stories
from playground.pocket.world.item import Item, is_held_out

MODULES = (facts, context_qa, arithmetic, records, edit, lists, programs, needle, stories, chat)
TASKS = {module.TASK: module for module in MODULES}


def score(item, text):
    """How right a text is as the answer to an item, 0 to 1, by the rule of the item's task."""
    return TASKS[item.task].score(item, text)


__all__ = ["Item", "TASKS", "is_held_out", "score"]
