"""Acceptance of the drafts by the target, measured with the playground's own lanes.

For the draft of the pair, greedy lanes propose several tokens per round, and acceptance is counted from their traces. A
draft with another tokenizer drafts text, which is retokenised and compared with the target's tokens. The target's
greedy text is known there and greedy speculation reproduces it, so the target does not run again.
Source of the text form: string-level exact match, Timor et al. 2025, arXiv 2502.05202.
"""
from collections import defaultdict
from copy import deepcopy

import playground
from playground.decoding.models import Models
from playground.engine.model import Model
from playground.lane_fields import LaneConfig
from playground.pocket.generation import continuations
from playground.trace.lane_metrics import LaneRecord

GUESSES = (3, 5, 8)               # draft tokens per round
IN_TEXT = 5                       # tokens, in its own tokenizer, that a draft with another tokenizer writes per round


def in_lanes(target, draft, tokenizer):
    """The pair as the playground's `Models`, on copies, since a playground `Model` changes its network's attention."""
    return Models(
        *(Model(deepcopy(network), tokenizer, name) for network, name in ((target, "target"), (draft, "draft")))
    )


def lanes(models, prompts, room):
    """Greedy speculation over prompts: {draft tokens per round: acceptance, tokens_per_forward, same}.

    prompts: texts with their role tokens. Acceptance is accepted / tested draft tokens, tokens_per_forward counts
    forwards of the target without the prefill, both over all prompts; `same` is the share of texts equal to those of
    plain greedy decoding.
    """
    configs = [
        LaneConfig("greedy"),
        *(LaneConfig("speculative", extras=[("draft_model", dict(depth=k))]) for k in GUESSES),
    ]
    found = defaultdict(list)
    for prompt in prompts:
        plain, *guessed = playground.compare(configs, prompt, models=models, max_new_tokens=room)
        for guesses, lane in zip(GUESSES, guessed):
            found[str(guesses)].append((lane, lane.token_ids == plain.token_ids))
    return {guesses: _pooled(results) for guesses, results in found.items()}


def _pooled(results):
    """Pooled measures of several lanes. results: (Result, whether its text equals the plain one) of each."""
    trials = [accepted for lane, _ in results for _, accepted in LaneRecord(lane.trace.events).trials()]
    measured = [lane.metrics for lane, _ in results if lane.metrics["tokens_per_target_forward"]]
    forwards = sum(m["target_forwards"] for m in measured)
    written = sum(m["tokens_per_target_forward"] * m["target_forwards"] for m in measured)
    same = sum(same for _, same in results) / len(results)
    return dict(acceptance=sum(trials) / max(1, len(trials)), tokens_per_forward=written / max(1, forwards), same=same)


def in_text(draft, tokenizers, prompts, answers):
    """Acceptance and tokens_per_forward of a draft with another tokenizer, counted in the target's tokens.

    tokenizers: (target's, draft's); prompts: texts with their role tokens; answers: the target's greedy token ids.
    """
    rounds = [found for prompt, answer in zip(prompts, answers) for found in _rounds(draft, tokenizers, prompt, answer)]
    accepted, tested = map(sum, zip(*rounds))
    return dict(acceptance=accepted / max(1, tested), tokens_per_forward=sum(map(len, answers)) / len(rounds))


def _rounds(draft, tokenizers, prompt, answer):
    """Rounds of text-level speculation over one known answer: yields (accepted, tested)."""
    ours, theirs = tokenizers
    at = 0
    while at < len(answer):
        read = theirs.encode(prompt + ours.decode(answer[:at]), add_special_tokens=False)
        text = theirs.decode(continuations(draft, [read], IN_TEXT)[0])
        drafted = ours.encode(text, add_special_tokens=False)[:len(answer) - at]
        accepted = agreeing(drafted, answer[at:])
        yield accepted, min(accepted + 1, len(drafted))
        at += accepted + 1


def agreeing(one, other):
    """Length of the common prefix of two lists."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
