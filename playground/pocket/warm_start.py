"""Begin a training with the weights of a published model, though its tokens may be others.

The layers are taken as they are: what a small model needs longest to learn, looking back and copying, sits there. The
row of a token that both vocabularies hold is carried over; a new token starts as the mean of the old tokens that spell
it.
"""
import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from playground.errors import Refusal
from playground.pocket import tokenizer as tokens
from playground.pocket.train import Earlier, shape


def inherit(model, tokenizer, folder):
    """Give `model`, whose tokens are those of `tokenizer`, the weights published in `folder`; returns the `Earlier`
    training.

    Refusal: there is no model, or one of another shape.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise Refusal(
            f"There is no model in {folder} to begin with: give the folder of a published one, such as assets/models/pocket.",
            "begin",
        )
    old, spelling = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens.load(folder)
    if _layers(old) != _layers(model):
        raise Refusal(
            f"The model in {folder} has {_layers(old)}, this one {_layers(model)}: leave --begin away, or choose another --size.",
            "begin",
        )
    weights = old.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = carried(weights[name], spelling, tokenizer).to(model.device)
    model.load_state_dict(weights)
    return _earlier(folder)


def carried(rows, old, new):
    """Embeddings of the `new` tokenizer's tokens from those of the `old` one's. rows: (old tokens, width)."""
    known = old.get_vocab()
    spelled = {token: [known[token]] if token in known else _pieces(token, old, new) for token in new.get_vocab()}
    ids = new.get_vocab()
    return torch.stack([rows[spelled[token]].mean(0) for token in sorted(ids, key=ids.get)])


def _pieces(token, old, new):
    """The old tokens that spell a new one; bytes that are no text of their own are spelled byte by byte."""
    known = old.get_vocab()
    pieces = old.encode(new.convert_tokens_to_string([token]), add_special_tokens=False)
    spelled = "".join(old.convert_ids_to_tokens(pieces))
    return pieces if spelled == token else [known[byte] for byte in token]


def _layers(model):
    return {name: size for name, size in shape(model).items() if name != "vocab_size"}


def _earlier(folder):
    measures = folder / "evaluation.json"
    told = json.loads(measures.read_text(encoding="utf-8")) if measures.exists() else {}
    before = Earlier(**told.get("earlier", {}))
    return Earlier(before.tokens + told.get("tokens_seen", 0), before.minutes + told.get("minutes", 0))
