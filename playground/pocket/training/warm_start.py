"""Starts a training run from the weights of a published model, possibly with another vocabulary.

The layers are copied unchanged: attention to earlier tokens and copying, which a small model takes longest to learn,
are in them. The embedding of a token in both vocabularies is copied; a new token starts as the mean of the embeddings
of the old tokens that spell it.
"""
import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from playground.errors import Refusal
from playground.pocket import tokenizer as tokens
from playground.pocket.training.train import Earlier, shape


def inherit(model, tokenizer, folder):
    """Load the weights published in `folder` into `model`, which uses `tokenizer`. Returns the `Earlier` training.

    Raises Refusal if there is no model in the folder, or one of another shape.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise Refusal(
            f"There is no model in {folder} to start from: give the folder of a published one, such as "
            "assets/models/pocket.",
            "begin",
        )
    old, spelling = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens.load(folder)
    if _layers(old) != _layers(model):
        raise Refusal(
            f"The model in {folder} has {_layers(old)}, this one {_layers(model)}: omit --begin, or choose another "
            "--size.",
            "begin",
        )
    weights = old.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = carried(weights[name], spelling, tokenizer).to(model.device)
    model.load_state_dict(weights)
    return trained_before(folder)


def carried(embeddings, old, new):
    """Embeddings of the `new` tokenizer's tokens from those of the `old` one's, `embeddings` (old tokens, width)."""
    known = old.get_vocab()
    spelled = {token: [known[token]] if token in known else _pieces(token, old, new) for token in new.get_vocab()}
    ids = new.get_vocab()
    return torch.stack([embeddings[spelled[token]].mean(0) for token in sorted(ids, key=ids.get)])


def _pieces(token, old, new):
    """The old tokens that spell a new one; bytes that are not valid text on their own are spelled byte by byte."""
    known = old.get_vocab()
    pieces = old.encode(new.convert_tokens_to_string([token]), add_special_tokens=False)
    spelled = "".join(old.convert_ids_to_tokens(pieces))
    return pieces if spelled == token else [known[byte] for byte in token]


def _layers(model):
    return {name: size for name, size in shape(model).items() if name != "vocab_size"}


def trained_before(folder):
    """The `Earlier` training of the model published in `folder`."""
    path = Path(folder) / "evaluation.json"
    measured = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before = Earlier(**measured.get("earlier", {}))
    return Earlier(before.tokens + measured.get("tokens_seen", 0), before.minutes + measured.get("minutes", 0))
