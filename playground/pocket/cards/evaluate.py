"""Evaluation of the pocket models: task scores, losses, and acceptance of the drafts by the target.

Everything is measured on held-out data: validation loss per source, score per task and grade under greedy decoding,
the acceptance rate of draft tokens, the top-1 agreement of each layer with the last, and the repetition in greedy tales
and stories. The result is one JSON-serialisable dictionary, from which `card.py` writes the model card.
"""
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from playground.pocket import tokenizer as tokens
from playground.pocket.cards import draft_acceptance as speculation
from playground.pocket.data import Windows
from playground.pocket.generation import continuations
from playground.questions.world import TASKS, arithmetic, context_qa, score

ROOM = dict(  # maximum length of an answer, in tokens
    facts=12,
    context_qa=12,
    arithmetic=110,
    records=260,
    edit=330,
    lists=80,
    programs=300,
    needle=12,
    stories=260,
    chat=130,
)
GUESSED = 20                      # items per row on which the drafts are measured: lanes take seconds per item
OPENINGS = """
Once upon a time there was a king who had three daughters.
The fox said to the crow,
A poor old woman lived in a hut near the forest.
Long ago, in a far country, there lived a miller.
The youngest brother set out into the wide world
"Who are you?" asked the giant.
In the middle of the wood stood a castle,
The wolf came to the door and
There was once a fisherman who
When the prince awoke,
""".strip().splitlines()
WISHES = """
<|user|> Tell me a story about Mia and a kite that flew away.<|assistant|>
<|user|> Write a short story about Ben and a night without stars.<|assistant|>
<|user|> Make up a story: a hen that wanted to swim. The hero is called Nora.<|assistant|>
<|user|> A story with Otto, please. It should be about a door in the dark.<|assistant|>
""".strip().splitlines()


def exam(count, seed):
    """`count` held-out items for every row of the table: {row: items}. One row per task, then one per grade."""
    rng = random.Random(seed)
    makers = {name: partial(task.generate, rng, True) for name, task in TASKS.items()}
    for name, task in TASKS.items():
        if len(task.GRADES) > 1:
            makers |= {f"{name}, grade {grade}": partial(task.generate, rng, True, grade) for grade in task.GRADES}
    makers |= {
        f"arithmetic, grade {grade}": partial(arithmetic.problem, rng, grade, True) for grade in arithmetic.GRADES
    }
    makers |= {f"arithmetic, drills {grade}": partial(arithmetic.drill, rng, grade, True) for grade in (1, 2, 3)}
    makers["context_qa, against memory"] = partial(context_qa.contradicting, rng)
    makers["context_qa, as in memory"] = partial(context_qa.agreeing, rng)
    return {row: [make() for _ in range(count)] for row, make in makers.items()}


Pair = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]


@dataclass(frozen=True)
class Family:
    """The models under test, each with its tokenizer; a draft is None if it has not been trained."""
    target: Pair
    draft: Pair | None = None
    other_draft: Pair | None = None

    @cached_property
    def in_lanes(self):
        """Target and draft as the playground's `Models`."""
        (target, tokenizer), (draft, _) = self.target, self.draft
        return speculation.in_lanes(target, draft, tokenizer)

    def by_role(self):
        """{role: (model, tokenizer)} of the models that are available."""
        pairs = {"target": self.target, "draft": self.draft, "other-draft": self.other_draft}
        return {role: pair for role, pair in pairs.items() if pair}


def evaluate(family, data, count=60, seed=4242):
    """All measures of a family, with `count` items per row. data: {role: folder of its validation windows}."""
    rows = tqdm(exam(count, seed).items(), desc="rows", mininterval=5)
    models = {role: model for role, (model, _) in family.by_role().items()}
    return dict(
        items=count, seed=seed, loss={role: losses(model, data[role]) for role, model in models.items()},
        tasks={
            row: grade(family, items) | (item_acceptance(family, items) if row in TASKS else {}) for row, items in rows
        },
        exits=exits(models["target"], data["target"]), samples=samples(family.target, seed),
        tales=free_text(family, [tokens.END_OF_TEXT + text for text in OPENINGS]), stories=free_text(family, WISHES),
    )


def windows(data):
    """The validation windows by source: {source: Windows}."""
    return {path.stem.removeprefix("valid_"): Windows.load(path) for path in sorted(Path(data).glob("valid_*.npz"))}


@torch.inference_mode()
def losses(model, data, rows=8):
    """Mean loss by source, in nats per token; for tasks, of the answer tokens only."""
    result = {}
    for name, found in windows(data).items():
        total = counted = 0.0
        for batch in (found[at:at + rows].tensors() for at in range(0, len(found.ids), rows)):
            ids, weights = batch.predicted
            each = F.cross_entropy(model(**batch.read).logits.transpose(1, 2), ids, reduction="none")
            total, counted = total + float((each * weights).sum()), counted + float(weights.sum())
        result[name] = total / counted
    return result


@torch.inference_mode()
def exits(model, data, rows=16):
    """Top-1 agreement of each layer, through the final norm and lm_head, with the last layer.

    Returns {source: shares from the embedding (0) to the last layer}, and the mean over the sources under "mean".
    """
    agreed = {}
    for name, found in windows(data).items():
        batch = found[:rows].tensors()
        counted = batch.predicted[1] > 0.5
        states = model.model(**batch.read, output_hidden_states=True).hidden_states
        best = [model.lm_head(s if s is states[-1] else model.model.norm(s)).argmax(-1) for s in states]
        agreed[name] = [float((s == best[-1])[counted].float().mean()) for s in best]
    return agreed | dict(mean=[mean(layer) for layer in zip(*agreed.values())])


def grade(family, items):
    """Score of the target on one row of the exam."""
    model, tokenizer = family.target
    answers = greedy(family, items)
    texts = [tokenizer.decode(a, skip_special_tokens=True) for a in answers]
    scores = [score(item, text) for item, text in zip(items, texts)]
    result = dict(score=mean(scores), right=mean(s == 1 for s in scores), tokens=mean(map(len, answers)))
    result |= dict(kinds=by(lambda item: item.meta["kind"], items, scores), wrong=first_wrong(items, texts, scores))
    result |= dict(words=by(lambda item: "kept" if item.kept_words else "taught", items, scores))
    return result | (dict(valid_json=mean(map(is_json, texts))) if items[0].task == "records" else {})


def greedy(family, items):
    """The target's greedy answers, token ids."""
    model, tokenizer = family.target
    return continuations(model, [tokens.exchange(tokenizer, item)[0] for item in items], ROOM[items[0].task])


def first_wrong(items, texts, scores):
    """The first wrong answer, as an example; None if there is none."""
    for item, text, value in zip(items, texts, scores):
        if value < 1:
            return dict(prompt=item.prompt[-300:], wanted=item.answer[:300], said=text[:300])
    return None


def item_acceptance(family, items):
    """Acceptance measures of the drafts on the target's answers to items."""
    tokenizer = family.target[1]
    return acceptance(
        family, [tokenizer.decode(tokens.exchange(tokenizer, item)[0]) for item in items[:GUESSED]], ROOM[items[0].task]
    )


def acceptance(family, prompts, room):
    """Acceptance measures of each draft on texts that the target continues greedily."""
    (target, tokenizer), found = family.target, {}
    if family.draft:
        found["guessing"] = speculation.lanes(family.in_lanes, prompts, room)
    if family.other_draft:
        answers = continuations(target, [tokenizer.encode(text, add_special_tokens=False) for text in prompts], room)
        draft, theirs = family.other_draft
        found["guessing_in_text"] = speculation.in_text(draft, (tokenizer, theirs), prompts, answers)
    return found


def free_text(family, openings, room=128):
    """Greedy text without a known answer: its repetition, and the acceptance of the drafts."""
    model, tokenizer = family.target
    texts = continuations(model, [tokenizer.encode(opening, add_special_tokens=False) for opening in openings], room)
    measures = dict(repetition=repetition, distinct_2=distinct, longest_repeat=longest_repeat)
    return {name: mean(map(measure, texts)) for name, measure in measures.items()} | acceptance(family, openings, room)


def repetition(ids, n=4):
    """Share of n-grams that have occurred in the text before, 0 to 1."""
    return 1 - distinct(ids, n)


def distinct(ids, n=2):
    """distinct-n: unique n-grams over all n-grams, 0 to 1."""
    grams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def longest_repeat(ids):
    """Length of the longest run of tokens that occurs twice in the text; the occurrences may overlap."""
    # before[j]: length of the longest run that ends both at token i - 1 and at token j
    longest, before = 0, [0] * len(ids)
    for i, token in enumerate(ids):
        before = [before[j - 1] + 1 if j and ids[j] == token else int(ids[j] == token) for j in range(i)] + [0] * (
            len(ids) - i
        )
        longest = max(longest, *before)
    return longest


def samples(pair, seed):
    """Sample texts: stories and tales at temperature 0.8, and a greedy tale."""
    model, tokenizer = pair
    torch.manual_seed(seed)
    openings = [tokens.END_OF_TEXT + opening for opening in OPENINGS[:2]]
    wanted = [(prompt, 0.8) for prompt in WISHES + openings] + [(openings[0], 0)]
    written = [
        continuations(model, [tokenizer.encode(prompt, add_special_tokens=False)], 220, t)[0] for prompt, t in wanted
    ]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
    return [dict(prompt=prompt, temperature=t, text=text) for (prompt, t), text in zip(wanted, texts)]


def by(group, items, scores):
    """Mean score by group: {group(item): mean}."""
    groups = defaultdict(list)
    for item, value in zip(items, scores):
        groups[group(item)].append(value)
    return {name: mean(values) for name, values in sorted(groups.items())}


def is_json(text):
    """Whether a text parses as JSON."""
    try:
        json.loads(text)
        return True
    except ValueError:
        return False


def mean(values):
    values = list(values)
    return sum(values) / max(1, len(values))
