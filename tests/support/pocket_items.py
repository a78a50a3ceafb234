"""Items of the small world."""
import random


def some(task, count=40, seed=3, held_out=False, grade=None):
    rng = random.Random(seed)
    return [task.generate(rng, held_out, grade) for _ in range(count)]


def asking(seed):
    from playground.questions.world.item import Voice
    return Voice(random.Random(seed))
