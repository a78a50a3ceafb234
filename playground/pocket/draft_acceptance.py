"""How well a draft guesses the target, measured by the playground's own lanes.

For the draft of the pair, greedy lanes guess several tokens a round and their traces are counted. A draft with another
tokenizer guesses in text: what it writes is cut into the target's tokens and compared with what the target says. The
target's greedy text is known there, and greedy speculation keeps to it, so the target need not run again.
Source of the text form: string-level exact match, Timor et al. 2025, arXiv 2502.05202.
"""
from collections import defaultdict
from copy import deepcopy

import playground
from playground.contract.lane_config import LaneConfig
from playground.decoding.session import Models
from playground.engine.model import Model
from playground.pocket.generation import continuations
from playground.trace.lane_metrics import LaneRecord

GUESSES = (3, 5, 8)               # tokens guessed a round
IN_TEXT = 5                       # tokens of its own that a draft with another tokenizer writes a round


def in_lanes(target, draft, tokenizer):
    """The pair as lanes take it: copies, since a model of the playground changes how its network attends."""
    return Models(
        *(Model(deepcopy(network), tokenizer, name) for network, name in ((target, "target"), (draft, "draft")))
    )


def lanes(models, prompts, room):
    """Greedy speculation over prompts: {guesses: acceptance, tokens_per_forward, same}. prompts: texts with their role
    marks.

    Acceptance is accepted / tested guesses, tokens_per_forward those of the target without prefill, both over all
    prompts; `same` is the share of texts that are plain greedy decoding's.
    """
    recipes = [
        LaneConfig("greedy"),
        *(LaneConfig("speculative", extras=[("draft_model", dict(depth=k))]) for k in GUESSES),
    ]
    found = defaultdict(list)
    for prompt in prompts:
        plain, *guessed = playground.compare(recipes, prompt, models=models, max_new_tokens=room)
        for guesses, lane in zip(GUESSES, guessed):
            found[str(guesses)].append((lane, lane.token_ids == plain.token_ids))
    return {guesses: _together(results) for guesses, results in found.items()}


def _together(results):
    """Several lanes of one kind as one. results: (Result, whether it wrote the plain text) of each."""
    trials = [kept for lane, _ in results for _, kept in LaneRecord(lane.trace.events).trials()]
    measured = [lane.metrics for lane, _ in results if lane.metrics["tokens_per_target_forward"]]
    passes = sum(m["target_forwards"] for m in measured)
    written = sum(m["tokens_per_target_forward"] * m["target_forwards"] for m in measured)
    same = sum(same for _, same in results) / len(results)
    return dict(acceptance=sum(trials) / max(1, len(trials)), tokens_per_forward=written / max(1, passes), same=same)


def in_text(draft, tokenizers, prompts, answers):
    """A draft with another tokenizer: acceptance and tokens_per_forward, counted in the target's tokens.

    tokenizers: (target's, draft's); prompts: texts with their role marks; answers: the target's greedy token ids.
    """
    rounds = [found for prompt, answer in zip(prompts, answers) for found in _rounds(draft, tokenizers, prompt, answer)]
    accepted, tested = map(sum, zip(*rounds))
    return dict(acceptance=accepted / max(1, tested), tokens_per_forward=sum(map(len, answers)) / len(rounds))


def _rounds(draft, tokenizers, prompt, answer):
    """Rounds of speculation in text over one known answer: yields (accepted, tested)."""
    ours, theirs = tokenizers
    at = 0
    while at < len(answer):
        read = theirs.encode(prompt + ours.decode(answer[:at]), add_special_tokens=False)
        said = theirs.decode(continuations(draft, [read], IN_TEXT)[0])
        guessed = ours.encode(said, add_special_tokens=False)[:len(answer) - at]
        kept = agreeing(guessed, answer[at:])
        yield kept, min(kept + 1, len(guessed))
        at += kept + 1


def agreeing(one, other):
    """Number of tokens at the beginning that two lists share."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
