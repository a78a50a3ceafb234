"""Training that starts from the weights of a published model, perhaps with another tokenizer."""
import json

import pytest
import torch
from pocket_windows import folder, some, tokenizer  # noqa: F401
from transformers import AutoTokenizer, LlamaForCausalLM

from playground.errors import Refusal
from playground.pocket import architecture as models
from playground.pocket import pipeline as steps
from playground.pocket import tokenizer as tokens
from playground.pocket.__main__ import parse
from playground.pocket.training import train
from playground.pocket.training.warm_start import carried, inherit
from playground.questions.world import TASKS


@pytest.fixture(scope="module")
def published(tmp_path_factory, tokenizer):  # noqa: F811
    """A published nano model that had 5 minutes and 700 tokens, after an earlier one with 2 and 300."""
    folder = tmp_path_factory.mktemp("published")  # noqa: F811
    models.save(models.make("nano", len(tokenizer), seed=3), folder)
    tokenizer.save_pretrained(folder)
    (folder / "evaluation.json").write_text(
        json.dumps(dict(tokens_seen=700, minutes=5, earlier=dict(tokens=300, minutes=2)))
    )
    return folder


@pytest.fixture(scope="module")
def others():
    """Another tokenizer: other texts, more tokens."""
    return tokens.train(
        [f" {item.prompt} {item.answer}" for name in ("stories", "chat") for item in some(TASKS[name], seed=9)],
        size=700,
    )


def embeddings(model):
    return model.get_input_embeddings().weight.detach()


def test_with_the_same_tokens_it_is_the_same_model(published, tokenizer):  # noqa: F811
    fresh = models.make("nano", len(tokenizer), seed=8)
    inherit(fresh, tokenizer, published)
    text = torch.tensor([tokenizer.encode("The red fox")])
    assert torch.equal(
        fresh(text).logits, LlamaForCausalLM.from_pretrained(published, dtype=torch.float32)(text).logits
    )


def test_layers_are_taken_as_they_are_and_rows_of_shared_tokens_are_carried_over(
    published, tokenizer, others
):  # noqa: F811
    fresh, old = (
        models.make("nano", len(others), seed=8),
        LlamaForCausalLM.from_pretrained(published, dtype=torch.float32),
    )
    inherit(fresh, others, published)
    kept = old.state_dict()
    assert all(
        torch.equal(value, kept[name]) for name, value in fresh.state_dict().items() if value.shape == kept[name].shape
    )
    (before, now), shared = (made.get_vocab() for made in (tokenizer, others)), 0
    for token in before.keys() & now.keys():
        assert torch.equal(embeddings(fresh)[now[token]], embeddings(old)[before[token]])
        shared += before[token] != now[token]
    assert shared > 100, "a table that was copied row by row would be found out"


def test_a_new_token_starts_as_the_mean_of_those_that_spelled_it(tokenizer, others):  # noqa: F811
    rows = torch.eye(len(tokenizer))
    made = carried(rows, tokenizer, others)
    new = [token for token in others.get_vocab() if token not in tokenizer.get_vocab()]
    assert len(new) > 100
    for token in new:
        spelled = made[others.get_vocab()[token]].nonzero().flatten().tolist()
        said = others.convert_tokens_to_string([token])
        assert {tokenizer.convert_ids_to_tokens(i) for i in spelled} <= {*tokenizer.tokenize(said), *token}
    assert torch.allclose(made.sum(1), torch.ones(len(made))), "every row is a mean"


def test_earlier_training_is_added_up(published, tokenizer):  # noqa: F811
    assert inherit(models.make("nano", len(tokenizer)), tokenizer, published) == train.Earlier(tokens=1000, minutes=7)


def test_the_command_begins_with_it_and_remembers_that_it_did(published, folder, tmp_path, tokenizer):  # noqa: F811
    out = tmp_path / "out"
    tokenizer.save_pretrained(out / "tokenizer")
    (out / "data-target").symlink_to(folder)
    options = parse(
        ["train", "--size", "nano", "--minutes", "9", "--piece", "0", "--out", str(out), "--begin", str(published)]
    )
    steps.train(options)
    began, old = (LlamaForCausalLM.from_pretrained(path) for path in (out / "target" / "weights", published))
    assert all(map(torch.equal, began.state_dict().values(), old.state_dict().values()))
    assert train.read_state(out / "target")[0].earlier == dict(tokens=1000, minutes=7)


def test_incompatible_models_are_refused_before_training(published, tokenizer, tmp_path):  # noqa: F811
    with pytest.raises(Refusal, match="choose another --size"):
        inherit(models.make("tiny", len(tokenizer)), tokenizer, published)
    with pytest.raises(Refusal, match="no model"):
        inherit(models.make("nano", len(tokenizer)), tokenizer, tmp_path)
    assert AutoTokenizer.from_pretrained(published).get_vocab() == tokenizer.get_vocab()
