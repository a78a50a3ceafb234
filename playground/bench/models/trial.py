"""One type tried: its tiny network is loaded, and its texts are compared with those of the library's own `generate`."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from playground.bench.models.tiny_networks import VOCABULARY, tiny_network
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.session import Runner
from playground.engine.model import Model
from playground.errors import Refusal

OUTCOMES = ("works", "refused", "not built", "differs", "fails")
PROMPT, LENGTH = [5, 9, 2, 7, 7, 1, 30, 31, 9, 2], 16
LANES = {  # what a type supports: lanes whose text is that of plain greedy decoding
    "plain": LaneConfig("greedy"),
    "trees": LaneConfig("speculative", {"drafter": "token_recycling", "verifier": "greedy_match"}),
    "policies": LaneConfig("greedy", {}, [("h2o", {})]),
}


@dataclass(frozen=True)
class Finding:
    """What became of one type: one of OUTCOMES, why, and which LANES wrote the library's text."""

    model_type: str
    outcome: str
    reason: str = ""
    supports: tuple[str, ...] = ()


def try_type(model_type: str) -> Finding:
    """Build, load and run the tiny network of a type."""
    try:
        network = tiny_network(model_type)
        expected = library_text(network)
    except Exception as reason:  # the library's constructors and forwards raise anything
        return Finding(model_type, "not built", _said(reason))
    return _try(model_type, network, expected)


def library_text(network: PreTrainedModel) -> list[int]:
    """The greedy text of the library's own `generate`, as token ids."""
    ids = torch.tensor([PROMPT])
    told = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH, min_new_tokens=LENGTH)
    plain = dict(eos_token_id=None, pad_token_id=0, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0)
    return network.generate(ids, **told, **plain)[0, len(PROMPT):].tolist()


def _try(model_type: str, network: PreTrainedModel, expected: list[int]) -> Finding:
    try:
        model = Model(network, tokenizer(), model_type)
        texts = {name: written(lane, model) for name, lane in LANES.items()}
    except Refusal as refusal:
        return Finding(model_type, "refused", str(refusal))
    except Exception as reason:
        return Finding(model_type, "fails", _said(reason))
    supports = tuple(name for name, text in texts.items() if text == expected)
    return Finding(model_type, "works" if "plain" in supports else "differs", "", supports)


def written(recipe: LaneConfig, model: Model) -> list[int]:
    """The tokens a lane writes after PROMPT."""
    assembly = assemble(recipe)
    lane = Lane(PROMPT, {"target": model}, assembly, Limits(0, LENGTH), Silent(model.tokens), {})
    runner = Runner(lane, assembly)
    while not runner.finished:
        runner.advance()
    return runner.lane.main.written


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token id; none ends a text."""
    words = Tokenizer(models.WordLevel({f"w{id}": id for id in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def _said(reason: Exception) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:120]}"
