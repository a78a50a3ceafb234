"""One type tried: its tiny network is loaded, and its texts are compared with those of the library's own `generate`."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from playground.bench.models.tiny_networks import VOCABULARY, tiny_network
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Failed

WORKS, REFUSED, NOT_BUILT, DIFFERS, FAILS = OUTCOMES = ("works", "refused", "not built", "differs", "fails")
PROMPT, LENGTH = [5, 9, 2, 7, 7, 1, 30, 31, 9, 2], 16  # past the windows of the tiny networks at once
LANES = {  # each writes the text of plain greedy decoding, by another code path
    "plain": LaneConfig("greedy"),
    "trees": LaneConfig("speculative", {"drafter": "token_recycling", "verifier": "greedy_match"}),
    "policies": LaneConfig("greedy", {}, [("h2o", {})]),  # its budget is larger than the text
}


@dataclass(frozen=True)
class Finding:
    """Result for one type: one of OUTCOMES, the reason, which LANES wrote the library's text, and whose attention ran:
    the playground's or the library's.
    """

    model_type: str
    outcome: str
    reason: str = ""
    supports: tuple[str, ...] = ()
    attention: str = ""


def try_type(model_type: str) -> Finding:
    """Build, load and run the tiny network of a type."""
    try:
        network = tiny_network(model_type)
        expected = library_text(network)
    except Exception as reason:  # the library's constructors and forwards raise anything
        return Finding(model_type, NOT_BUILT, _error_text(reason))
    return try_network(model_type, network, expected)


def try_network(model_type: str, network: PreTrainedModel, expected: list[int]) -> Finding:
    """Load a network and compare the text of each lane with the expected one."""
    try:
        model = Model(network, tokenizer(), model_type)
        texts = {name: written(lane, model) for name, lane in LANES.items()}
    except Refusal as refusal:
        return Finding(model_type, REFUSED, str(refusal))
    except Exception as reason:  # whatever people would see as a traceback
        return Finding(model_type, FAILS, _error_text(reason))
    wrong = [name for name, text in texts.items() if text not in (None, expected)]
    supports = tuple(name for name, text in texts.items() if text == expected)
    attention = "playground" if model.attends else "library"
    return Finding(model_type, DIFFERS if wrong else WORKS, ", ".join(wrong), supports, attention)


def library_text(network: PreTrainedModel) -> list[int]:
    """The greedy text of the library's own `generate`, as token ids."""
    ids = torch.tensor([PROMPT])
    options = dict(do_sample=False, num_beams=1, max_new_tokens=LENGTH, eos_token_id=None, pad_token_id=0)
    return network.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT):].tolist()


def written(config: LaneConfig, model: Model) -> list[int] | None:
    """The tokens a lane writes after PROMPT; None if the lane refuses the model. Raises RuntimeError if it fails."""
    assembly, events = assemble(config), []
    try:
        lane = Lane(PROMPT, {"target": model}, assembly, Limits(0, LENGTH), Silent(model.tokens), {})
        runner = Runner(lane, assembly)
        while not runner.finished:
            events += runner.advance()
    except Refusal:
        return None
    messages = [event.message for event in events if isinstance(event, Failed)]
    if any("unexpected error" in message for message in messages):
        raise RuntimeError(messages[0])
    return None if messages else runner.lane.main.written


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token id; none ends a text."""
    words = Tokenizer(models.WordLevel({f"w{id}": id for id in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def _error_text(reason: Exception) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:120]}"
