"""Every text that a model reads has tokens, and the network has an embedding of each of them."""
from __future__ import annotations

import pytest
from toys import byte_tokenizer, network
from transformers import PreTrainedTokenizerFast

from playground import compare, run, score
from playground.contract.lane_config import LaneConfig
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.engine.model import Model
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

BEYOND = "<think>"
TEXT = f"a {BEYOND} b"


@pytest.fixture(scope="module")
def models() -> Models:
    """A network with fewer embeddings than its tokenizer has tokens."""
    tokenizer = byte_tokenizer(merges=0)
    rows = len(tokenizer)
    tokenizer.add_tokens([BEYOND])
    return Models(Model(network(vocabulary=rows), tokenizer, "small"), None)


@pytest.mark.parametrize("arguments", [
    {"prompt": TEXT},
    {"prompt": "a", "context": TEXT},
    {"prompt": TEXT, "chat": True},
    {"prompt": "a", "chat": True, "system": TEXT},
    {"prompt": "a", "chat": True, "before": [(TEXT, "b")]},
    {"prompt": "a", "chat": True, "before": [("b", TEXT)]},
], ids=lambda arguments: " ".join(arguments))
def test_a_prompt_with_a_token_that_the_network_does_not_know_is_refused(models, arguments):
    with pytest.raises(Refusal, match="'<think>' in it, token 259 of .*embeddings of 259 tokens") as refused:
        run("greedy", models=models, max_new_tokens=2, **arguments)
    assert refused.value.about == "prompt"
    if not arguments.keys() - {"prompt"}:
        with pytest.raises(Refusal, match="'<think>' in it"):
            score(TEXT, models=models)


@pytest.mark.parametrize("strategy, extra", [
    ("greedy", ("cfg", {"negative": TEXT})),
    ("greedy", ("icd", {"instruction": TEXT})),
    ("greedy", ("knn_lm", {"text": TEXT})),
    ("speculative", ("rest", {"corpus": TEXT})),
    ("speculative", ("ngram_cache", {"corpus": TEXT})),
    ("greedy", ("logit_bias", {"biases": f"{BEYOND}: 1"})),
    ("greedy", ("bad_words", {"words": BEYOND})),
])
def test_other_texts_of_a_lane_are_checked_as_the_prompt_is(models, strategy, extra):
    try:
        said = run(strategy, "a", models=models, extras=[extra], max_new_tokens=8).message
    except Refusal as refused:  # before the lane begins
        said = str(refused)
    assert said.startswith("The text has '<think>' in it")


def test_the_highest_embedding_is_a_token(models):
    tokens = models.target.tokens
    assert Tokens(tokens.tokenizer, 260).encode(BEYOND) == [259]
    with pytest.raises(Refusal):
        tokens.encode_continuation(BEYOND)


@pytest.mark.parametrize("forced", [[259], [-1]])
def test_forced_tokens_have_embeddings(models, forced):
    with pytest.raises(Refusal, match="begins with token"):
        compare([LaneConfig("greedy", forced=forced)], "a", models=models, max_new_tokens=2)


class Deaf(PreTrainedTokenizerFast):
    """A tokenizer that makes no token of any text."""

    def __call__(self, text, **options):
        return {"input_ids": []}


def test_a_prompt_without_tokens_is_refused(models):
    deaf = Deaf(tokenizer_object=models.target.tokenizer.backend_tokenizer)
    silent = Model(network(vocabulary=259), deaf, "silent")
    with pytest.raises(Refusal, match="makes no token of this prompt"):
        Prompt("Hello").encode(silent)
