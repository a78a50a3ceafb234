"""Evaluation: how good the pocket models are at their small world, and how well the draft guesses the target.

Everything is measured on what training has never seen: validation loss per source, score per task and grade under greedy
decoding, how many of the tokens that a draft guesses the target takes, how often an early layer already agrees with the
last, and how repetitive greedy tales and stories are. The result is one dictionary, ready for JSON; `card.py` makes the
model card from it.
"""
import json
import random
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from playground.pocket import tokenizer as tokens
from playground.pocket.data import Windows
from playground.pocket.world import TASKS, arithmetic, context_qa, score

GUESSES = (3, 5, 8)               # tokens a draft guesses ahead
ROOM = dict(                      # tokens an answer may take
    facts=12, context_qa=12, arithmetic=110, records=260, edit=330, lists=80, programs=300, needle=12, stories=260, chat=130,
)
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
    """Held-out items, `count` for every row of the table: {row: items}. Every task as a whole, then each of its grades."""
    rng = random.Random(seed)
    makers = {name: partial(task.generate, rng, True) for name, task in TASKS.items()}
    for name, task in TASKS.items():
        if len(task.GRADES) > 1:
            makers |= {f"{name}, grade {grade}": partial(task.generate, rng, True, grade) for grade in task.GRADES}
    makers |= {f"arithmetic, grade {grade}": partial(arithmetic.problem, rng, grade, True) for grade in arithmetic.GRADES}
    makers |= {f"arithmetic, drills {grade}": partial(arithmetic.drill, rng, grade, True) for grade in (1, 2, 3)}
    makers["context_qa, against memory"] = partial(context_qa.contradicting, rng)
    makers["context_qa, as in memory"] = partial(context_qa.agreeing, rng)
    return {row: [make() for _ in range(count)] for row, make in makers.items()}


def evaluate(pair, tokenizer, data, count=60, seed=4242):
    """All measures of a pair (target, draft or None) on `count` items a row."""
    target, draft = pair
    return dict(
        items=count, seed=seed, loss=losses(target, data), draft_loss=losses(draft, data) if draft else None,
        tasks={row: grade(pair, tokenizer, items) for row, items in exam(count, seed).items()},
        exits=exits(target, data), tales=free_text(pair, tokenizer, [tokens.END_OF_TEXT + text for text in OPENINGS]),
        stories=free_text(pair, tokenizer, WISHES), samples=samples(target, tokenizer, seed),
    )


def windows(data):
    """The validation windows by source: {source: Windows}."""
    return {path.stem.removeprefix("valid_"): Windows.load(path) for path in sorted(Path(data).glob("valid_*.npz"))}


@torch.inference_mode()
def losses(model, data, rows=8):
    """Mean loss in nats per token of text or of answer, by source."""
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
    """Share of tokens on which a layer, read through the last norm and the output head, says what the last says.

    {source: shares from the embedding (0) to the last layer}, and their mean over the sources under "mean".
    """
    agreed = {}
    for name, found in windows(data).items():
        batch = found[:rows].tensors()
        counted = batch.predicted[1] > 0.5
        states = model.model(**batch.read, output_hidden_states=True).hidden_states
        said = [model.lm_head(s if s is states[-1] else model.model.norm(s)).argmax(-1) for s in states]
        agreed[name] = [float((s == said[-1])[counted].float().mean()) for s in said]
    return agreed | dict(mean=[mean(layer) for layer in zip(*agreed.values())])


def grade(pair, tokenizer, items):
    """Score of both models on one row of the exam, and how the draft fares as a guesser of the target's answers."""
    target, draft = pair
    prompts = [tokens.exchange(tokenizer, item)[0] for item in items]
    answers = greedy(target, prompts, ROOM[items[0].task])
    texts = [tokenizer.decode(a, skip_special_tokens=True) for a in answers]
    scores = [score(item, text) for item, text in zip(items, texts)]
    result = dict(score=mean(scores), right=mean(s == 1 for s in scores), tokens=mean(map(len, answers)))
    result |= dict(kinds=by(lambda item: item.meta["kind"], items, scores), wrong=first_wrong(items, texts, scores))
    result |= dict(words=by(lambda item: "kept" if item.kept_words else "taught", items, scores))
    if items[0].task == "records":
        result["valid_json"] = mean(map(is_json, texts))
    return result | (guessing(draft, prompts, answers) if draft else {})


def first_wrong(items, texts, scores):
    """One mistake to look at, None if there is none."""
    for item, text, value in zip(items, texts, scores):
        if value < 1:
            return dict(prompt=item.prompt[-300:], wanted=item.answer[:300], said=text[:300])
    return None


@torch.inference_mode()
def greedy(model, prompts, room, rows=30):
    """The greedy continuation of every prompt, end token included: lists of token ids."""
    end, pad = tokens.SPECIALS.index(tokens.END), tokens.SPECIALS.index(tokens.PAD)
    found = []
    for batch in (prompts[i:i + rows] for i in range(0, len(prompts), rows)):
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in batch])
        out = model.generate(ids, attention_mask=(ids != pad).long(), max_new_tokens=room, do_sample=False)
        found += [row[:row.index(end) + 1] if end in row else row for row in out[:, width:].tolist()]
    return found


@torch.inference_mode()
def guessing(draft, prompts, answers):
    """Greedy speculation played back, for every number of guesses: {guesses: acceptance and tokens per target forward}.

    Acceptance is accepted / tested; prefill is left out. The target's greedy text is known, and a guess is only judged on a
    prefix the target has confirmed, so one pass of the draft over the known text tells every guess it would have made.
    """
    agrees = [agreement(draft, prompt, answer) for prompt, answer in zip(prompts, answers)]
    return dict(guessing={str(guesses): played(agrees, guesses) for guesses in GUESSES})


def agreement(draft, prompt, answer):
    """For each token of the target's answer, whether the draft would have guessed it."""
    guesses = draft(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1].argmax(-1)
    return (guesses == torch.tensor(answer)).tolist()


def played(agrees, guesses):
    """Acceptance and tokens per target forward over several texts, for a draft of `guesses` tokens a round."""
    every = [found for text in agrees for found in rounds(text, guesses)]
    accepted, tested = map(sum, zip(*every))
    return dict(acceptance=accepted / tested, tokens_per_forward=sum(map(len, agrees)) / len(every))


def rounds(agrees, guesses):
    """Rounds of speculation over a text, from the draft's agreement at each token: yields (accepted, tested)."""
    at = 0
    while at < len(agrees):
        guessed = agrees[at:at + guesses]
        kept = guessed.index(False) if False in guessed else len(guessed)
        yield kept, min(kept + 1, len(guessed))
        at += kept + 1


def free_text(pair, tokenizer, openings, room=96):
    """Greedy text without a known answer: how much of it repeats, and how the draft guesses it."""
    target, draft = pair
    prompts = [tokenizer.encode(opening, add_special_tokens=False) for opening in openings]
    texts = greedy(target, prompts, room)
    return dict(repetition=mean(map(repetition, texts))) | (guessing(draft, prompts, texts) if draft else {})


def repetition(ids, n=4):
    """The share of n-grams that have stood in the text before, 0 to 1."""
    grams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / max(1, len(grams))


@torch.inference_mode()
def samples(model, tokenizer, seed):
    """A few texts to read: stories and tales at temperature 0.8, and a greedy tale."""
    torch.manual_seed(seed)
    openings = [tokens.END_OF_TEXT + opening for opening in OPENINGS[:2]]
    wanted = [(prompt, 0.8) for prompt in WISHES[:2] + openings] + [(openings[0], 0)]
    return [dict(prompt=prompt, temperature=t, text=continued(model, tokenizer, prompt, t)) for prompt, t in wanted]


def continued(model, tokenizer, prompt, temperature):
    """Up to 160 new tokens after a prompt."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    heat = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, **heat)
    return tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True)


def by(group, items, scores):
    """Mean score of the items of every group: {group(item): mean}."""
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
